"""`moetune run`: screen, search, verify, report. The one place where everything meets."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from search_spaces.errors import InputError, Interrupted, NothingAcceptable, ResourceMissing
from search_spaces.memory.fits import MemoryJudge
from search_spaces.rules.versions import version_faults
from search_spaces.screen import LegalSpace, screen
from search_spaces.shapes import Noun, StackVersions
from tracking.journal import Journal, fold
from tracking.mlflow_view import MlflowView
from tracking.record import RuleCount, Screened, SweepStarted
from tracking.screening import same_screening
from tracking.uri import resolve_uri, without_uri_secrets
from train_worker.packages import PACKAGES
from tuner.begin import begun, refuse_second, resumed
from tuner.cpu_memory import Shortage, shortage_of
from tuner.objective import score
from tuner.over import nothing_left
from tuner.progress import Progress
from tuner.run_folder import RunFolder
from tuner.session import SweepSession, now
from tuner.sweep import LoadedSweep
from tuner.sweep_warnings import warnings_of
from tuner.verify import verify, what_follows

if TYPE_CHECKING:
    from tuner.launch.slots import Slots

READY_LIMIT_S = 300.0
STOP_POLL_S = 1.0
VIEW_DRAIN_S = 60.0


class RunOptions(Noun):
    """What the command line adds to the sweep file; None leaves the file's word."""

    resume: bool = False
    beside: bool = False
    address: str | None = None
    isolation: Literal["slot", "job"] | None = None


class RunResult(Noun):
    """What a run came to; the report is made from the journal in `folder`."""

    folder: Path
    trials: int
    stop_reason: str
    verdict: str


def run(sweep: LoadedSweep, options: RunOptions, console: Console) -> RunResult:
    """Run a sweep to its end. Raises Interrupted (130), NothingAcceptable (3), ResourceMissing (4), InputError (2)."""
    with ExitStack() as stack:
        refuse_second(sweep, options.beside)  # at once: a worker is asked for seconds
        opened = resumed(sweep, options.beside, stack) if options.resume else None
        if opened is not None and (why := nothing_left(opened[1].events, sweep.spec)):
            return _done_before(why, sweep, *opened, console)
        short = _shortage(sweep, options)
        software = sweep.spec.stack or _stack_of_workers(sweep, options)
        screening = screen(sweep.space, sweep.model, sweep.spec.cluster, sweep.spec.training, software)
        if not screening.count:
            raise NothingAcceptable(_nothing_legal(screening), "see `moetune plan`, and widen space.choices")
        screened = _screened(screening)
        if opened is not None:
            _same_rules(opened[1], screened, software)
        folder, journal = opened or begun(sweep, options.beside, stack)
        tracking = sweep.spec.tracking
        uri = resolve_uri(tracking.mlflow_uri, tracking.folder)
        view = MlflowView(uri, experiment=tracking.experiment, run_folder=folder.path)
        stack.callback(view.close, VIEW_DRAIN_S)
        progress = stack.enter_context(Progress(sweep, console, view.status))
        session = _session(sweep, journal, screening, [progress.on_event])
        progress.replay(session.records)
        for words in (*warnings_of(sweep.spec, software, short), f"the rules judge by {_words(software)}"):
            progress.say(words)
        _started(session, sweep, folder, resumed=bool(journal.events))
        session.emit(screened)

        def show() -> None:  # only once Ray is up: importing mlflow takes seconds from daemons that must answer in 15 s
            for event in journal.events:
                view.put(event)
            session.listeners.append(view.put)

        _search_and_verify(session, sweep, options, folder, progress, journal, show)
    return _result(session, folder)


