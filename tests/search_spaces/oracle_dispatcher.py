"""Megatron's token dispatchers and MoE layer as judges, on a CPU; the libraries behind flex are faked."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS
from tests.search_spaces.oracle_parallelism import config_of, fake_world, layer_refusal, refusal

__all__ = ["flex_refusal", "latent_refusal", "layer_refusal"]
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
