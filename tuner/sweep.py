"""A sweep file, loaded: `load_sweep` reports every fault at once, each with its line (the checks: `sweep_faults`)."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from search_spaces.shapes import STACK_ADDED_LATER, UNTRAINED, ModelShape, Noun, StackVersions, TrainingShape
from search_spaces.space import SearchSpace
from tuner.objective import Guard
from tuner.sweep_faults import checked
from tuner.sweep_spec import SweepSpec, Verify

__all__ = ["LoadedSweep", "SweepSpec", "load_sweep", "meaning_digest"]


ADDED_LATER = (  # a part of the file, and a key of it that earlier ones did not have
    ("training", "min_measured_steps"),
    ("training", "target_relative_error"),
    ("training", "learning_rate_warmup_steps"),
    ("guard", "low_precision_mean_loss_relative_tolerance"),
    ("verify", "finalists"),
    *(("stack", name) for name in STACK_ADDED_LATER),
)


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep file without faults, with its model and space worked out. `digest`: see `meaning_digest`."""

    path: Path
    spec: SweepSpec
    text: str
    model: ModelShape
    space: SearchSpace
    digest: str

    @property
    def home(self) -> Path:
        """The folder that holds its runs."""
        return self.spec.tracking.folder / self.spec.name


def meaning_digest(spec: SweepSpec, model: ModelShape, space: SearchSpace) -> str:
    """12 hex digits of what makes trials comparable: all but name, budget, search, tracking and launch.

    So a run can be resumed with a larger budget, and a preset equals the same facts written out.
    """
    meaning = spec.model_dump(mode="json", exclude={"name", "budget", "search", "tracking", "launch", "model", "space"})
    meaning |= {"model": model.model_dump(mode="json", exclude=set(UNTRAINED)), "space": space.digest}
    parts: dict[str, type[Noun]] = {
        "training": TrainingShape, "guard": Guard, "verify": Verify, "stack": StackVersions,
    }  # fmt: skip
    for part, name in ADDED_LATER:  # at its default as before the key was known: to resume runs begun then
        if meaning[part] and meaning[part][name] == parts[part].model_fields[name].default:
            del meaning[part][name]
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_sweep(path: Path) -> LoadedSweep:
    """Read and check a sweep file. Raises InputError with every fault found, each with file, line and column."""
    spec, text, model, space = checked(path)
    return LoadedSweep(path, spec, text, model, space, meaning_digest(spec, model, space))
