"""What a person sees while a sweep runs: a live table on a terminal, one plain line an event elsewhere."""

import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from tracking.record import Compared, Event, Proposed, Screened, SweepStarted, TrialRecord
from train_worker.outcome import Crashed, Diverged, Hung, Measured, Outcome, OutOfMemory, Rejected
from tuner.objective import Objective, score
from tuner.sweep import LoadedSweep

REFRESH_PER_SECOND = 2  # the machine that measures may be the one that draws
REASONS_SHOWN = 6
RECENT_SHOWN = 6


class Progress:
    """Takes events (`on_event`) and notes (`say`). A context manager: the live table ends with the block."""

    def __init__(self, sweep: LoadedSweep, console: Console) -> None:
        self.sweep, self.console = sweep, console
        self.began = time.monotonic()
        self.default = sweep.space.default()
        self.outcomes: Counter[str] = Counter()
        self.screened: Screened | None = None
        self.best: tuple[float, TrialRecord] | None = None
        self.running: Proposed | None = None
        self.recent: list[str] = []
        self.status = "starting"
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=REFRESH_PER_SECOND)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """A change of what the sweep as a whole is doing."""
        self.status = text
        if not self.console.is_terminal:
            self._line(text)

    def on_event(self, event: Event) -> None:
        match event:
            case SweepStarted():
                self.say(f"{'resumed' if event.resumed else 'started'} {event.sweep_name}/{event.run_name}")
            case Screened():
                self.screened = event
                self.say(f"{event.accepted} of {event.total} configurations can run here")
            case Proposed():
                self.running = event
            case TrialRecord():
                self._finished(event)
            case Compared():
                self.say(f"finalist against default: {event.verdict}")

    def replay(self, records: list[TrialRecord]) -> None:
        """Count what a resumed sweep had done before."""
        for record in records:
            self._count(record)

    def _finished(self, record: TrialRecord) -> None:
        self._count(record)
        text = f"trial {record.number} [{record.purpose}] {describe(record.outcome)} - {self._label(record)}"
        self.recent = [*self.recent, text][-RECENT_SHOWN:]
        if not self.console.is_terminal:
            self._line(text)

    def _count(self, record: TrialRecord) -> None:
        if record.purpose != "verify":
            self.outcomes[record.outcome.kind] += 1
            self._keep_best(record)

    def _keep_best(self, record: TrialRecord) -> None:
        objective: Objective = self.sweep.spec.objective
        value = score(record.outcome, objective)
        sign = 1 if objective.direction == "minimize" else -1
        if value is not None and (self.best is None or sign * value < sign * self.best[0]):
            self.best = (value, record)

    def _label(self, record: TrialRecord) -> str:
        return record.candidate.label(self.default)

    def _line(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self.began:7.1f} s] {text}", markup=False, highlight=False)

    def _table(self) -> Group:
        budget, done = self.sweep.spec.budget, sum(self.outcomes.values())
        spent = time.monotonic() - self.began
        table = Table(title=f"moetune {self.sweep.spec.name}: {self.status}", title_justify="left", show_header=False)
        table.add_row(
            "trials", f"{done} of {budget.trials}: " + ", ".join(f"{n} {k}" for k, n in self.outcomes.items())
        )
        left = "" if budget.wall_time_s is None else f", {max(budget.wall_time_s - spent, 0):.0f} s of search left"
        table.add_row("time", f"{spent:.0f} s{left}")
        if self.running:
            table.add_row("running", f"{self.running.trial_id} [{self.running.purpose}]")
        if self.best:
            value, record = self.best
            table.add_row("best", f"{self.sweep.spec.objective.metric} {value:.4g}: {self._label(record)}")
        for count in self.screened.rejected[:REASONS_SHOWN] if self.screened else ():
            table.add_row("rejected", f"{count.count} by {count.rule}: {count.reason}")
        for text in self.recent:
            table.add_row("", text)
        return Group(table)


def describe(outcome: Outcome) -> str:
    """An outcome in a few words, with the number that matters."""
    match outcome:
        case Measured():
            step_time_s = score(outcome, Objective()) or 0.0
            return f"{step_time_s * 1e3:.1f} ms a step, {outcome.peak_memory_bytes / 2**20:.1f} MiB"
        case OutOfMemory():
            return f"out of {outcome.where} memory in {outcome.phase}"
        case Rejected():
            return f"rejected by {outcome.rule}: {outcome.reason}"
        case Hung():
            return f"hung in {outcome.phase}, killed after {outcome.time_limit_s:g} s"
        case Diverged():
            return f"diverged at step {outcome.step}: {outcome.reason}"
        case Crashed():
            kind = "lost to infrastructure" if outcome.infrastructure else "crashed"
            return f"{kind} in {outcome.phase}: {(outcome.detail.strip().splitlines() or [''])[-1][:120]}"
