"""What a sweep file can say: the nouns, as written, before presets and names are looked up.

A missing fact is an error; only choices of taste (objective, guard, verify, tracking, launch) have defaults.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from search_spaces.candidate import KnobValue
from search_spaces.shapes import ClusterShape, ModelShape, Noun, StackVersions, TrainingShape
from tuner.objective import Guard, Objective


class ModelChoice(Noun):
    """Exactly one of: a preset, a Hugging Face config.json (relative to the sweep file), the facts themselves."""

    preset: str | None = None
    hf_config: str | None = None
    facts: ModelShape | None = None

    @model_validator(mode="after")
    def _one(self) -> "ModelChoice":
        if sum(value is not None for value in (self.preset, self.hf_config, self.facts)) != 1:
            raise ValueError("give exactly one of preset, hf_config and facts")
        return self


class SpaceChoice(Noun):
    """A named space; `choices` narrows its knobs (one choice fixes a knob)."""

    name: str
    choices: dict[str, tuple[KnobValue, ...]] = Field(default_factory=dict)


class Budget(Noun):
    """Where the search ends: at the first limit reached. `trial_time_limit_s` is for one trial, start to report.

    `slow_factor`: a trial whose first steps all take longer than this many times the best one's median is given up.
    """

    trials: PositiveInt
    trial_time_limit_s: PositiveFloat
    wall_time_s: PositiveFloat | None = None
    worker_hours: PositiveFloat | None = None
    slow_factor: float | None = Field(2.0, gt=1, allow_inf_nan=False)


class Search(Noun):
    """tpe: Optuna's sampler; walls: what the wall of the best one so far asks for first, then TPE."""

    strategy: Literal["tpe", "walls"] = "tpe"


class Verify(Noun):
    """`rounds`: how often finalists and default are measured again, interleaved; 0 leaves the winner unverified.

    Fewer than 3 are said to tell too little (`tuner.sweep_warnings`). `finalists`: how many of the search's best take
    part, where so many beat the default.
    """

    rounds: int = Field(4, ge=0, le=100)
    finalists: int = Field(2, ge=1, le=10)


class Tracking(Noun):
    """`folder` is relative to where the command runs. `mlflow_uri` None: a SQLite file in `folder`."""

    folder: Path = Path("moetune-runs")
    mlflow_uri: str | None = None
    experiment: str = "moetune"


class Launch(Noun):
    """slot: warm workers, each trial a fresh process; job: a Ray Train job a trial. `address` None: a private Ray."""

    isolation: Literal["slot", "job"] = "slot"
    address: str | None = None


class SweepSpec(Noun):
    """A sweep file, as written. Times in seconds, memory in bytes."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="names the folder of its runs")
    model: ModelChoice
    cluster: ClusterShape
    training: TrainingShape
    space: SpaceChoice
    budget: Budget
    seed: int = Field(ge=0, lt=2**31)
    objective: Objective = Field(default_factory=Objective)
    guard: Guard = Field(default_factory=lambda: Guard())
    search: Search = Field(default_factory=Search)
    verify: Verify = Field(default_factory=lambda: Verify())
    tracking: Tracking = Field(default_factory=Tracking)
    launch: Launch = Field(default_factory=Launch)
    stack: StackVersions | None = Field(
        None, description="versions on the workers; None: rules about versions and missing packages keep silent"
    )
