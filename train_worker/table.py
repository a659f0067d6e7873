"""One row of a table of recorded trials: a JSON object a line, one trial each. `recorded_table` reads whole tables."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import ClusterShape, ModelShape, Noun, TrainingShape
from train_worker.outcome import (
    Crashed,
    Diverged,
    Evidence,
    Fingerprint,
    Hung,
    Measured,
    MemoryPeaks,
    Outcome,
    OutOfMemory,
    PhaseTimes,
    Rejected,
    StepSample,
    Work,
)
from train_worker.profile import StepProfile

Failure = Annotated[OutOfMemory | Rejected | Hung | Diverged | Crashed, Field(discriminator="kind")]
DETAIL_CHARACTERS = 800  # kept of a failure's words: their end, which names the error
TIME_DIGITS, LOSS_DIGITS = 6, 6
SHORTEST_S, LONGEST_S = 10.0**-TIME_DIGITS, 1e9  # of a step or a trial: beyond these, noise has no finite number


class MeasuredPart(Noun):
    """What a row holds of a trial that ran; its fields stand in the row itself. `losses`, `grad_norms` and
    `gpu_times_s` are those of the warm-up steps, then those of the measured ones."""

    step_times_s: tuple[float, ...] = Field(min_length=1, description="wall, the slowest rank's; measured steps only")
    warmup_times_s: tuple[float, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gpu_times_s: tuple[float, ...] | None = Field(None, description="between CUDA events; None on a CPU")
    gpu_busy_s: float | None = Field(None, description="of the profiled step; None where none was profiled")
    peak_memory_bytes: int
    memory: MemoryPeaks | None = None
    parameter_count: int
    effective: dict[str, KnobValue]
    phases: PhaseTimes
    fingerprint: Fingerprint
    fingerprint_digest: str
    given_up: bool = False
    work: Work | None = None
    evidence: tuple[Evidence, ...] = ()
    profile: StepProfile | None = Field(None, description="without its kernels one by one: they are many")
    profile_error: str | None = None

    @classmethod
    def of(cls, found: Measured) -> Self:
        steps = found.warmup + found.steps
        return cls(
            step_times_s=tuple(round(step.step_time_s, TIME_DIGITS) for step in found.steps),
            warmup_times_s=tuple(round(step.step_time_s, TIME_DIGITS) for step in found.warmup),
            losses=tuple(round(step.loss, LOSS_DIGITS) for step in steps),
            grad_norms=tuple(round(step.grad_norm, LOSS_DIGITS) for step in steps),
            gpu_times_s=_gpu_times(steps),
            gpu_busy_s=round(found.profile.gpu_busy_s, TIME_DIGITS) if found.profile else None,
            peak_memory_bytes=found.peak_memory_bytes,
            memory=found.memory,
            parameter_count=found.parameter_count,
            effective=found.effective,
            phases=PhaseTimes(**{name: round(s, 3) for name, s in found.phases.model_dump().items()}),
            fingerprint=found.fingerprint,
            fingerprint_digest=found.fingerprint.digest,
            given_up=found.given_up,
            work=found.work,
            evidence=found.evidence,
            profile=found.profile.model_copy(update={"top_kernels": ()}) if found.profile else None,
            profile_error=found.profile_error,
        )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        times = self.warmup_times_s + self.step_times_s
        if not len(times) == len(self.losses) == len(self.grad_norms):
            raise ValueError("losses and grad_norms must be as many as warmup_times_s and step_times_s together")
        if self.gpu_times_s is not None and len(self.gpu_times_s) != len(times):
            raise ValueError("gpu_times_s must be as many as warmup_times_s and step_times_s together")
        if not all(SHORTEST_S <= seconds <= LONGEST_S for seconds in times):
            raise ValueError(f"a step time is not from {SHORTEST_S:g} to {LONGEST_S:g} s")
        return self

    def outcome(self, tokens_per_step: int) -> Measured:
        """As it was recorded, without what is worked out of the step times (`timing`)."""
        times = self.warmup_times_s + self.step_times_s
        gpu_times = self.gpu_times_s or (None,) * len(times)
        samples = tuple(
            StepSample(
                step_time_s=seconds, gpu_time_s=gpu_s, tokens_per_s=tokens_per_step / seconds, loss=loss, grad_norm=norm
            )
            for seconds, gpu_s, loss, norm in zip(times, gpu_times, self.losses, self.grad_norms, strict=True)
        )  # fmt: skip
        first = len(self.warmup_times_s)
        return Measured(
            steps=samples[first:],
            warmup=samples[:first],
            peak_memory_bytes=self.peak_memory_bytes,
            memory=self.memory,
            parameter_count=self.parameter_count,
            effective=self.effective,
            fingerprint=self.fingerprint,
            given_up=self.given_up,
            phases=self.phases,
            work=self.work,
            evidence=self.evidence,
            profile=self.profile,
            profile_error=self.profile_error,
        )


def _gpu_times(steps: tuple[StepSample, ...]) -> tuple[float, ...] | None:
    times = tuple(round(step.gpu_time_s, TIME_DIGITS) for step in steps if step.gpu_time_s is not None)
    return times if len(times) == len(steps) else None


class TableRow(Noun):
    """One recorded trial. `id` is the candidate's; `repeat` counts an A/A trial of the baseline from 1; `pass` (1 or 2)
    says in which of two sweeps over the same configurations it ran; `order` counts the trials of the file from 1."""

    model_config = ConfigDict(serialize_by_alias=True)

    id: str
    order: int = Field(ge=1)
    repeat: int | None = Field(None, ge=1)
    sweep: Literal[1, 2] | None = Field(None, alias="pass")
    started_at: str = Field(description="UTC, ISO 8601")
    wall_s: float = Field(gt=0, le=LONGEST_S, description="from the request to the report")
    outcome: Literal["measured", "out_of_memory", "rejected", "hung", "diverged", "crashed"]
    knobs: dict[str, KnobValue]
    env: dict[str, str]
    shape: ModelShape
    cluster: ClusterShape
    training: TrainingShape
    measured: MeasuredPart | None = None
    failure: Failure | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        """A line is flat: the fields of `measured` stand beside the others."""
        if not isinstance(data, dict) or "measured" in data:
            return data
        part = {name: data[name] for name in MeasuredPart.model_fields if name in data}
        rest = {name: value for name, value in data.items() if name not in part}
        return rest | {"measured": part} if part else rest

    def line(self) -> str:
        """The row as one line of JSON, with what it has only."""
        row = self.model_dump(mode="json", exclude_none=True, exclude={"measured", "shape", "knobs"})
        row |= {"knobs": self.knobs, "shape": self.shape.model_dump(exclude_none=True)}
        part = self.measured.model_dump(mode="json") if self.measured else {}
        return json.dumps(row | part) + "\n"

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (self.outcome == "measured") is (self.measured is None) or (self.measured is None) is (self.failure is None):
            raise ValueError(f"outcome {self.outcome!r} needs `measured` or `failure`, and not both")
        if self.failure is not None and self.failure.kind != self.outcome:
            raise ValueError(f"outcome {self.outcome!r} and failure.kind {self.failure.kind!r} differ")
        if self.candidate.id != self.id:
            raise ValueError(f"id {self.id} is not that of its knobs and env, {self.candidate.id}")
        return self

    @property
    def candidate(self) -> Candidate:
        return Candidate(knobs=self.knobs, env=self.env)

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        """What a trial is known by in a table."""
        return self.id, self.repeat, self.sweep

    def recorded(self) -> Outcome:
        """The outcome; times to the microsecond, a failure's words without their beginning."""
        if self.measured is not None:
            return self.measured.outcome(self.training.tokens_per_step)
        assert self.failure is not None
        return self.failure


def shortened(outcome: Failure) -> Failure:
    """A failure with no more words than a row should hold."""
    if isinstance(outcome, Rejected):
        return outcome.model_copy(update={"reason": outcome.reason[-DETAIL_CHARACTERS:]})
    if isinstance(outcome, Diverged):
        return outcome
    return outcome.model_copy(update={"detail": outcome.detail.strip()[-DETAIL_CHARACTERS:]})
