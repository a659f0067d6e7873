"""Megatron Bridge's recipes of mixed precision: their names, and the fields that each sets."""

import re
from collections.abc import Mapping

# training/mixed_precision.py:40-75, without the dtypes that follow from bf16: each field is written into model,
# optimizer and ddp where they have it.
PRECISION_DEFAULTS: Mapping[str, object] = {
    "fp16": False, "bf16": False, "grad_reduce_in_fp32": True, "fp8": None, "fp8_recipe": "tensorwise",
    "first_last_layers_bf16": False, "fp8_margin": 0, "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": True, "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False, "fp8_param": False, "fp8_param_gather": False, "fp4": None,
    "fp4_recipe": "nvfp4", "fp4_param": False, "fp4_param_gather": False, "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0, "reuse_grad_buf_for_mxfp8_param_ag": False,
}  # fmt: skip
_FP8_DELAYED = {
    "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max",
    "fp8_param_gather": True,
}  # fmt: skip
_MXFP8 = {
    "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True,
}  # fmt: skip
_TENSORWISE = {
    "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1, "fp8_param_gather": True,
}  # fmt: skip
_WIDER = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
_BLOCKWISE = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
_NVFP4 = {
    "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True, "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 0,
}  # fmt: skip
# mixed_precision.py:185-420, the registered recipes without their "bf16_" or "fp16_".
_RECIPES: Mapping[str, Mapping[str, object]] = {
    "mixed": {},
    "with_fp8_delayed_scaling_mixed": _FP8_DELAYED,
    "with_mxfp8_mixed": _MXFP8,
    "with_fp8_current_scaling_mixed": _TENSORWISE,
    "with_fp8_subchannel_scaling_mixed": _BLOCKWISE,
    "with_nvfp4_mixed": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True},
}
_SPECIAL: Mapping[str, Mapping[str, object]] = {
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_TENSORWISE, **_WIDER},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_TENSORWISE, **_BLOCKWISE, **_WIDER},
    "nemotron_3_super_bf16_with_nvfp4_mixed": {"bf16": True, **_NVFP4, "num_layers_at_end_in_bf16": 14},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {"bf16": True, **_NVFP4, "num_layers_at_end_in_bf16": 16},
}
# Words of people and of the performance harness for the same recipes.
_WORDS = (
    ("mxfp8", _MXFP8), ("fp8_mx", _MXFP8), ("nvfp4", _RECIPES["with_nvfp4_mixed"]), ("blockwise", _BLOCKWISE),
    ("subchannel", _BLOCKWISE), ("fp8_sc", _BLOCKWISE), ("delayed", _FP8_DELAYED), ("fp8_ds", _FP8_DELAYED),
    ("current", _TENSORWISE), ("tensorwise", _TENSORWISE), ("fp8_cs", _TENSORWISE),
)  # fmt: skip


def precision_recipe(text: str) -> Mapping[str, object] | None:
    """The fields of a recipe by its name ("bf16_with_mxfp8_mixed", "bf16-mixed") or in words; None where unknown."""
    name = text.strip().lower().replace("-", "_")
    if name in _SPECIAL:
        return _SPECIAL[name]
    found = re.search(r"(?<![a-z0-9])(bf16|fp16)", name)
    base = found[1] if found else None
    if base and (recipe := _RECIPES.get(name.removeprefix(f"{base}_"))) is not None:
        return {base: True, **recipe}
    for word, recipe in _WORDS:
        if word in name:
            return {base or "bf16": True, **recipe}
    return {base: True} if base and "fp8" not in name and "fp4" not in name else None


def recipe_names() -> tuple[str, ...]:
    """The registered recipes of mixed precision; there is none of fp16 with nvfp4."""
    both = (f"{base}_{recipe}" for base in ("bf16", "fp16") for recipe in _RECIPES)
    return (*(name for name in both if name != "fp16_with_nvfp4_mixed"), *_SPECIAL)
