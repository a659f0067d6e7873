"""A sweep's events folded to what a person wants to know: the verdict, the ranking, the failures, the costs. Pure.

Rows rank what the search measured; the repeats that verify the finalist show up in the verdict and in the noise
floor, not in the ranking, so that the finalist is the row it was chosen for.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from statistics import median
from typing import Literal

from pydantic import Field

from search_spaces.candidate import Candidate
from search_spaces.shapes import Noun, Routing
from tracking.reason import failure_line, failure_text
from tracking.record import Compared, Event, Purpose, RuleCount, Screened, SweepStarted, TrialRecord
from train_worker.outcome import Crashed, Evidence, Measured, PhaseTimes, StepSample
from tuner.compare import median_interval, noise_floor
from tuner.objective import Guard, Objective, judge, score
from tuner.proof import proof
from tuner.walls import Role, StandsAt, gpu_busy, stands_at


class Row(Noun):
    """One measured candidate. Times in seconds, memory in bytes; `speed` is default step time / own step time."""

    rank: int
    candidate_id: str
    label: str
    trials: tuple[int, ...] = Field(description="numbers of the trials it was measured in")
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


class Failure(Noun):
    """One trial that gave no measurement."""

    number: int
    candidate_id: str
    label: str
    purpose: Purpose
    kind: str
    reason: str = Field(description="one line")
    detail: str


class Costs(Noun):
    """Where the time went. Medians are over measured trials; all in seconds."""

    trials: int
    retries: int
    wall_s: float = Field(description="sum over trials, as the controller saw them")
    elapsed_s: float = Field(description="from the first trial's start to the last one's end")
    training_s: float = Field(description="sum of warm-up and measured steps")
    fixed_median_s: float | None = Field(description="per trial, all but its training steps")
    phase_medians_s: dict[str, float]


class Verdict(Noun):
    """The answer. `kind` "none": nothing acceptable was measured; "unverified": not compared, or in too few rounds."""

    kind: Literal["faster", "slower", "tie", "same", "unverified", "none"]
    words: str
    compared: Compared | None = None


class Leaderboard(Noun):
    """Everything a report shows, as data."""

    sweep_name: str
    run_name: str
    seed: int
    objective: Objective
    verdict: Verdict
    winner_id: str | None = Field(description="candidate id of what to use: the finalist only where it is proven")
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    space_total: int | None
    space_accepted: int | None
    rejected: tuple[RuleCount, ...]
    noise_floor: float | None = Field(description="share by which two trials of one candidate differ (A/A, 95%)")
    costs: Costs
    walls: tuple[StandsAt, ...] = Field((), description="of the default and of the winner, where they were profiled")
    evidence: tuple[Evidence, ...] = Field((), description="of what the winner ran; none in old records")
    unit: Literal["GPU", "rank"] = Field("rank", description="what a rank is, where numbers are told of one")
    fingerprints: tuple[str, ...] = Field(description="digests of the stacks seen; more than one is a mixed sweep")


def leaderboard(events: Iterable[Event], objective: Objective | None = None) -> Leaderboard:
    """Fold events into a leaderboard. The first event must be the head (tracking.journal.fold checks that)."""
    events, objective = tuple(events), objective or Objective()
    head = next(event for event in events if isinstance(event, SweepStarted))
    records = [event for event in events if isinstance(event, TrialRecord)]
    screened = next((event for event in events if isinstance(event, Screened)), None)
    default = next((record.candidate for record in records if record.purpose == "baseline"), None)
    rows = _rows(records, default, objective)
    verdict, winner_id = _decide([e for e in events if isinstance(e, Compared)], rows, records, objective)
    return Leaderboard(
        sweep_name=head.sweep_name,
        run_name=head.run_name,
        seed=head.seed,
        objective=objective,
        verdict=verdict,
        winner_id=winner_id,
        rows=tuple(row.model_copy(update={"winner": row.candidate_id == winner_id}) for row in rows),
        failures=tuple(_failure(record, default) for record in records if not _measured(record)),
        space_total=screened.total if screened else None,
        space_accepted=screened.accepted if screened else None,
        rejected=tuple(sorted(screened.rejected, key=lambda rule: -rule.count)) if screened else (),
        noise_floor=_floor(records),
        costs=_costs(records),
        walls=_walls(records, default, winner_id),
        evidence=proof(records, winner_id),
        unit="GPU" if any(found.fingerprint.device == "cuda" for r in records if (found := _measured(r))) else "rank",
        fingerprints=tuple(sorted({found.fingerprint.digest for record in records if (found := _measured(record))})),
    )


def label_of(candidate: Candidate, default: Candidate | None) -> str:
    """What differs from the default; every knob where there is no default to differ from."""
    return candidate.label(default if default is not None else Candidate(knobs={}))


def _measured(record: TrialRecord) -> Measured | None:
    """The measurement, unless its numbers are not finite (the guard without a baseline)."""
    outcome = judge(record.outcome, None, Guard())
    return outcome if isinstance(outcome, Measured) and outcome.steps else None


def _rows(records: Sequence[TrialRecord], default: Candidate | None, objective: Objective) -> list[Row]:
    found: dict[str, list[tuple[TrialRecord, Measured]]] = {}
    for record in records:
        outcome = _measured(record)
        if outcome is not None and record.purpose != "verify":
            found.setdefault(record.candidate.id, []).append((record, outcome))
    base = _times(found[default.id]) if default and default.id in found else []
    sign = 1 if objective.direction == "minimize" else -1

    def merit(trials: list[tuple[TrialRecord, Measured]]) -> tuple[float, int]:
        values = [value for _, outcome in trials if (value := score(outcome, objective)) is not None]
        return sign * median(values), trials[0][0].number

    ranked = sorted(found.values(), key=merit)
    rows = [_row(rank, trials, default, base) for rank, trials in enumerate(ranked, start=1)]
    floor = _floor(records) or 0.0
    return [row.model_copy(update={"tied": _tied(row, rows[0], objective, floor)}) for row in rows]


def _row(rank: int, trials: list[tuple[TrialRecord, Measured]], default: Candidate | None, base: list[float]) -> Row:
    candidate, times = trials[0][0].candidate, _times(trials)
    low, high = median_interval(times)
    work = trials[0][1].work
    return Row(
        rank=rank,
        candidate_id=candidate.id,
        label=label_of(candidate, default),
        trials=tuple(record.number for record, _ in trials),
        step_time_s=median(times),
        step_time_low_s=low,
        step_time_high_s=high,
        tokens_per_s=median(sample.tokens_per_s for sample in _steps(trials)),
        tokens_per_s_per_rank=work.tokens_per_s_per_rank(median(times)) if work else None,
        tflops_per_rank=work.tflops_per_rank(median(times)) if work else None,
        routing=work.routing if work else None,
        remarks=tuple(remark for _, outcome in trials for remark in _remarks(outcome)),
        gpu_busy_s=gpu_busy([outcome for _, outcome in trials]),
        peak_memory_bytes=max(outcome.peak_memory_bytes for _, outcome in trials),
        speed=median(base) / median(times) if base else None,
        tied=False,
        default=default is not None and candidate.id == default.id,
        winner=False,
    )


def _remarks(outcome: Measured) -> tuple[str, ...]:
    """What a reader of its step times should know."""
    given_up = (f"Given up after {len(outcome.steps)} steps: too slow to win.",) if outcome.given_up else ()
    return given_up + (outcome.timing.remarks if outcome.timing else ())


def _steps(trials: list[tuple[TrialRecord, Measured]]) -> list[StepSample]:
    return [sample for _, outcome in trials for sample in outcome.steps]


def _times(trials: list[tuple[TrialRecord, Measured]]) -> list[float]:
    return [sample.step_time_s for sample in _steps(trials)]


def _tied(row: Row, leader: Row, objective: Objective, floor: float) -> bool:
    if objective.metric == "peak_memory_bytes":  # counted, not timed: no noise to hide in
        return row.peak_memory_bytes == leader.peak_memory_bytes
    overlap = row.step_time_low_s <= leader.step_time_high_s and leader.step_time_low_s <= row.step_time_high_s
    return overlap or abs(row.step_time_s / leader.step_time_s - 1) <= floor


def _floor(records: Sequence[TrialRecord]) -> float | None:
    groups: dict[str, list[float]] = {}
    for record in records:
        outcome = _measured(record)
        if outcome is not None and record.purpose == "verify":
            groups.setdefault(record.candidate.id, []).append(median(s.step_time_s for s in outcome.steps))
    return noise_floor(groups.values())


def _decide(
    compared: list[Compared], rows: list[Row], records: Sequence[TrialRecord], objective: Objective
) -> tuple[Verdict, str | None]:
    """The verdict in words, and what to use: the default, unless a finalist was shown to be faster."""
    if not rows:
        return Verdict(kind="none", words="Nothing acceptable was measured."), None
    leader = rows[0]
    latest = compared[-1] if compared else None
    if latest is None or latest.verdict == "unverified" or objective.metric == "peak_memory_bytes":
        words = f"Best so far, not verified against the default: {leader.label} ({_describe(leader, objective)})."
        return Verdict(kind="unverified", words=words, compared=latest), leader.candidate_id
    by_id = {row.candidate_id: row for row in rows}
    name = by_id[latest.finalist_id].label if latest.finalist_id in by_id else latest.finalist_id
    broken = _broken(latest.finalist_id, records)
    if broken is not None:
        why = _failure(broken, None).reason
        words = f"No winner: {name} was measured once and failed when it was run again: {why}. Keep the default."
        return Verdict(kind="unverified", words=words, compared=latest), _if_measured(latest.default_id, by_id)
    verdict = Verdict(kind=latest.verdict, words=_words(latest, name), compared=latest)
    proven = latest.finalist_id if latest.verdict == "faster" else latest.default_id
    return verdict, _if_measured(proven, by_id)


def _walls(records: Sequence[TrialRecord], default: Candidate | None, winner_id: str | None) -> tuple[StandsAt, ...]:
    """Of the default, and of the winner where it is another."""
    winner = next((record.candidate for record in records if record.candidate.id == winner_id), None)
    asked: list[tuple[Role, Candidate]] = [("default", default)] if default else []
    if winner is not None and (default is None or winner.id != default.id):
        asked.append(("winner", winner))
    found = []
    for role, candidate in asked:
        mine = [record for record in records if record.candidate.id == candidate.id]
        outcomes = [outcome for record in mine if (outcome := _measured(record))]
        found.append(stands_at(role, candidate, label_of(candidate, default), outcomes))
    return tuple(each for each in found if each is not None)


def _if_measured(candidate_id: str, rows: dict[str, Row]) -> str | None:
    return candidate_id if candidate_id in rows else None


def _broken(candidate_id: str, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """A repeat of the finalist that failed by itself; a lost node says nothing about it."""
    for record in records:
        lost = isinstance(record.outcome, Crashed) and record.outcome.infrastructure
        if record.candidate.id == candidate_id and record.purpose == "verify" and not _measured(record) and not lost:
            return record
    return None


def _words(compared: Compared, name: str) -> str:
    interval = f"95% interval {compared.ratio_low:.3f} to {compared.ratio_high:.3f} of the default's step time"
    how = f"{interval}, {compared.rounds} interleaved rounds"
    how += f", {compared.routing} routing" if compared.routing else ""
    match compared.verdict:
        case "faster":
            return f"Faster: {name} takes {1 - compared.ratio:.1%} less time a step than the default ({how})."
        case "tie":
            return f"Tie: {name} cannot be told from the default ({how}). Keep the default."
        case "slower":
            return f"Slower: {name} takes {compared.ratio - 1:.1%} more time a step than the default ({how}). Keep it."
        case "same":
            return "The default is the best configuration that was measured."
        case "unverified":
            return f"Not verified: {name} was compared in {compared.rounds} rounds; two at least are needed."


def _describe(row: Row, objective: Objective) -> str:
    if objective.metric == "peak_memory_bytes":
        return f"{row.peak_memory_bytes / 2**20:,.1f} MiB at its peak"
    return f"{row.step_time_s:.4g} s a step" + (f", {row.speed:.2f}x the default" if row.speed else "")


def _failure(record: TrialRecord, default: Candidate | None) -> Failure:
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


def _costs(records: Sequence[TrialRecord]) -> Costs:
    phases = [outcome.phases for record in records if (outcome := _measured(record))]
    times = [datetime.fromisoformat(at) for record in records for at in (record.started_at, record.ended_at)]
    return Costs(
        trials=len(records),
        retries=sum(record.attempts - 1 for record in records),
        wall_s=sum(record.wall_s for record in records),
        elapsed_s=(max(times) - min(times)).total_seconds() if times else 0.0,
        training_s=sum(phase.warmup_s + phase.measure_s for phase in phases),
        fixed_median_s=median(phase.fixed_s for phase in phases) if phases else None,
        phase_medians_s={name: median(getattr(phase, name) for phase in phases) for name in PhaseTimes.model_fields}
        if phases
        else {},
    )
