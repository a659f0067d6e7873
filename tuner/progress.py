"""What a person sees while a sweep runs: a live table on a terminal, one plain line an event elsewhere."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tracking.reason import failure_line
from tracking.record import Compared, Event, Proposed, Screened, SweepStarted, TrialRecord
from train_worker.outcome import Measured, Outcome
from tuner.budget import searched_s
from tuner.objective import Objective, score
from tuner.report import seconds, shortened
from tuner.sweep import LoadedSweep

REFRESH_PER_SECOND = 2  # the machine that measures may be the one that draws
REASONS_SHOWN = 6
RECENT_SHOWN = 6
RUNNING_SHOWN = 6
LINE_CHARACTERS = 160


class Progress:
    """Takes events (`on_event`) and notes (`say`). A context manager: the live table ends with the block.

    `view_status` says how far MLflow is behind, in words ("" while it is not); it is asked at each drawing.
    """

    def __init__(
        self,
        sweep: LoadedSweep,
        console: Console,
        view_status: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sweep, self.console, self.view_status, self.clock = sweep, console, view_status, clock
        self.began = clock()
        self.default = sweep.space.default()
        self.outcomes: Counter[str] = Counter()
        self.repeats = self.retries = 0
        self.worker_s = 0.0
        self.earlier_s = 0.0  # what the drivers before this one used of budget.wall_time_s
        self.screened: Screened | None = None
        self.best: tuple[float, TrialRecord] | None = None
        self.running: dict[str, tuple[Proposed, float]] = {}
        self.recent: list[str] = []
        self.status = "starting"
        self._live = Live(get_renderable=self.table, console=console, refresh_per_second=REFRESH_PER_SECOND)

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
                self.running = {**self.running, event.trial_id: (event, self.clock())}
            case TrialRecord():
                self._finished(event)
            case Compared():
                others = f" (named of {len(event.runners_up) + 1})" if event.runners_up else ""
                self.say(f"finalist{others} against default: {event.verdict}")

    def replay(self, records: Iterable[TrialRecord], in_flight: Iterable[Proposed] = ()) -> None:
        """Count what a resumed sweep had done before; what was in flight then runs again first."""
        records = list(records)
        for record in records:
            self._count(record)
        self.earlier_s = searched_s(records, self.sweep.spec.cluster)
        self.running = {proposed.trial_id: (proposed, self.clock()) for proposed in in_flight}

    def _finished(self, record: TrialRecord) -> None:
        # A new dict: the thread that draws may be walking over the old one.
        self.running = {name: each for name, each in self.running.items() if name != record.trial_id}
        self._count(record)
        text = f"trial {record.number} [{record.purpose}] {describe(record.outcome)} - {self._label(record)}"
        self.recent = [*self.recent, text][-RECENT_SHOWN:]
        if not self.console.is_terminal:
            self._line(text)

    def _count(self, record: TrialRecord) -> None:
        self.worker_s += record.wall_s * self.sweep.spec.cluster.workers_per_trial
        self.retries += record.attempts - 1
        if record.purpose == "verify":
            self.repeats += 1
        else:
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
        self.console.print(f"[{self.clock() - self.began:7.1f} s] {text}", markup=False, highlight=False)

    def table(self) -> Table:
        """The live table as it stands. All text is shown as it is, never as markup."""
        title = Text(f"moetune {self.sweep.spec.name}: {self.status}")
        table = Table(title=title, title_justify="left", show_header=False)
        for name, text in self._rows():
            table.add_row(name, Text(text))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "trials", self._trials()
        yield from self._used()
        yield from self._running()
        if self.best:
            value, record = self.best
            yield "best", f"{self.sweep.spec.objective.metric} {value:.4g}: {self._label(record)}"
        if behind := self.view_status():
            yield "MLflow", shortened(behind, LINE_CHARACTERS)
        rejected = self.screened.rejected if self.screened else ()
        for count in rejected[:REASONS_SHOWN]:
            yield "rejected", shortened(f"{count.count:,} by {count.rule}: {count.reason}", LINE_CHARACTERS)
        if len(rejected) > REASONS_SHOWN:
            rest = sum(count.count for count in rejected[REASONS_SHOWN:])
            yield "", f"{rest:,} by {len(rejected) - REASONS_SHOWN} more rules; see `moetune plan`"
        for text in self.recent:
            yield "", text

    def _trials(self) -> str:
        done, budget = sum(self.outcomes.values()), self.sweep.spec.budget.trials
        parts = [f"{count} {kind.replace('_', ' ')}" for kind, count in self.outcomes.items()]
        parts += [f"{self.repeats} repeated to verify"] if self.repeats else []
        parts += [f"{self.retries} retries"] if self.retries else []
        return f"{done} of {budget}" + (f": {', '.join(parts)}" if parts else "")

    def _used(self) -> Iterator[tuple[str, str]]:
        """Of each limit of the budget but trials: what is used and what is left."""
        budget, here_s = self.sweep.spec.budget, self.clock() - self.began
        left_s = None if budget.wall_time_s is None else max(budget.wall_time_s - here_s - self.earlier_s, 0.0)
        left = "" if left_s is None else f", {seconds(left_s)} of search left"
        earlier = f" after {seconds(self.earlier_s)} before the resume" if self.earlier_s else ""
        yield "time", f"{seconds(here_s)}{earlier}{left}"
        hours = self.worker_s / 3600
        left = "" if budget.worker_hours is None else f", {max(budget.worker_hours - hours, 0):.3g} left"
        yield "worker-hours", f"{hours:.3g}{left}"

    def _running(self) -> Iterator[tuple[str, str]]:
        running = list(self.running.values())
        for proposed, since in running[:RUNNING_SHOWN]:
            label = proposed.candidate.label(self.default)
            yield "running", f"{proposed.number} [{proposed.purpose}] {seconds(self.clock() - since)} - {label}"
        if len(running) > RUNNING_SHOWN:
            yield "", f"and {len(running) - RUNNING_SHOWN} more"


def describe(outcome: Outcome) -> str:
    """An outcome in one line, with the number that matters."""
    if isinstance(outcome, Measured):
        step_time_s = score(outcome, Objective()) or 0.0
        given_up = ", given up as too slow" if outcome.given_up else ""
        return f"{step_time_s * 1e3:.1f} ms a step, {outcome.peak_memory_bytes / 2**20:.1f} MiB{given_up}"
    return shortened(failure_line(outcome), LINE_CHARACTERS)
