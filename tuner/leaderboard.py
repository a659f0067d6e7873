"""A sweep's events folded to what a person wants to know: the verdict, the ranking, the failures, the costs. Pure."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from statistics import median
from typing import Literal

from pydantic import Field

from search_spaces.candidate import Candidate
from search_spaces.shapes import Noun
from tracking.record import Compared, Event, RuleCount, Screened, SweepStarted, TrialRecord
from train_worker.outcome import Evidence, PhaseTimes
from tuner.objective import Objective
from tuner.proof import proof
from tuner.ranking import Failure, Row, failure_of, floor_of, label_of, measured_of, rows_of
from tuner.verdict import Verdict, decide
from tuner.walls import Role, StandsAt, stands_at


class Costs(Noun):
    """Where the time went. Medians are over measured trials; all in seconds."""

    trials: int
    retries: int
    wall_s: float = Field(description="sum over trials, as the controller saw them")
    elapsed_s: float = Field(description="from the first trial's start to the last one's end")
    training_s: float = Field(description="sum of warm-up and measured steps")
    fixed_median_s: float | None = Field(description="per trial, all but its training steps")
    phase_medians_s: dict[str, float]


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
    rows = rows_of(records, default, objective)
    verdict, winner_id = decide([e for e in events if isinstance(e, Compared)], rows, records, objective)
    return Leaderboard(
        sweep_name=head.sweep_name,
        run_name=head.run_name,
        seed=head.seed,
        objective=objective,
        verdict=verdict,
        winner_id=winner_id,
        rows=tuple(row.model_copy(update={"winner": row.candidate_id == winner_id}) for row in rows),
        failures=tuple(failure_of(record, default) for record in records if not measured_of(record)),
        space_total=screened.total if screened else None,
        space_accepted=screened.accepted if screened else None,
        rejected=tuple(sorted(screened.rejected, key=lambda rule: -rule.count)) if screened else (),
        noise_floor=floor_of(records),
        costs=_costs(records),
        walls=_walls(records, default, winner_id),
        evidence=proof(records, winner_id),
        unit="GPU" if any(found.fingerprint.device == "cuda" for r in records if (found := measured_of(r))) else "rank",
        fingerprints=tuple(sorted({found.fingerprint.digest for record in records if (found := measured_of(record))})),
    )


def _walls(records: Sequence[TrialRecord], default: Candidate | None, winner_id: str | None) -> tuple[StandsAt, ...]:
    """Of the default, and of the winner where it is another."""
    winner = next((record.candidate for record in records if record.candidate.id == winner_id), None)
    asked: list[tuple[Role, Candidate]] = [("default", default)] if default else []
    if winner is not None and (default is None or winner.id != default.id):
        asked.append(("winner", winner))
    found = []
    for role, candidate in asked:
        mine = [record for record in records if record.candidate.id == candidate.id]
        outcomes = [outcome for record in mine if (outcome := measured_of(record))]
        found.append(stands_at(role, candidate, label_of(candidate, default), outcomes))
    return tuple(each for each in found if each is not None)


def _costs(records: Sequence[TrialRecord]) -> Costs:
    phases = [outcome.phases for record in records if (outcome := measured_of(record))]
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
