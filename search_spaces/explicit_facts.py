"""Facts of the model and of the training job in an explicit configuration, one by one."""

import ast
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from search_spaces.candidate import KnobValue
from search_spaces.explicit_knobs import LARGEST, CaseFault, shown
from search_spaces.partial import PartialTraining
from search_spaces.shapes import ModelShape

TRAINING = {"seq_length": "sequence_length", "global_batch_size": "global_batch_size"}
LONGEST_PATTERN = 10_000  # characters
MOST_LAYERS = 100_000


def fact_fault(name: str, value: object) -> CaseFault | None:
    """What is wrong with one fact of a model."""
    if name == "moe_router_score_function" and isinstance(value, str):
        return None  # a word the rules judge
    try:
        _fact_type(name).validate_python(value, strict=True)
    except ValidationError as error:
        return CaseFault(name, f"model.{name} {shown(value)}: {error.errors()[0]['msg']}")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        return CaseFault(name, f"model.{name} {shown(value)} is out of range")
    return None


@cache
def _fact_type(name: str) -> TypeAdapter[Any]:
    field = ModelShape.model_fields[name]
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(kind)


def frequency_fault(frequency: object, layers: object) -> CaseFault | None:
    """A `moe_layer_freq` that gives no pattern of dense (0) and MoE (1) layers, or one of another length than the model
    (core/models/gpt/gpt_layer_specs.py:653)."""
    if frequency is None:
        return None
    pattern = _pattern(frequency)
    if pattern is None or (isinstance(pattern, int) and pattern < 1):
        what = "is no number of layers and no list of 0 (dense) and 1 (MoE)"
        return CaseFault("moe_layer_freq", f"moe_layer_freq {shown(frequency)} {what}")
    wrong = isinstance(pattern, list) and isinstance(layers, int) and len(pattern) != layers
    if wrong and isinstance(pattern, list):
        return CaseFault("moe_layer_freq", f"moe_layer_freq lists {len(pattern)} layers, the model has {layers}")
    return None


def dense_layers(frequency: object, layers: object) -> int | None:
    """Layers with a dense MLP by `moe_layer_freq`: a list with 0 for each, n for one MoE layer in n, or Megatron-LM's
    text "([0]*3+[1]*58)". None where it does not say."""
    pattern = _pattern(frequency)
    if isinstance(pattern, list):
        return pattern.count(0)
    if pattern is not None and isinstance(layers, int) and pattern > 1 and 0 < layers <= LARGEST:
        return layers - -(-layers // pattern)
    return None


def _pattern(frequency: object) -> int | list[int] | None:
    """One MoE layer in n, or a list of 0 and 1; None for anything else."""
    if isinstance(frequency, str):
        try:
            frequency = _value(ast.parse(frequency[:LONGEST_PATTERN].strip(), mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    if isinstance(frequency, list):
        plain = all(isinstance(each, int) and each in (0, 1) for each in frequency)
        return frequency if plain and frequency else None
    return frequency if type(frequency) is int else None


def _value(node: ast.expr) -> int | list[int]:
    """An expression of integers, lists, + and *, the only ones in a text of Megatron-LM's."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [int(each) for part in node.elts if isinstance(each := _value(part), int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        counts = isinstance(node.op, ast.Mult) and isinstance(right, int) and right <= MOST_LAYERS
        if counts and isinstance(left, list) and isinstance(right, int) and len(left) * right <= MOST_LAYERS:
            return left * right
    raise ValueError(ast.dump(node))


def training_of(knobs: Mapping[str, KnobValue]) -> PartialTraining:
    """bf16 unless the knobs say fp32; sequence length and global batch where they are said."""
    half = bool(knobs.get("bf16", True)) or bool(knobs.get("fp16"))
    dtype = str(knobs.get("params_dtype") or "").removeprefix("torch.")
    facts: dict[str, Any] = {"params_dtype": "fp32" if dtype in ("float32", "fp32") or not half else "bf16"}
    facts |= {fact: knobs[knob] for knob, fact in TRAINING.items() if knobs.get(knob) is not None}
    return PartialTraining.of(facts)
