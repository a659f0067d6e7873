"""Where a run keeps its files: `<tracking.folder>/<sweep name>/<run name>/`, run names "001", "002", ...

journal.jsonl   the truth          journal.lock      held while a driver writes
sweep.yaml      the file as run    stop-requested    made by `moetune stop`, seen by the driver

Beside the runs of a sweep stands start.lock, held while a driver looks for others and takes its journal.
"""

from pathlib import Path
from typing import Literal

from search_spaces.errors import Fault, InputError, ResourceMissing
from search_spaces.shapes import Noun
from tracking.journal import JOURNAL_NAME, JournalState, fold, read_events
from tracking.lock import holder
from tuner.over import is_over

STOP_FILE = "stop-requested"
SWEEP_COPY = "sweep.yaml"
NOTHING = "none"  # as in `tuner.verdict`: nothing acceptable was measured


class RunFolder(Noun):
    """One run of one sweep."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL_NAME

    @property
    def sweep_copy(self) -> Path:
        return self.path / SWEEP_COPY

    @property
    def stop_file(self) -> Path:
        return self.path / STOP_FILE

    @property
    def name(self) -> str:
        return self.path.name

    def state(self) -> JournalState:
        return fold(read_events(self.journal))

    def running(self) -> bool:
        """Whether a driver holds this run's journal now."""
        return holder(self.journal) is not None


Doing = Literal["running", "stopping", "done", "resumable", "unreadable"]


class RunStatus(Noun):
    """One line of `moetune status`.

    A trial without a result is in flight while a driver runs, and cut short where none does: --resume runs it again.
    The verdict is the latest one; "none" of a run that is over and measured nothing, "" where there is none yet.
    """

    sweep: str
    run: str
    folder: str
    state: Doing
    finished: int
    in_flight: int
    cut_short: int
    verdict: str


def runs_of(sweep_folder: Path) -> list[RunFolder]:
    """Runs of one sweep, oldest first; empty where there is none."""
    try:
        if not sweep_folder.is_dir():
            return []
    except OSError as error:  # such as a name that is too long
        raise InputError([Fault(f"no such folder can be: {error.strerror}", str(sweep_folder)[:200])]) from error
    folders = [path for path in sweep_folder.iterdir() if path.name.isdecimal() and (path / JOURNAL_NAME).exists()]
    return [RunFolder(path=path) for path in sorted(folders, key=lambda path: int(path.name))]


def next_run(sweep_folder: Path) -> RunFolder:
    """A folder for a new run; not made yet."""
    numbers = (
        [int(path.name) for path in sweep_folder.iterdir() if path.name.isdecimal()] if sweep_folder.is_dir() else []
    )
    return RunFolder(path=sweep_folder / f"{max(numbers, default=0) + 1:03d}")


def chosen_run(sweep_folder: Path, name: str | None) -> RunFolder:
    """The run called `name`, the latest where None. InputError lists the known ones."""
    runs = runs_of(sweep_folder)
    if not runs:
        raise InputError([Fault("no run of this sweep here", str(sweep_folder))], "start one with `moetune run SWEEP`")
    found = [run for run in runs if name in (None, run.name)]
    if not found:
        known = ", ".join(run.name for run in runs)
        raise InputError([Fault(f"no run {name!r}", str(sweep_folder), hint=f"known: {known}")])
    return found[-1]


def status_of(run: RunFolder) -> RunStatus:
    """What a run is doing. A journal that cannot be read is shown as such, never raised."""
    try:
        events = read_events(run.journal)
        state = fold(events) if events else None  # a driver that has just started has not written its head yet
    except (InputError, ResourceMissing):
        return _status(run, "unreadable")
    verdict: str = state.compared[-1].verdict if state and state.compared else ""
    doing: Doing
    if run.running():
        doing = "stopping" if run.stop_file.exists() else "running"
    else:
        doing = "done" if is_over(events) else "resumable"
    if doing == "done" and not verdict:
        verdict = NOTHING
    return _status(run, doing, state, verdict)


def _status(run: RunFolder, doing: Doing, state: JournalState | None = None, verdict: str = "") -> RunStatus:
    unended = len(state.in_flight) if state else 0
    driven = doing in ("running", "stopping")
    return RunStatus(
        sweep=run.path.parent.name,
        run=run.name,
        folder=str(run.path),
        state=doing,
        finished=len(state.finished) if state else 0,
        in_flight=unended if driven else 0,
        cut_short=0 if driven else unended,
        verdict=verdict,
    )
