"""The real stack as judge: builds Megatron-Core's own objects for a case, on a CPU, and says why they refuse.

The target's Transformer Engine, torch and GPU are injected: this machine has neither a GPU nor the package. A rule's
oracle is `config_refusal` where its source is one of Megatron's config files; another function is named in the `ORACLE`
table of its area (`tests/search_spaces/examples`), or an `Unrun` that says why nothing real can be asked here.
"""

import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple
from unittest import mock

from packaging.version import Version

from search_spaces.candidate import modules
from search_spaces.rules import Case

CONFIG_FILES = ("core/transformer/transformer_config.py", "core/model_parallel_config.py")
LISTS = ("recompute_modules", "cuda_graph_modules", "offload_modules")
REFUSALS = (ValueError, AssertionError, RuntimeError, ImportError, TypeError)
ENGINE = "2.20.2"


class Unrun(NamedTuple):
    """Nothing real can be asked on a CPU; `why` names what it would need."""

    why: str


Oracle = Callable[[Case], str | None] | Unrun


def load_megatron(module: str = "megatron.core.transformer.transformer_config") -> None:
    """Import a module of Megatron, or one that needs it, without inductor: that saves 3.5 CPU-seconds of 10."""
    import torch

    def compiled(model: Any = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    with mock.patch.object(torch, "compile", compiled), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)


@contextmanager
def target(case: Case) -> Iterator[None]:
    """As if the target's Transformer Engine (2.20.2 where the case names no stack) were installed."""
    load_megatron()
    engine = ENGINE if case.stack is None else case.stack.transformer_engine or "0.0"
    with mock.patch("megatron.core.utils.get_te_version", return_value=Version(engine)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def config_arguments(case: Case) -> dict[str, Any]:
    """Arguments of the real TransformerConfig: the model's facts, today's MoE decoders' settings, then the knobs."""
    import torch

    owner = config_class(case)
    known = {field.name for field in fields(owner)}
    model, bf16 = case.model, case.training.params_dtype == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    facts: dict[str, Any] = {name: getattr(model, name) for name in type(model).model_fields if name in known}
    knobs: dict[str, Any] = {name: value for name, value in case.knobs.items() if name in known}
    knobs |= {name: list(modules(knobs[name])) for name in LISTS if name in knobs}
    knobs |= {name: json.loads(text) for name, text in knobs.items() if isinstance(text, str) and text[:1] == "["}
    if knobs.get("cuda_graph_impl") == "full_iteration":
        knobs.setdefault("cuda_graph_modules", [])
    freq = [0] * model.first_dense_layers + [1] * (model.num_layers - model.first_dense_layers)
    own = {
        "add_bias_linear": False, "gated_linear_unit": True, "bf16": bf16, "params_dtype": dtype,
        "pipeline_dtype": dtype, "moe_layer_freq": freq, "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return facts | own | knobs


def config_class(case: Case) -> Any:
    """Megatron's class for this model."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return MLATransformerConfig if case.model.multi_latent_attention else TransformerConfig


def config_refusal(case: Case) -> str | None:
    """Why the real configuration refuses, or None."""
    with target(case):
        try:
            config_class(case)(**config_arguments(case))
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None
