"""The real router and dispatchers as judges of capacity and routing rules, on a CPU and without process groups."""

from types import SimpleNamespace
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, config_arguments, config_class, target


def routing_refusal(case: Case) -> str | None:
    """Why the real TopKRouter refuses to route four tokens, or None."""
    import torch

    with target(case), mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        from megatron.core.transformer.moe.router import TopKRouter

        groups = dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"), None)
        try:
            config = config_class(case)(**config_arguments(case), perform_initialization=False)
            router = TopKRouter(config, SimpleNamespace(**groups))
            router.routing(torch.randn(4, 1, case.model.num_moe_experts))
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def unused_budget(case: Case) -> str | None:
    """Only the flex dispatcher has a budget of tokens for a rank to check."""
    with target(case):
        from megatron.core.transformer.moe import token_dispatcher as real

        chosen = {
            "allgather": real.MoEAllGatherTokenDispatcher,
            "alltoall": real.MoEAlltoAllTokenDispatcher,
            "flex": real.MoEFlexTokenDispatcher,
        }[case.text("moe_token_dispatcher_type", "allgather")]
    return None if hasattr(chosen, "check_over_budget") else f"{chosen.__name__} has no budget"


def unused_stash(case: Case) -> str | None:
    """The stash is entered in the fused forward of the experts; `forward` calls it with the op fuser only."""
    with target(case):
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        fused = case.on("use_transformer_engine_op_fuser")
        names = (TEGroupedMLP._fused_forward if fused else TEGroupedMLP.forward).__code__.co_names
    return None if "paged_stash_group_start" in names else "the forward of these experts has no stash"