def _stack_of_workers(sweep: LoadedSweep, options: RunOptions) -> StackVersions:
    """Where the sweep file names no versions: those of a worker, asked once, before anything is screened or written."""
    from tuner.commands.fingerprint import seen_on_a_worker
    from tuner.launch.cluster import require_here

    cluster, address = sweep.spec.cluster, options.address or sweep.spec.launch.address
    if address is None:
        require_here(cluster)
    stack = seen_on_a_worker(cluster, address).stack
    if faults := version_faults(stack.model_dump())[0]:
        what = "; ".join(f"{message} ({hint})" for _, message, hint in faults)
        raise ResourceMissing(f"on the workers: {what}", "install a known release there")
    return stack


def _words(software: StackVersions) -> str:
    """What a person compares: the versions that are known, and the rest as missing."""
    named = {name: version for name, version in software.model_dump().items() if not name.startswith("megatron_")}
    there = [f"{name} {version}" for name, version in named.items() if version]
    missing = [each.word for each in PACKAGES if not named[each.word]]
    without = f"; without {', '.join(missing)}" if missing else ""
    return f"megatron_core {software.megatron_core}, {', '.join(there)}{without}"


def _shortage(sweep: LoadedSweep, options: RunOptions) -> Shortage | None:
    """Of this machine's memory, for CPU ranks. ResourceMissing where no configuration fits: it would be killed."""
    short = shortage_of(sweep, options.address or sweep.spec.launch.address)
    if short is not None and short.hopeless:
        raise ResourceMissing(short.what, short.next_step)
    return short


def _same_rules(journal: Journal, now: Screened, software: StackVersions) -> None:
    """The rules judge by the workers' software, so that an upgrade of it also changes what they say."""
    known = fold(journal.events).screened if journal.events else None
    try:
        if known is not None:
            same_screening(known, now)
    except InputError as error:
        hint = f"or the workers' software did, which is now {_words(software)}"
        raise InputError([replace(fault, hint=hint) for fault in error.faults], error.next_step) from error


def _session(
    sweep: LoadedSweep, journal: Journal, screening: LegalSpace, listeners: list[Callable[[Any], None]]
) -> SweepSession:
    from tuner.proposer import Proposer
    from tuner.walls_search import WallsProposer

    spec = sweep.spec
    resumed = fold(journal.events) if journal.events else None
    memory = MemoryJudge(screening.facts)
    kind = WallsProposer if spec.search.strategy == "walls" else Proposer
    proposer = kind(screening, spec.objective.direction, spec.seed, spec.budget.trials, memory.state)
    return SweepSession(sweep, journal, proposer, resumed, listeners)


def _started(session: SweepSession, sweep: LoadedSweep, folder: RunFolder, resumed: bool) -> None:
    session.emit(
        SweepStarted(
            sweep_name=sweep.spec.name,
            run_name=folder.name,
            sweep_digest=sweep.digest,
            space_digest=sweep.space.digest,
            sweep_text=without_uri_secrets(sweep.text),
            seed=sweep.spec.seed,
            started_at=now(),
            resumed=resumed,
            finalists=session.most_finalists,
        )
    )


def _screened(screening: LegalSpace) -> Screened:
    counts = tuple(RuleCount(**refusal.model_dump()) for refusal in screening.refusals)
    return Screened(total=screening.total, accepted=screening.count, rejected=counts)


