"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.examples.common import BLACKWELL, FLEX, H8

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "DSP-01": (case(dispatcher="alltoall_seq"), case(dispatcher="alltoall")),
    "DSP-02": (case(H8, **FLEX, backend="nvshmem"), case(H8, **FLEX, backend="hybridep")),
    "DSP-05": (case(dispatcher="alltoall", backend="deepep"), case(dispatcher="flex", backend="deepep")),
    "DSP-07": (case(H8, **FLEX, backend="deepep"), case(H8, **FLEX, backend="deepep", ep=2)),
    "DSP-08": (case(H8, **FLEX, stack={}), case(H8, **FLEX, stack={"deep_ep": "1.2.1"})),
    "DSP-11": (
        case(H8, **FLEX, backend="ncclep"),
        case(H8, **FLEX, backend="ncclep", moe_expert_rank_capacity_factor=1.5),
    ),
    "DSP-15": (
        case(H8, **FLEX, backend="ncclep", stack={"nccl": "2.30.4"}),
        case(H8, **FLEX, backend="ncclep", stack={"nccl": "2.30.4", "transformer_engine": "2.18.0"}),
    ),
    "DSP-17": (case(gpus(12), **FLEX, ep=12), case(gpus(16), **FLEX, ep=16)),
    "DSP-18": (
        case(H8, **FLEX, backend="hybridep", fp8="hybrid"),
        case(H8, **FLEX, backend="hybridep", fp8="hybrid", model={"hidden_size": 512}),
    ),
    "DSP-20": (case(gpus(4, "GB200 sm_100"), **FLEX, ep=4), case(BLACKWELL, **FLEX, ep=4)),
}
