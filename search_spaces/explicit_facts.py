"""Facts of the model and of the training job in an explicit configuration, one by one."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from search_spaces.candidate import KnobValue
from search_spaces.explicit_knobs import LARGEST, CaseFault, shown
from search_spaces.partial import PartialTraining
from search_spaces.shapes import ModelShape

TRAINING = {"seq_length": "sequence_length", "global_batch_size": "global_batch_size"}
_REPEATED = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")


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


def dense_layers(frequency: object, layers: object) -> int | None:
    """Layers with a dense MLP by `moe_layer_freq`: a list with 0 for each, n for one MoE layer in n, or Megatron-LM's
    text "([0]*3+[1]*58)". None where it does not say."""
    if isinstance(frequency, str):
        parts = _REPEATED.findall(frequency.replace(" ", ""))
        return sum(part.count("0") * int(times or 1) for part, times in parts) if parts else None
    if isinstance(frequency, list):
        return sum(1 for each in frequency if not each)
    if isinstance(frequency, int) and isinstance(layers, int) and frequency > 1 and 0 < layers <= LARGEST:
        return layers - -(-layers // frequency)
    return None


def training_of(knobs: Mapping[str, KnobValue]) -> PartialTraining:
    """bf16 unless the knobs say fp32; sequence length and global batch where they are said."""
    half = bool(knobs.get("bf16", True)) or bool(knobs.get("fp16"))
    dtype = str(knobs.get("params_dtype") or "").removeprefix("torch.")
    facts: dict[str, Any] = {"params_dtype": "fp32" if dtype in ("float32", "fp32") or not half else "bf16"}
    facts |= {fact: knobs[knob] for knob, fact in TRAINING.items() if knobs.get(knob) is not None}
    return PartialTraining.of(facts)
