"""FP8 and FP4 as Transformer Engine's modules note it: whether the last forward ran in either, and by which recipe.

2.20.2, pytorch/module/base.py:1526 (`fp8`) and :1548 (`fp8_meta["recipe"]`). Read by these two names, so that nothing
of Transformer Engine is imported where it is missing; another library's modules have neither and compute no FP8.
"""

from collections.abc import Iterable
from typing import Any

import torch

# Classes of transformer_engine.common.recipe by the words of Megatron's Fp8Recipe (core/fp8_utils.py:733).
FP8_RECIPES = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "tensorwise",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8",
}
NVFP4, FP4 = "NVFP4BlockScaling", ("e2m1", "nvfp4")  # Megatron's only format and recipe (core/fp4_utils.py)


def fp8_recipes(modules: Iterable[torch.nn.Module]) -> list[tuple[str, str]]:
    """(format, recipe) of each module with weights whose last forward ran in FP8, in Megatron's words.

    NVFP4 sets the same flag and is not FP8. Not seen: experts in use_transformer_engine_op_fuser, which go round their
    modules' own forward; the linears of attention beside them are.
    """
    named = [(recipe, recipe_name(recipe)) for recipe in _used(modules)]
    return [(recipe.fp8_format.name.lower(), name) for recipe, name in named if name]


def fp4_recipes(modules: Iterable[torch.nn.Module]) -> list[tuple[str, str]]:
    """(format, recipe) of each module with weights whose last forward ran in FP4, in Megatron's words."""
    return [FP4 for recipe in _used(modules) if any(kind.__name__ == NVFP4 for kind in type(recipe).__mro__)]


def _used(modules: Iterable[torch.nn.Module]) -> list[Any]:
    ran: Iterable[Any] = (module for module in modules if getattr(module, "fp8", False) is True)
    return [module.fp8_meta["recipe"] for module in ran if next(module.parameters(recurse=False), None) is not None]


def recipe_name(recipe: Any) -> str | None:
    """Megatron's word for a recipe, by its class or (Megatron's TEDelayedScaling) the class it extends."""
    words = (FP8_RECIPES.get(kind.__name__) for kind in type(recipe).__mro__)
    return next((word for word in words if word), None)
