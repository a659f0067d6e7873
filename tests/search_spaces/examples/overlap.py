"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.common import H2, H8, OVERLAP

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "OVL-01": (case(H8, overlap=True, stack={"torch": "2.5.1"}), case(H8, overlap=True, stack={"torch": "2.6.0"})),
    "OVL-02": (case(H8, overlap=True, pp=2), case(H8, overlap=True, pp=2, vpp=2)),
    "OVL-03": (case(H8, overlap=True), case(H8, overlap=True, ep=2)),
    "OVL-04": (case(H8, overlap=True), case(H8, overlap=True, dispatcher="alltoall")),
    "OVL-05": (case(H8, overlap=True, recompute="full"), case(H8, overlap=True, recompute="selective")),
    "OVL-06": (case(H8, overlap=True, method="block"), case(H8, method="block")),
    "OVL-07": (case(H8, overlap=True, layers=1), case(H8, overlap=True, layers=None)),
    "OVL-08": (case(H8, overlap=True, modules="layernorm+moe"), case(H8, overlap=True, modules="layernorm+moe_act")),
    "OVL-09": (case(H8, overlap=True, training={"params_dtype": "fp32"}), case(H8, overlap=True)),
    "OVL-11": (
        case(H8, overlap=True, graphs="transformer_engine", captured="attn+moe"),
        case(H8, overlap=True, graphs="transformer_engine", captured="attn+moe_router"),
    ),
    "OVL-12": (
        case(H8, overlap=True, graphs="transformer_engine"),
        case(H8, overlap=True, graphs="transformer_engine", captured="attn"),
    ),
    "OVL-13": (case(H8, delay=True), case(H8, delay=True, overlap=True)),
    "OVL-14": (
        case(H8, delay=True, graphs="transformer_engine", stack={"transformer_engine": "2.9.0"}),
        case(H8, delay=True, graphs="transformer_engine", stack={"transformer_engine": "2.10.0"}),
    ),
    "TRAP-29": (case(H2, **OVERLAP, mbs=8), case(H2, **OVERLAP, mbs=4)),
    "DUP-02": (case(pp=2, overlap_grad_reduce=True), case(tp=2, etp=1, overlap_grad_reduce=True)),
    "DUP-03": (case(pp=2, use_distributed_optimizer=True), case(use_distributed_optimizer=True)),
    "OPT-01": (
        case(use_distributed_optimizer=True, training={"optimizer": "sgd"}),
        case(use_distributed_optimizer=False, training={"optimizer": "sgd"}),
    ),
}
