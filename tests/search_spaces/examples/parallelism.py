"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case, cpus
from tests.search_spaces.examples.common import H2

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "PAR-01": (case(tp=2, pp=2), case(cpus(4), tp=2, pp=2)),
    "PAR-02": (case(tp=2, ep=2), case(tp=2, ep=2, etp=1)),
    "PAR-03": (case(cpus(3), ep=3), case(cpus(4), ep=4)),
    "PAR-05": (case(cpus(8), tp=8), case(cpus(4), tp=4)),
    "PAR-06": (case(cpus(3), tp=3), case(cpus(4), tp=4)),
    "PAR-08": (case(sp=True), case(sp=True, tp=2)),
    "PAR-09": (case(tp=2), case(tp=2, sp=True)),
    "PAR-10": (case(vpp=2), case(vpp=2, pp=2)),
    "PAR-12": (case(cpus(3), pp=3), case(cpus(4), pp=4)),
    "PAR-13": (case(pp=2, vpp=4), case(pp=2, vpp=2)),
    "PAR-18": (case(H2, cp=2, training={"sequence_length": 126}), case(H2, cp=2, training={"sequence_length": 124})),
    "PAR-23": (case(mbs=16), case(mbs=8)),
    "PAR-24": (case(pp=2, vpp=2, mbs=16), case(pp=2, vpp=2, mbs=8)),
    "PAR-27": (case(pp=2, vpp=2), case(pp=2, vpp=2, p2p=True)),
    "PAR-30": (case(pp=2, p2p=True), case(pp=2, vpp=2, p2p=True)),
    "SHP-01": (case(tp=2, model={"vocab_size": 511}), case(tp=2, model={"vocab_size": 510})),
    "SHP-02": (
        case(tp=2, sp=True, training={"sequence_length": 127}),
        case(tp=2, sp=True, training={"sequence_length": 126}),
    ),
    "SHP-03": (case(tp=2, etp=2, model={"moe_ffn_hidden_size": 127}), case(tp=2, model={"moe_ffn_hidden_size": 126})),
    "SHP-04": (
        case(tp=2, model={"first_dense_layers": 1, "ffn_hidden_size": 255}),
        case(tp=2, model={"first_dense_layers": 0, "ffn_hidden_size": 255}),
    ),
    "DUP-01": (case(pp=2, vpp=1), case(pp=2, vpp=2)),
}
