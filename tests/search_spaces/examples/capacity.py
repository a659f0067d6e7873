"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces import oracle_capacity as real
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import H8
from tests.search_spaces.oracle import Oracle

HYBRID: dict[str, KnobValue] = {
    "dispatcher": "flex", "backend": "hybridep", "ep": 8, "use_transformer_engine_op_fuser": True,
}  # fmt: skip
NCCL: dict[str, KnobValue] = {"dispatcher": "flex", "backend": "ncclep", "ep": 8}
STASH: dict[str, KnobValue] = {"moe_paged_stash": True}
BUDGET: dict[str, KnobValue] = {"moe_expert_rank_capacity_factor": 1.5}
TWO_KINDS: dict[str, KnobValue] = {"moe_router_load_balancing_type": '["aux_loss", "seq_aux_loss"]'}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "CAP-01": (
        case(H8, moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0),
        case(H8, moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0),
    ),
    "CAP-02": (
        case(H8, moe_pad_expert_input_to_capacity=True),
        case(H8, moe_pad_expert_input_to_capacity=True, moe_expert_capacity_factor=1.0),
    ),
    "STA-01": (case(H8, **HYBRID, **STASH), case(H8, **HYBRID, **STASH, **BUDGET)),
    "TRAP-12": (
        case(H8, **NCCL, **STASH, **BUDGET),
        case(H8, **NCCL, **STASH, **BUDGET, use_transformer_engine_op_fuser=True),
    ),
    "TRAP-03": (case(H8, **(HYBRID | {"dispatcher": "alltoall"}), **BUDGET), case(H8, **HYBRID, **BUDGET)),
    "TRAP-11": (
        case(H8, **HYBRID, moe_expert_rank_capacity_factor=1.5),
        case(H8, **HYBRID, moe_expert_rank_capacity_factor=1.5, moe_router_force_load_balancing=True),
    ),
    "CAP-03": (
        case(H8, moe_router_topk=1, moe_router_pre_softmax=False),
        case(H8, moe_router_topk=1, moe_router_pre_softmax=True),
    ),
    "CAP-04": (
        case(H8, moe_router_group_topk=2),
        case(H8, moe_router_group_topk=2, moe_router_num_groups=2),
    ),
    "CAP-04b": (
        case(H8, moe_router_group_topk=1, moe_router_num_groups=8),
        case(H8, moe_router_group_topk=1, moe_router_num_groups=4),
    ),
    "CAP-05": (
        case(H8, moe_router_enable_expert_bias=True),
        case(H8, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
    ),
    "CAP-05b": (
        case(H8, moe_router_score_function="sqrtsoftplus", stack={"megatron_core": "0.17.0"}),
        case(H8, moe_router_score_function="sigmoid", stack={"megatron_core": "0.17.0"}),
    ),
    "CAP-06": (
        case(H8, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.01),
        case(H8, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0),
    ),
    "CAP-06b": (
        case(H8, moe_router_load_balancing_type="quantile_balancing", moe_router_fusion=True),
        case(H8, moe_router_load_balancing_type="quantile_balancing", moe_router_fusion=False),
    ),
    "CAP-07": (
        case(H8, **TWO_KINDS, moe_aux_loss_coeff="[0.1]"),
        case(H8, **TWO_KINDS, moe_aux_loss_coeff="[0.1, 0.1]"),
    ),
}
ORACLE: dict[str, Oracle] = {
    "TRAP-03": real.unused_budget,
    "TRAP-12": real.unused_stash,
    "CAP-04b": real.routing_refusal,
    "CAP-06": real.routing_refusal,
    "CAP-06b": real.routing_refusal,
}
