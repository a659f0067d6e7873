"""FP8 is read from what modules note of their last forward. Transformer Engine needs a GPU: here its two attributes."""

from enum import Enum
from typing import Any

import pytest
import torch

from train_worker.megatron.precision import fp4_recipes, fp8_recipes, recipe_name


class Format(Enum):
    HYBRID = 1
    E4M3 = 2


def recipe(name: str, form: Format = Format.HYBRID, extended_as: str = "") -> Any:
    """An object of a class of that name, as in transformer_engine.common.recipe, or of one that extends it."""
    kind = type(name, (), {"fp8_format": form})
    return type(extended_as, (kind,), {})() if extended_as else kind()


def linear(ran_in_fp8: bool, used: Any = None, bare: bool = False) -> torch.nn.Module:
    module: Any = torch.nn.Identity() if bare else torch.nn.Linear(2, 2)
    module.fp8 = ran_in_fp8
    module.fp8_meta = {"recipe": used} if used else {}
    return module


@pytest.mark.parametrize(
    ("used", "word"),
    [
        (recipe("DelayedScaling"), "delayed"),
        (recipe("DelayedScaling", extended_as="TEDelayedScaling"), "delayed"),
        (recipe("Float8CurrentScaling"), "tensorwise"),
        (recipe("Float8BlockScaling"), "blockwise"),
        (recipe("MXFP8BlockScaling"), "mxfp8"),
        (recipe("NVFP4BlockScaling"), None),
        (None, None),
    ],
)
def test_recipes_have_megatrons_words(used: Any, word: str | None) -> None:
    assert recipe_name(used) == word


def test_only_modules_with_weights_that_ran_in_fp8_count() -> None:
    blockwise = recipe("Float8BlockScaling")
    modules = [
        torch.nn.Linear(2, 2),  # another library's: no attribute
        linear(False),  # never in FP8
        linear(False, blockwise),  # its last forward was not
        linear(True, blockwise, bare=True),  # attention notes a recipe and has no GEMM of its own
        linear(True, recipe("NVFP4BlockScaling")),
        linear(True, blockwise),
        linear(True, recipe("DelayedScaling", Format.E4M3)),
    ]
    assert fp8_recipes(modules) == [("hybrid", "blockwise"), ("e4m3", "delayed")]
    assert fp8_recipes(modules[:5]) == []
    assert fp4_recipes(modules) == [("e2m1", "nvfp4")]
    assert fp4_recipes([*modules[:4], *modules[5:]]) == []
