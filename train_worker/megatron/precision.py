"""FP8 as Transformer Engine's modules note it: each keeps whether its last forward ran in FP8, and by which recipe.

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


def fp8_recipes(modules: Iterable[torch.nn.Module]) -> list[tuple[str, str]]:
    """(format, recipe) of each module with weights whose last forward ran in FP8, in Megatron's words.

    NVFP4 sets the same flag and is not FP8. Not seen: use_transformer_engine_op_fuser, which no space has.
    """
    ran = (module for module in modules if getattr(module, "fp8", False) is True)
    metas: list[Any] = [module.fp8_meta for module in ran if next(module.parameters(recurse=False), None) is not None]
    named = [(meta["recipe"], recipe_name(meta["recipe"])) for meta in metas]
    return [(recipe.fp8_format.name.lower(), name) for recipe, name in named if name]


def recipe_name(recipe: Any) -> str | None:
    """Megatron's word for a recipe, by its class or (Megatron's TEDelayedScaling) the class it extends."""
    words = (FP8_RECIPES.get(kind.__name__) for kind in type(recipe).__mro__)
    return next((word for word in words if word), None)
