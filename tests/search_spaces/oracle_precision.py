"""Megatron's own making of FP8 and FP4 recipes, and its data-parallel and optimizer configurations, as judges.

Its recipe functions exist only where Transformer Engine is imported: a private copy of their modules is loaded beside
stand-ins of that package, whose recipes remember what they were given.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getsourcefile
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, config_arguments, config_class, target

ENGINE_MODULES = (
    "transformer_engine.pytorch", "transformer_engine.pytorch.float8_tensor", "transformer_engine.pytorch.fp8",
    "transformer_engine.pytorch.tensor", "transformer_engine.pytorch.tensor.grouped_tensor",
    "transformer_engine.pytorch.tensor.mxfp8_tensor", "transformer_engine.pytorch.tensor.nvfp4_tensor",
    "transformer_engine.pytorch.tensor.utils", "transformer_engine.pytorch.tensor.float8_tensor",
    "transformer_engine_torch", "transformer_engine.common", "megatron.core.extensions.transformer_engine",
)  # fmt: skip


class _Recipe:
    """A recipe of Transformer Engine that remembers its arguments."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class _StandIn(ModuleType):
    """A module that has every class it is asked for; each is a recipe."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Recipe,), {})


class _FusedAdam:
    """The arguments that Megatron looks for in Transformer Engine's optimizer."""

    def __init__(
        self,
        master_weight_dtype: object,
        exp_avg_dtype: object,
        exp_avg_sq_dtype: object,
        use_decoupled_grad: object,
    ) -> None: ...


def engine_optimizers() -> dict[str, ModuleType]:
    """The modules by which Megatron finds Transformer Engine's optimizer."""
    engine: Any = ModuleType("transformer_engine")
    optimizers: Any = ModuleType("optimizers")
    optimizers.FusedAdam = _FusedAdam
    return {
        "transformer_engine": engine,
        "transformer_engine.pytorch": ModuleType("pytorch"),
        "transformer_engine.pytorch.optimizers": optimizers,
    }


@contextmanager
def _engine() -> Iterator[None]:
    found: dict[str, Any] = engine_optimizers()
    recipes: Any = _StandIn("recipe")
    recipes.Format = SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")
    found["transformer_engine"].common = SimpleNamespace(recipe=recipes)
    with mock.patch.dict(sys.modules, found | {name: _StandIn(name) for name in ENGINE_MODULES}):
        yield


def _copy(module: ModuleType) -> Any:
    path = getsourcefile(module)
    assert path is not None
    spec = spec_from_file_location(f"{module.__name__}_beside_an_engine", path)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _recipe(case: Case) -> _Recipe:
    """The recipe the real function makes. Raises what it raises."""
    with target(case):
        from megatron.core import fp4_utils, fp8_utils

        config = config_class(case)(**config_arguments(case))
        with _engine():
            if case.text("fp4"):
                return _copy(fp4_utils).get_fp4_recipe(config)  # type: ignore[no-any-return]
            return _copy(fp8_utils).get_fp8_recipe(config)  # type: ignore[no-any-return]


def recipe_refusal(case: Case) -> str | None:
    """Why Megatron makes no recipe, or None."""
    try:
        _recipe(case)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


def lost_wgrad(case: Case) -> str | None:
    """Whether the recipe knows that weight gradients stay out of FP8, as asked."""
    kept = "override_linear_precision" in _recipe(case).arguments
    return None if kept else "the recipe does not know it"


def lost_attention(case: Case) -> str | None:
    """Whether the recipe knows that attention is in FP8, as asked."""
    return None if _recipe(case).arguments.get("fp8_dpa") else "the recipe does not know it"


def data_parallel_refusal(case: Case) -> str | None:
    """Why the real DistributedDataParallelConfig refuses, or None."""
    return _built(case, "megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig")


def optimizer_refusal(case: Case) -> str | None:
    """Why the real OptimizerConfig refuses, beside a Transformer Engine that has its optimizer; or None."""
    with _engine():
        return _built(case, "megatron.core.optimizer.optimizer_config", "OptimizerConfig")


def _built(case: Case, module: str, name: str) -> str | None:
    import importlib
    from dataclasses import fields

    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    with target(case):
        owner = getattr(importlib.import_module(module), name)
        known = {field.name for field in fields(owner)}
        given = {key: dtypes.get(value, value) for key, value in case.knobs.items() if key in known}  # type: ignore[arg-type]
        try:
            owner(**given)
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None
