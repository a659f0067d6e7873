"""What each trial of a sweep comes to: a row of the ranking where it was measured, a failure where it was not. Pure.

Rows rank what the search measured; the repeats that verify the finalists show up in the verdict and in the noise
floor, not in the ranking, so that a finalist is the row it was chosen for.
"""

from collections.abc import Sequence
from statistics import median

from pydantic import Field

from search_spaces.candidate import Candidate
from search_spaces.shapes import Noun, Routing
from tracking.reason import failure_line, failure_text
from tracking.record import Purpose, TrialRecord
from train_worker.outcome import Crashed, Measured, StepSample
from tuner.compare import median_interval, noise_floor
from tuner.objective import Guard, Objective, judge, score
from tuner.walls import gpu_busy


class Row(Noun):
    """One measured candidate. Times in seconds, memory in bytes; `speed` is default step time / own step time."""

    rank: int
    candidate_id: str
    label: str
    differs: tuple[str, ...] = Field(description="names of the knobs in which it differs from the default")
    trials: tuple[int, ...] = Field(description="numbers of the trials it was measured in")
    steps: int = Field(description="measured, over all of them")
    given_up: bool = Field(description="in each trial its first steps were too slow to win: it ran no others")
    step_time_s: float = Field(description="median over measured steps")
    step_time_low_s: float = Field(description="95% interval of the median (tuner.compare.median_interval)")
    step_time_high_s: float
    tokens_per_s: float = Field(description="over all ranks")
    tokens_per_s_per_rank: float | None = Field(None, description="None: a record from before it was kept")
    tflops_per_rank: float | None = Field(None, description="model TFLOP/s, at the median step")
    routing: Routing | None = None
    remarks: tuple[str, ...] = Field((), description="what its step times look like, where that is odd")
    gpu_busy_s: float | None = Field(None, description="in which the GPU works, of a step; None where not profiled")
    peak_memory_bytes: int
    speed: float | None = Field(description="1.25: a quarter more steps per second than the default")
    tied: bool = Field(description="cannot be told from the leader: intervals overlap, or inside the noise floor")
    default: bool
    winner: bool

    @property
    def shown(self) -> str:
        """What differs from the default, and how its measurement ended where that was early."""
        return f"{self.label} (given up after {self.steps} steps: too slow to win)" if self.given_up else self.label


class Failure(Noun):
    """One trial that gave no measurement."""

    number: int
    candidate_id: str
    label: str
    purpose: Purpose
    kind: str
    reason: str = Field(description="one line")
    detail: str


def label_of(candidate: Candidate, default: Candidate | None) -> str:
    """What differs from the default; every knob where there is no default to differ from."""
    return candidate.label(default if default is not None else Candidate(knobs={}))


def measured_of(record: TrialRecord) -> Measured | None:
    """The measurement, unless its numbers are not finite (the guard without a baseline)."""
    outcome = judge(record.outcome, None, Guard())
    return outcome if isinstance(outcome, Measured) and outcome.steps else None


def rows_of(records: Sequence[TrialRecord], default: Candidate | None, objective: Objective) -> list[Row]:
    """One row a candidate that was measured in the search, the best first; repeats of a candidate are pooled."""
    found: dict[str, list[tuple[TrialRecord, Measured]]] = {}
    for record in records:
        outcome = measured_of(record)
        if outcome is not None and record.purpose != "verify":
            found.setdefault(record.candidate.id, []).append((record, outcome))
    base = _times(found[default.id]) if default and default.id in found else []
    sign = 1 if objective.direction == "minimize" else -1

    def merit(trials: list[tuple[TrialRecord, Measured]]) -> tuple[float, int]:
        values = [value for _, outcome in trials if (value := score(outcome, objective)) is not None]
        return sign * median(values), trials[0][0].number

    ranked = sorted(found.values(), key=merit)
    rows = [_row(rank, trials, default, base) for rank, trials in enumerate(ranked, start=1)]
    floor = floor_of(records) or 0.0
    return [row.model_copy(update={"tied": _tied(row, rows[0], objective, floor)}) for row in rows]


def _row(rank: int, trials: list[tuple[TrialRecord, Measured]], default: Candidate | None, base: list[float]) -> Row:
    candidate, times = trials[0][0].candidate, _times(trials)
    low, high = median_interval(times)
    work = trials[0][1].work
    return Row(
        rank=rank,
        candidate_id=candidate.id,
        label=label_of(candidate, default),
        differs=candidate.differing(default) if default else (),
        trials=tuple(record.number for record, _ in trials),
        steps=len(times),
        given_up=all(outcome.given_up for _, outcome in trials),
        step_time_s=median(times),
        step_time_low_s=low,
        step_time_high_s=high,
        tokens_per_s=median(sample.tokens_per_s for sample in _steps(trials)),
        tokens_per_s_per_rank=work.tokens_per_s_per_rank(median(times)) if work else None,
        tflops_per_rank=work.tflops_per_rank(median(times)) if work else None,
        routing=work.routing if work else None,
        remarks=tuple(remark for _, outcome in trials if outcome.timing for remark in outcome.timing.remarks),
        gpu_busy_s=gpu_busy([outcome for _, outcome in trials]),
        peak_memory_bytes=max(outcome.peak_memory_bytes for _, outcome in trials),
        speed=median(base) / median(times) if base else None,
        tied=False,
        default=default is not None and candidate.id == default.id,
        winner=False,
    )


def _steps(trials: list[tuple[TrialRecord, Measured]]) -> list[StepSample]:
    return [sample for _, outcome in trials for sample in outcome.steps]


def _times(trials: list[tuple[TrialRecord, Measured]]) -> list[float]:
    return [sample.step_time_s for sample in _steps(trials)]


def _tied(row: Row, leader: Row, objective: Objective, floor: float) -> bool:
    if objective.metric == "peak_memory_bytes":  # counted, not timed: no noise to hide in
        return row.peak_memory_bytes == leader.peak_memory_bytes
    overlap = row.step_time_low_s <= leader.step_time_high_s and leader.step_time_low_s <= row.step_time_high_s
    return overlap or abs(row.step_time_s / leader.step_time_s - 1) <= floor


def floor_of(records: Sequence[TrialRecord]) -> float | None:
    """The noise floor as a share (tuner.compare.noise_floor), of the repeats that verify; None where there are none."""
    groups: dict[str, list[float]] = {}
    for record in records:
        outcome = measured_of(record)
        if outcome is not None and record.purpose == "verify":
            groups.setdefault(record.candidate.id, []).append(median(s.step_time_s for s in outcome.steps))
    return noise_floor(groups.values())


def failed_again(candidate_id: str, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """A repeat that verifies a candidate and failed by itself; a lost node says nothing about it."""
    for record in records:
        lost = isinstance(record.outcome, Crashed) and record.outcome.infrastructure
        if record.candidate.id == candidate_id and record.purpose == "verify" and not measured_of(record) and not lost:
            return record
    return None


def failure_of(record: TrialRecord, default: Candidate | None) -> Failure:
    """Of a trial for which `measured_of` has nothing."""
    outcome = judge(record.outcome, None, Guard())
    return Failure(
        number=record.number,
        candidate_id=record.candidate.id,
        label=label_of(record.candidate, default),
        purpose=record.purpose,
        kind=outcome.kind if not isinstance(outcome, Measured) else "unmeasured",
        reason=failure_line(outcome) or "it measured no step",
        detail=failure_text(outcome),
    )