def _search_and_verify(
    session: SweepSession,
    sweep: LoadedSweep,
    options: RunOptions,
    folder: RunFolder,
    progress: Progress,
    journal: Journal,
    show: Callable[[], None],
) -> None:
    """Everything that needs Ray. Leaves no process behind, however it ends."""
    from tuner.launch import cluster

    spec, isolation = sweep.spec, options.isolation or sweep.spec.launch.isolation
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moetune-ray-")))
        progress.say("starting Ray")
        stack.enter_context(stoppable(session, folder, None))
        stack.enter_context(cluster.joined(options.address or spec.launch.address, spec.cluster))
        if session.interrupted:
            return
        # Only now: these import ray.train (2.5 s), and a wrong address should be said at once.
        from tuner.launch.drive import drive, run_on_slot
        from tuner.launch.slots import Slots
        from tuner.launch.trials import run_as_job

        slots = Slots(spec.cluster, scratch) if isolation == "slot" else None
        if slots is not None:
            stack.callback(slots.stop)
        stack.enter_context(stoppable(session, folder, slots))  # again: ray.init has put its own SIGTERM handler there
        show()  # while the workers import, not while the first trial is measured
        if slots is not None:
            slots.start()
            progress.say(f"starting {spec.cluster.slots} worker group(s)")
            waited_s = slots.wait_ready(READY_LIMIT_S, lambda: bool(session.stop_reason))
            progress.say(f"workers ready after {waited_s:.1f} s; searching")
        board = slots.board if slots is not None else None
        if session.search_left():  # Tune without a trial is over while it still copies its own state, and says so
            drive(session, board, scratch, isolation)
        if session.interrupted or session.error or session.broken:
            return
        progress.say(f"search over ({session.stop_reason}); {what_follows(session)}")
        # Of the rounds to come: after more of a search, those that an earlier driver had in flight are history.
        unfinished = tuple(p for p in fold(journal.events).in_flight if p.purpose == "verify")
        verify(session, (lambda job: run_on_slot(board, job)) if board else run_as_job, unfinished)
    progress.say("done")


@contextmanager
def stoppable(session: SweepSession, folder: RunFolder, slots: "Slots | None") -> Iterator[None]:
    """Ctrl-C, SIGTERM and `moetune stop` end the sweep cleanly; a second Ctrl-C ends it at once."""
    over, acted = threading.Event(), threading.Event()

    def stop() -> None:
        acted.set()
        session.interrupt()
        if slots is not None:
            slots.board.interrupt.remote()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if session.interrupted:
            if slots is not None:
                slots.hurry = True
            raise KeyboardInterrupt
        stop()

    def watch() -> None:
        while not over.wait(STOP_POLL_S):
            if folder.stop_file.exists() and not acted.is_set():
                stop()

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    threading.Thread(target=watch, daemon=True, name="stop-watch").start()
    try:
        yield
    finally:
        over.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _result(session: SweepSession, folder: RunFolder) -> RunResult:
    if session.error:
        raise session.error
    if session.broken:
        raise session.broken
    if session.interrupted:
        done = len(session.records)
        raise Interrupted(f"stopped; {done} finished trials are kept in {folder.path}", "go on with --resume")
    return _answer(session.sweep, folder, session.stop_reason)


def _done_before(why: str, sweep: LoadedSweep, folder: RunFolder, journal: Journal, console: Console) -> RunResult:
    """The answer of a run that is over, from its journal alone: no worker is asked and no Ray is started."""
    journal.close()
    result = _answer(sweep, folder, why)
    words = f"run {folder.name} is finished, verdict {result.verdict}: nothing is left to run ({why})"
    console.print(words, markup=False, highlight=False)
    return result


def _answer(sweep: LoadedSweep, folder: RunFolder, stop_reason: str) -> RunResult:
    """Raises NothingAcceptable (exit 3) where nothing was measured."""
    state = folder.state()
    if all(score(record.outcome, sweep.spec.objective) is None for record in state.searched):
        kinds = sorted({record.outcome.kind for record in state.finished})
        raise NothingAcceptable(
            f"no trial gave a measurement ({', '.join(kinds)}); all are recorded in {folder.path}",
            "see the reasons with `moetune report`",
        )
    return RunResult(
        folder=folder.path,
        trials=len(state.finished),
        stop_reason=stop_reason,
        verdict=state.compared[-1].verdict if state.compared else "unverified",
    )


def _nothing_legal(screening: LegalSpace) -> str:
    first = "; ".join(f"{each.count} by {each.rule}: {each.reason}" for each in screening.refusals[:3])
    return f"none of the {screening.total} configurations can run here: {first}"
