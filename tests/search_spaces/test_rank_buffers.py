"""RUN-05 against the buffers of Megatron's own managers: it refuses those that a step can overflow, no others."""

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.rules import ALL_RULES
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.oracle_dispatcher import receive_rows

RULE = next(rule for rule in ALL_RULES if rule.id == "RUN-05")
TOKENS = 1024
BACKENDS: dict[str, dict[str, KnobValue]] = {
    "ncclep": {}, "hybridep": {"use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True},
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_a_buffer_is_accepted_where_all_tokens_of_the_group_fit(backend: str, ep: int, etp: int, factor: float) -> None:
    made = case(
        gpus(ep * etp), dispatcher="flex", backend=backend, ep=ep, etp=etp, tp=etp, sp=etp > 1,
        moe_expert_rank_capacity_factor=factor, **BACKENDS[backend],
    )  # fmt: skip
    # Each token of each rank of the group, to as many local experts as the router chooses.
    most = ep * etp * TOKENS * made.model.moe_router_topk
    assert (RULE.refusal(made) is None) == (receive_rows(made, TOKENS) >= most)
