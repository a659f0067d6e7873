"""Megatron's token dispatchers and MoE layer as judges, on a CPU; the libraries behind flex are faked."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, config_arguments, config_class, target
from tests.search_spaces.oracle_parallelism import config_of, fake_world, layer_refusal, refusal

__all__ = ["flex_refusal", "latent_refusal", "layer_refusal", "receive_rows"]
# What token_dispatcher.py imports of each library; None where it is not installed.
LIBRARIES = {"deep_ep": "fused_dispatch", "hybrid_ep": "hybrid_ep_dispatch", "nccl_ep": "nccl_ep_dispatch"}


def _nothing(*_: Any, **__: Any) -> None:
    return None


def flex_refusal(case: Case) -> str | None:
    """Why MoEFlexTokenDispatcher cannot be built with the libraries that the case has, or None."""
    absent = {package for package in LIBRARIES if str(case.knobs.get(package, "")).startswith("not")}
    with fake_world(case), mock.patch.dict("os.environ", case.env):
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        faked: dict[str, Any] = {name: None if package in absent else _nothing for package, name in LIBRARIES.items()}
        config, groups = config_of(case), get_default_pg_collection()
        local = config.num_moe_experts // case.layout.expert
        with (
            mock.patch.multiple(token_dispatcher, set_deepep_num_sms=_nothing, **faked),
            mock.patch("torch.cuda.get_device_capability", return_value=case.compute_capability),
        ):
            try:
                token_dispatcher.MoEFlexTokenDispatcher(local, list(range(local)), config, groups)
            except REFUSALS as error:
                return refusal(error)
    return None


def latent_refusal(case: Case) -> str | None:
    """Why the real MoELayer.preprocess refuses in training, or None. Its projections need Transformer Engine."""
    with fake_world(case):
        from megatron.core.transformer.moe.moe_layer import MoELayer

        sent = SimpleNamespace(dispatch_preprocess=lambda hidden, _, probs: (hidden, probs))
        layer = SimpleNamespace(
            config=config_of(case), shared_expert_overlap=case.on("moe_shared_expert_overlap"), training=True,
            token_dispatcher=sent, fc1_latent_proj=lambda hidden: (hidden, None),
        )  # fmt: skip
        try:
            MoELayer.preprocess.__wrapped__(layer, None, None, None)
        except REFUSALS as error:
            return refusal(error)
    return None


def receive_rows(case: Case, tokens: int) -> int:
    """Rows of the buffer that the real manager of ncclep or HybridEP makes for `tokens` of each rank."""
    import torch

    asked: dict[str, int] = {}
    with target(case):
        from megatron.core.transformer.moe import token_dispatcher as real

        config = config_class(case)(**config_arguments(case))
        hybrid, split = case.text("moe_flex_dispatcher_backend") == "hybridep", case.layout.expert_tensor
        owner: Any = real._HybridEPManager if hybrid else real._NCCLEPManager
        # As MoEFlexTokenDispatcher gives them (token_dispatcher.py:1779); of ncclep's, what sizes the buffer.
        manager = SimpleNamespace(
            config=config, num_experts=split * case.model.num_moe_experts, drop_and_pad=False, _bootstrapped=False,
            moe_expert_rank_capacity_factor=config.moe_expert_rank_capacity_factor,
            rank_capacity_factor=config.moe_expert_rank_capacity_factor, num_local_tokens=tokens, alignment=0,
            router_topk=split * case.model.moe_router_topk, group=None, hidden_dim=config.hidden_size, zero_copy=False,
        )  # fmt: skip
        routing = torch.zeros(tokens, manager.num_experts)
        if hybrid:
            owner.setup_metadata(manager, routing, routing)
            return int(manager.num_permuted_tokens)
        with mock.patch.object(real, "ensure_nccl_ep_bootstrapped", lambda _, **sizes: asked.update(sizes)):
            owner._ensure_bootstrap(manager)
    return asked["recv_capacity_per_rank"]
