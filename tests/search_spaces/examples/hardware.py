"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces import oracle_fusions as real
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import AMPERE, BLACKWELL, CUTLASS, H2, H8, MLA
from tests.search_spaces.oracle import Oracle

CUTEDSL = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "CPU-01": (case(dispatcher="flex"), case(H2, dispatcher="flex")),
    "CPU-02": (case(fp8="hybrid"), case(H2, fp8="hybrid")),
    "CPU-03": (case(graphs="local"), case(graphs="none")),
    "CPU-04": (case(overlap=True), case(overlap=False)),
    "CPU-05": (case(cp=2), case(cp=1)),
    "CPU-06": (case(modules="core_attn+moe_act"), case(modules="core_attn")),
    "CPU-07": (case(tp_comm_overlap=True), case(H2, tp_comm_overlap=True)),
    "CPU-08": (case(fine_grained_activation_offloading=True), case(fine_grained_activation_offloading=False)),
    "CPU-09": (case(env=CUTLASS), case(H2, env=CUTLASS)),
    "CPU-10": (case(moe_grouped_gemm=True), case(moe_grouped_gemm=False)),
    "CPU-11": (case(tp=2, model=MLA), case(H2, tp=2, model=MLA)),
    "DUP-15": (case(H2, env=CUTLASS), case(H2, env=CUTLASS, moe_grouped_gemm=True)),
    "DUP-14": (case(BLACKWELL, env=CUTLASS), case(H8, env=CUTLASS)),
    "DUP-13": (case(H8, env=CUTLASS, fp8="hybrid"), case(H8, env=CUTLASS)),
    "HW-06": (
        case(H8, env=CUTEDSL, use_transformer_engine_op_fuser=True),
        case(BLACKWELL, env=CUTEDSL, use_transformer_engine_op_fuser=True),
    ),
    "HW-08": (case(AMPERE, dispatcher="flex", backend="hybridep"), case(H8, dispatcher="flex", backend="hybridep")),
}
ORACLE: dict[str, Oracle] = {"CPU-10": real.one_by_one}
