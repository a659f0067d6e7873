"""Megatron's fused latent attention as judge, up to the point where it would build its linears."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, target
from tests.search_spaces.oracle_parallelism import Passed, config_of, refusal


def fused_projections(case: Case) -> str | None:
    """Why the real module refuses to fuse the down projections, or None."""

    def keep_config(self: Any, config: Any, **_: Any) -> None:
        self.config = config

    with target(case):
        from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MultiLatentAttention

        with (
            mock.patch.object(MultiLatentAttention, "__init__", keep_config),
            mock.patch.object(FusedMLASelfAttention, "_resolve_qk_norm_config", side_effect=Passed),
        ):
            try:
                FusedMLASelfAttention(config_of(case), None, 1, pg_collection=SimpleNamespace())
            except Passed:
                return None
            except REFUSALS as error:
                return refusal(error)
    return "it did not come to its linears"


def split_projections(case: Case) -> str | None:
    """Why the real module refuses to split what a tensor-parallel rank computed of the fused projection, or None."""
    import torch

    model, ranks = case.model, case.layout.tensor
    queries, rest = model.q_lora_rank or 0, (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)
    with target(case):
        from megatron.core.transformer import multi_latent_attention as real

        widths = queries // ranks + rest // ranks
        layer = SimpleNamespace(
            config=config_of(case), tp_group=None, linear_qkv_down_proj=lambda _: (torch.zeros(1, widths), None)
        )
        pretended: dict[str, Any] = dict.fromkeys(
            ("gather_from_tensor_model_parallel_region", "scatter_to_sequence_parallel_region"), lambda part: part
        )
        with mock.patch.multiple(real, get_pg_size=lambda _: ranks, **pretended):
            try:
                real.FusedMLASelfAttention._qkv_down_projection(layer, None)
            except REFUSALS as error:
                return refusal(error)
    return None
