"""A point that can be tried: knob values under their Megatron-Core names, and a stable id.

The id is a hash of the canonical JSON of knobs and environment, so the same point has the same id on every
machine and in every sweep. Layout fields are knobs like any other; `Layout` is a typed view of them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from search_spaces.shapes import Noun

# A list-valued knob (recompute_modules) is written "core_attn+moe": hashable, and one Optuna category.
KnobValue = bool | int | float | str | None
MODULE_SEPARATOR = "+"


def modules(value: KnobValue) -> tuple[str, ...]:
    """Split a list-valued knob: "core_attn+moe" -> ("core_attn", "moe"); None or "" -> ()."""
    return tuple(part for part in str(value).split(MODULE_SEPARATOR) if part) if value else ()


@dataclass(frozen=True)
class Layout:
    """How ranks are split: attention TP x CP x DP x PP, experts ETP x EP x EDP x PP. All sizes in ranks."""

    tensor: int
    context: int
    pipeline: int
    virtual_pipeline: int | None
    expert: int
    expert_tensor: int
    sequence_parallel: bool

    def data(self, world_size: int) -> int:
        """Data-parallel size of the dense part; 0 where the layout does not divide `world_size`."""
        ranks = self.tensor * self.context * self.pipeline
        return 0 if world_size % ranks else world_size // ranks


class Candidate(Noun):
    """Knob values (only the knobs that mean something here) and environment variables that are knobs in truth."""

    knobs: dict[str, KnobValue]
    env: dict[str, str] = Field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """12 hex digits, the same for the same knobs and environment whatever their order."""
        text = json.dumps([self.knobs, self.env], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def layout(self) -> Layout:
        return layout_of(self.knobs)

    def label(self, default: "Candidate") -> str:
        """What differs from `default`, for people: "alltoall, micro_batch_size=4"; "default" where nothing does."""
        changed = [f"{k}={v}" for k, v in self.knobs.items() if default.knobs.get(k) != v]
        changed += [f"no {k}" for k in default.knobs if k not in self.knobs]
        changed += [f"{k}={v}" for k, v in self.env.items() if default.env.get(k) != v]
        return ", ".join(changed) or "default"

    def differing(self, default: "Candidate") -> tuple[str, ...]:
        """Names of the knobs and variables that it has with another value than `default`."""
        mine, theirs = {**self.knobs, **self.env}, {**default.knobs, **default.env}
        return tuple(name for name, value in mine.items() if theirs.get(name) != value)

    def __hash__(self) -> int:
        return hash(self.id)


def layout_of(knobs: Mapping[str, KnobValue]) -> Layout:
    """Read the layout out of knobs; absent sizes are 1 (Megatron-Core's defaults), absent ETP follows TP."""

    def size(name: str, fallback: int = 1) -> int:
        value = knobs.get(name)
        return fallback if value is None else int(value)

    tensor = size("tensor_model_parallel_size")
    virtual = knobs.get("virtual_pipeline_model_parallel_size")
    return Layout(
        tensor=tensor,
        context=size("context_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        virtual_pipeline=None if virtual is None else int(virtual),
        expert=size("expert_model_parallel_size"),
        expert_tensor=size("expert_tensor_parallel_size", tensor),
        sequence_parallel=bool(knobs.get("sequence_parallel", False)),
    )
