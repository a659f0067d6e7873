"""A sweep file, loaded: `load_sweep` reports every fault at once, each with its line (the checks: `sweep_faults`)."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from search_spaces.shapes import UNTRAINED, ModelShape
from search_spaces.space import SearchSpace
from tuner.sweep_faults import checked
from tuner.sweep_spec import SweepSpec

__all__ = ["LoadedSweep", "SweepSpec", "load_sweep", "meaning_digest"]


ADDED_LATER = ("min_measured_steps", "target_relative_error")  # to training


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep file without faults, with its model and space worked out. `digest`: see `meaning_digest`."""

    path: Path
    spec: SweepSpec
    text: str
    model: ModelShape
    space: SearchSpace
    digest: str


def meaning_digest(spec: SweepSpec, model: ModelShape, space: SearchSpace) -> str:
    """12 hex digits of what makes trials comparable: all but name, budget, search, tracking and launch.

    So a run can be resumed with a larger budget, and a preset equals the same facts written out.
    """
    meaning = spec.model_dump(mode="json", exclude={"name", "budget", "search", "tracking", "launch", "model", "space"})
    meaning |= {"model": model.model_dump(mode="json", exclude=set(UNTRAINED)), "space": space.digest}
    for name in ADDED_LATER:
        if meaning["training"][name] is None:  # as before the key was known: runs begun then can be resumed
            del meaning["training"][name]
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_sweep(path: Path) -> LoadedSweep:
    """Read and check a sweep file. Raises InputError with every fault found, each with file, line and column."""
    spec, text, model, space = checked(path)
    return LoadedSweep(path, spec, text, model, space, meaning_digest(spec, model, space))
