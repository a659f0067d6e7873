"""Shipped performance recipes of Megatron Bridge, built and finalised without a GPU and without a download."""

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any
from unittest import mock

from packaging.version import Version

from tests.search_spaces.bridge import stand_ins

_QWEN = {
    "vocab_size": 151936, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "num_key_value_heads": 4,
}  # fmt: skip
# Model card -> (configuration class of transformers, architecture, what differs from the class's defaults). The cards'
# config.json; recipes of models that are not here are skipped.
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "deepseek-ai/DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {}),
    "moonshotai/Kimi-K2-Instruct": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {
            "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
            "vocab_size": 163840, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        },
    ),
    "Qwen/Qwen3-30B-A3B": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {**_QWEN, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144,
         "moe_intermediate_size": 768},
    ),
    "Qwen/Qwen3-235B-A22B": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {**_QWEN, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288,
         "moe_intermediate_size": 1536},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {}),
    "openai/gpt-oss-20b": ("GptOssConfig", "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "openai/gpt-oss-120b": ("GptOssConfig", "GptOssForCausalLM", {}),
}  # fmt: skip


class Unknown(LookupError):
    """A recipe of a model whose card is not in `MODELS`."""


def load() -> None:
    """Import Bridge on stand-ins and take model cards from `MODELS`."""
    stand_ins.install()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    bridge = importlib.import_module("megatron.bridge.models.conversion.auto_bridge").AutoBridge
    transformers = importlib.import_module("transformers")

    def from_card(card: str, *_: Any, **__: Any) -> Any:
        if card not in MODELS:
            raise Unknown(card)
        kind, architecture, facts = MODELS[card]
        config = getattr(transformers, kind)(**facts)
        config.architectures = [architecture]
        return bridge.from_hf_config(config)

    bridge.from_hf_pretrained = staticmethod(from_card)


def build(family: str, recipe: str) -> Any:
    """A ConfigContainer as the recipe returns it. Raises Unknown."""
    config = getattr(importlib.import_module(f"megatron.bridge.perf_recipes.{family}"), recipe)()
    if getattr(config.dataset, "fast_cache_load", False):
        config.dataset.path_to_cache = "cache"  # what a launch adds
    return config


def refusal(config: Any, gpu: str, ranks: int, env: Mapping[str, str] | None = None) -> str | None:
    """Run Bridge's whole chain on it, in place; why it refuses, or None."""
    update = importlib.import_module("megatron.bridge.training.config").runtime_config_update
    world = {"WORLD_SIZE": str(ranks), "RANK": "0", **(env or {})}
    with mock.patch.dict(os.environ, world), stand_ins.device(gpu), contextlib.redirect_stdout(io.StringIO()):
        try:
            update(config)
        except Exception as error:  # noqa: BLE001  # whatever it raises is its verdict
            return f"{type(error).__name__}: {error}"
    return None


def version(text: str) -> Version:
    """As Megatron-Core compares them."""
    return Version(text)


def set_path(config: Any, path: str, value: Any) -> None:
    """`config.a.b = value` for "a.b"."""
    *owners, name = path.split(".")
    for owner in owners:
        config = getattr(config, owner)
    if not hasattr(config, name):
        raise AttributeError(f"{type(config).__name__} has no {name}")
    setattr(config, name, value)
