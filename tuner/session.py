"""One sweep from the inside: what to run next, and what to make of what came back. No Ray, no Optuna, no MLflow.

Everything that happens is an event; the journal takes it first (the truth), then the listeners (MLflow,
progress). A resumed session is folded from the journal's events and goes on where they end.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Literal, Protocol

from search_spaces.candidate import Candidate
from search_spaces.errors import MoetuneError, ResourceMissing
from search_spaces.shapes import TrainingShape
from tracking.journal import Journal, JournalState
from tracking.record import Event, Proposed, Purpose, TrialRecord
from tracking.traces import store_trace
from train_worker.job import TrialJob
from train_worker.keep import unpacked
from train_worker.outcome import Crashed, Measured, Outcome
from train_worker.profile import Wall
from train_worker.rank_report import InterruptedGang, NoSlot, SlotResult
from tuner.budget import searched_s, spent
from tuner.finalists import finalists, most_finalists
from tuner.objective import judge, score
from tuner.sweep import LoadedSweep

logger = logging.getLogger(__name__)
LOST_LIMIT = 2  # a trial that Tune itself loses this often is recorded as crashed
Told = Literal["measured", "infeasible", "lost"]


class ProposerLike(Protocol):
    """What a session needs of the search (`tuner.proposer.Proposer`)."""

    def propose(self, number: int) -> Candidate | None: ...
    def adopt(self, number: int, candidate: Candidate) -> None: ...
    def tell(self, number: int, told: Told, value: float | None = None, wall: Wall | None = None) -> None: ...
    def restore(
        self, candidate: Candidate, told: Told, value: float | None = None, wall: Wall | None = None
    ) -> None: ...


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class SweepSession:
    """State of a running sweep. `listeners` get every event after the journal has it; what they raise is logged."""

    def __init__(
        self,
        sweep: LoadedSweep,
        journal: Journal,
        proposer: ProposerLike,
        resumed: JournalState | None,
        listeners: Sequence[Callable[[Event], None]] = (),
    ) -> None:
        self.sweep, self.proposer = sweep, proposer
        self.default = sweep.space.default()
        self.error: MoetuneError | None = None
        self.broken: Exception | None = None
        self.interrupted = False
        self.stop_reason = ""
        self.records: list[TrialRecord] = list(resumed.finished) if resumed else []
        self._journal, self.listeners = journal, list(listeners)
        # A run from before there could be several goes on as it was begun.
        self.most_finalists = resumed.head.finalists if resumed else most_finalists(sweep.spec)
        self._next_number = resumed.next_number if resumed else 0
        self._pending = deque(p for p in resumed.in_flight if p.purpose != "verify") if resumed else deque[Proposed]()
        self._running: dict[str, tuple[Proposed, str]] = {}
        self._lost: dict[int, int] = {}
        # A resumed sweep has used what its trials took: the time between two drivers is nobody's.
        self._began = time.monotonic() - searched_s(self.records, sweep.spec.cluster)
        # By number, those in flight too: the order of its trials is part of what a sampler goes by.
        known: list[TrialRecord | Proposed] = [*self._searched(), *self._pending]
        for past in sorted(known, key=lambda each: each.number):
            if isinstance(past, Proposed):
                proposer.adopt(past.number, past.candidate)
            else:
                proposer.restore(past.candidate, *self._told(past.outcome))

    # --- what Tune asks (tuner.search.Session)

    def next_job(self, handle: str) -> str:
        """A TrialJob as JSON, "wait" (every slot is taken, or the baseline must end first), or "done"."""
        if not self.search_left():
            return "done"
        if len(self._running) >= self.sweep.spec.cluster.slots:
            return "wait"  # else Tune queues ahead, and a proposal knows less than it could
        proposed = self._next_proposal()
        if self.error:  # the proposal could not be written down: it must not run
            return "done"
        if isinstance(proposed, str):
            return proposed
        self._running[handle] = (proposed, now())
        job = self.job(proposed.trial_id, proposed.candidate)
        return job.model_copy(update={"slow_above_s": self._too_slow_s()}).model_dump_json()

    def finish(self, handle: str, result_json: str | None) -> None:
        """Take what Tune's trial `handle` brought: a SlotResult as JSON, or None where Tune lost the trial."""
        if handle not in self._running:
            return
        proposed, started_at = self._running.pop(handle)
        result = SlotResult.model_validate_json(result_json) if result_json else None
        if result is None:
            self._lost[proposed.number] = self._lost.get(proposed.number, 0) + 1
            if self._lost[proposed.number] < LOST_LIMIT:
                self._pending.appendleft(proposed)
                return
            lost = Crashed(phase="unknown", detail="Ray Tune lost the trial's actor", infrastructure=True)
            result = SlotResult(outcome=lost, attempts=LOST_LIMIT, wall_s=0.0)
        if not self.usable(result):
            return
        record = self.record(proposed, result, started_at)
        self.proposer.tell(record.number, *self._told(record.outcome))

    # --- for the verification and the driver

    def search_left(self) -> bool:
        """Whether the budget leaves a trial of the search, and nobody has asked to stop."""
        return not (self.stop_reason or self._spent())

    def propose(self, candidate: Candidate, purpose: Purpose) -> Proposed:
        """Write down that a trial of `candidate` is to run."""
        number = self._next_number
        self._next_number += 1
        trial_id = f"{number:04d}-{candidate.id}"
        proposed = Proposed(number=number, trial_id=trial_id, purpose=purpose, candidate=candidate, at=now())
        self.emit(proposed)
        return proposed

    def usable(self, result: SlotResult) -> bool:
        """False where a trial has no outcome: it stays proposed, and runs again on resume."""
        if isinstance(result.outcome, NoSlot):
            next_step = "see `ray status` and the workers' logs, then go on with --resume"
            self.request_stop(result.outcome.detail, ResourceMissing(result.outcome.detail, next_step))
        return not isinstance(result.outcome, InterruptedGang | NoSlot)

    def record(self, proposed: Proposed, result: SlotResult, started_at: str) -> TrialRecord:
        """Judge an outcome against the baseline and write it down. A full disk stops the sweep, with nothing lost."""
        assert not isinstance(result.outcome, InterruptedGang | NoSlot)
        record = TrialRecord(
            number=proposed.number,
            trial_id=proposed.trial_id,
            purpose=proposed.purpose,
            candidate=proposed.candidate,
            outcome=judge(
                result.outcome,
                self._baseline_of(proposed.purpose),
                self.sweep.spec.guard,
                self.sweep.spec.training.least_steps,
            ),
            wall_s=result.wall_s,
            attempts=result.attempts,
            started_at=started_at,
            ended_at=now(),
        )
        self.records.append(record)
        if result.trace:  # before the record: MLflow takes it when it hears of that
            store_trace(self._journal.path.parent, proposed.trial_id, unpacked(result.trace))
        self.emit(record)
        return record

    def emit(self, event: Event) -> None:
        """Journal first, then the listeners. A journal that cannot be written stops the sweep."""
        try:
            self._journal.put(event)
        except MoetuneError as error:
            self.request_stop(error.what, error)
            if not getattr(error, "recorded", False):
                logger.error("not recorded: %s", event.model_dump_json())
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:  # a view may fail in any way; the journal and the sweep go on
                logger.exception("a listener failed on %s", event.event)

    def job(self, trial_id: str, candidate: Candidate, training: TrainingShape | None = None) -> TrialJob:
        """`training` None: as the sweep file says."""
        spec = self.sweep.spec
        return TrialJob(
            trial_id=trial_id,
            candidate=candidate,
            model=self.sweep.model,
            cluster=spec.cluster,
            training=training or spec.training,
            seed=spec.seed,
            environment_knobs=tuple(knob.name for knob in self.sweep.space.knobs if knob.is_env),
            time_limit_s=spec.budget.trial_time_limit_s,
        )

    def request_stop(self, reason: str, error: MoetuneError | None = None) -> None:
        """No new trial from here on. The first reason stays."""
        self.stop_reason = self.stop_reason or reason
        self.error = self.error or error

    def fail(self, error: Exception) -> None:
        """A fault of ours inside Tune's loop: no new trial; `broken` is raised once Tune is done."""
        self.broken = self.broken or error
        self.request_stop(f"{type(error).__name__}: {error}")

    def interrupt(self) -> None:
        """The user wants it to end, whatever else did: no new trial, no verification, resumable."""
        self.interrupted = True
        self.request_stop("interrupted")

    @property
    def reference(self) -> Measured | None:
        """The baseline's measurement, which the guard compares with; else the first one made."""
        measured = [r for r in self.records if isinstance(r.outcome, Measured) and r.purpose != "verify"]
        baseline = [r for r in measured if r.purpose == "baseline"]
        first = (baseline or measured)[:1]
        return first[0].outcome if first and isinstance(first[0].outcome, Measured) else None

    def repeats(self, candidate: Candidate) -> list[TrialRecord]:
        """Verification trials of a candidate since the search ended; those of an earlier budget are history."""
        last = max((r.number for r in self.records if r.purpose != "verify"), default=-1)
        mine = [r for r in self.records if r.purpose == "verify" and r.number > last]
        return sorted((r for r in mine if r.candidate.id == candidate.id), key=lambda record: record.number)

    def finalists(self) -> list[TrialRecord]:
        """The trials whose configurations are to be verified (tuner.finalists), the best first."""
        return finalists(self.records, self.default.id, self.sweep.spec.objective, self.most_finalists)

    # --- inside

    def _next_proposal(self) -> Proposed | Literal["wait", "done"]:
        if self._pending:
            return self._pending.popleft()
        if self._next_number == 0:
            self.proposer.adopt(0, self.default)
            return self.propose(self.default, "baseline")
        if self._baseline_runs():
            return "wait"
        candidate = self.proposer.propose(self._next_number)
        if candidate is None:
            self.request_stop("every legal candidate was tried")
            return "done"
        return self.propose(candidate, "search")

    def _baseline_of(self, purpose: Purpose) -> Measured | None:
        """What the guard compares a trial with: the same routing, for balance by force is another loss."""
        if purpose != "verify" or self.sweep.spec.training.routing == "natural":
            return self.reference
        outcomes = [record.outcome for record in self.repeats(self.default)]
        return next((outcome for outcome in outcomes if isinstance(outcome, Measured)), None)

    def _baseline_runs(self) -> bool:
        return any(proposed.purpose == "baseline" for proposed, _ in self._running.values())

    def _spent(self) -> bool:
        spec = self.sweep.spec
        reason = spent(spec.budget, spec.cluster, self.records, len(self._running), time.monotonic() - self._began)
        if reason:
            self.request_stop(reason)
        return bool(reason)

    def _too_slow_s(self) -> float | None:
        """A step time that no winner has, seconds; None before anything ran, or where speed is not the objective."""
        factor, metric = self.sweep.spec.budget.slow_factor, self.sweep.spec.objective.metric
        ran = [r.outcome for r in self._searched() if isinstance(r.outcome, Measured)]
        if factor is None or metric == "peak_memory_bytes" or not ran:
            return None
        return factor * min(median(sample.step_time_s for sample in outcome.steps) for outcome in ran)

    def _searched(self) -> list[TrialRecord]:
        return [record for record in self.records if record.purpose != "verify"]

    def _told(self, outcome: Outcome) -> tuple[Told, float | None, Wall | None]:
        if isinstance(outcome, Crashed) and outcome.infrastructure:
            return "lost", None, None
        value = score(outcome, self.sweep.spec.objective)
        if value is None:
            return "infeasible", None, None
        profile = outcome.profile if isinstance(outcome, Measured) else None
        wall = profile.wall if profile else None
        # Whose objective is memory asks for what saves it, wherever the step stands.
        saves = wall is not None and self.sweep.spec.objective.metric == "peak_memory_bytes"
        return "measured", value, "memory" if saves else wall
