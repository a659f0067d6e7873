"""How a driver begins: it takes the journal of a new run, or of the latest one; one driver a sweep unless asked."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from search_spaces.errors import Fault, InputError, ResourceMissing
from tracking.journal import Journal, JournalState, fold
from tracking.lock import holder, turn
from tracking.uri import without_uri_secrets
from tuner.run_folder import RunFolder, chosen_run, next_run, runs_of, status_of
from tuner.sweep import LoadedSweep

START_LOCK = "start.lock"


def refuse_second(sweep: LoadedSweep, beside: bool) -> None:
    """ResourceMissing (exit 4) where a driver of this sweep is running, unless `beside`: two on one cluster spoil both.

    Only a living process counts: one that was killed, or whose machine went down, holds no lock.
    """
    running = [] if beside else [words for run in runs_of(sweep.home) if (words := _driven(run))]
    if running:
        raise ResourceMissing(
            f"this sweep is running already: {'; '.join(running)}",
            f"see `moetune status {sweep.path}`, or end it with `moetune stop {sweep.path}`; --beside starts another "
            "all the same, for other machines: on the same ones each disturbs the other's times",
        )


def begun(sweep: LoadedSweep, beside: bool, stack: ExitStack) -> tuple[RunFolder, Journal]:
    """A new run. Raises as `refuse_second` does, and ResourceMissing where the folder cannot be written."""
    with _only_driver(sweep, beside):
        folder = next_run(sweep.home)
        _keep_copy(sweep, folder)
        journal = Journal.create(folder.journal)
        stack.callback(journal.close)
    return folder, journal


def _keep_copy(sweep: LoadedSweep, folder: RunFolder) -> None:
    """Before there is a journal, which makes the folder a run: no run is without its sweep file."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.sweep_copy.open("w", encoding="utf-8") as file:
            file.write(without_uri_secrets(sweep.text))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ResourceMissing(f"cannot write in {folder.path}: {error}", "free space there, then try again") from error


def resumed(sweep: LoadedSweep, beside: bool, stack: ExitStack) -> tuple[RunFolder, Journal]:
    """The latest run. Raises as `refuse_second` does, and InputError where there is none or the file means another
    sweep, before anything is asked of workers."""
    chosen_run(sweep.home, None)  # where there is none no folder is made
    with _only_driver(sweep, beside):
        folder = chosen_run(sweep.home, None)
        journal = Journal.open(folder.journal)
        stack.callback(journal.close)
        # Of an earlier driver: before this one is seen to run, so that a stop which is meant for it is kept.
        folder.stop_file.unlink(missing_ok=True)
    if journal.events:
        _same_sweep(fold(journal.events), sweep, folder)
    return folder, journal


def _same_sweep(state: JournalState, sweep: LoadedSweep, folder: RunFolder) -> None:
    if (state.head.sweep_digest, state.head.space_digest) != (sweep.digest, sweep.space.digest):
        raise InputError(
            [Fault("the sweep file changed since this run began; its trials cannot be compared", str(folder.path))],
            "run without --resume, or restore the file (a copy is sweep.yaml in that folder); budget may change",
        )


@contextmanager
def _only_driver(sweep: LoadedSweep, beside: bool) -> Iterator[None]:
    """While a driver takes its journal no other one of this sweep does, and (unless `beside`) none is running."""
    with turn(sweep.home / START_LOCK):
        refuse_second(sweep, beside)
        yield


def _driven(run: RunFolder) -> str:
    """Who drives a run and how far it is, in words; empty where nobody does."""
    held = holder(run.journal)
    if held is None:
        return ""
    found = status_of(run)
    state = {"running": "", "stopping": ", which is stopping"}.get(found.state, ", whose journal cannot be read")
    return f"run {run.name}{state} ({held}; {found.finished} trials finished, {found.in_flight} in flight; {run.path})"
