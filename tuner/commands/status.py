"""`moetune status` and `moetune stop`: by files in the run's folder, so they work wherever that folder is seen."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.errors import Fault, InputError, ResourceMissing
from search_spaces.shapes import Noun
from tuner.run_folder import NOTHING, RunStatus, chosen_run, runs_of, status_of

POLL_S = 0.2


class Statuses(Noun):
    """All runs under one tracking folder, by sweep and run name."""

    runs: tuple[RunStatus, ...]


def statuses(folder: Path) -> Statuses:
    """Every run of every sweep under `folder`. InputError where the folder is not there or cannot be read."""
    if not folder.is_dir():
        raise InputError([Fault("no such folder", str(folder))], "give the tracking.folder of your sweep files")
    try:
        homes = sorted(path for path in folder.iterdir() if path.is_dir())
        return Statuses(runs=tuple(status_of(run) for home in homes for run in runs_of(home)))
    except OSError as error:
        where = str(error.filename or folder)
        raise InputError([Fault(f"cannot read it: {error.strerror}", where)], "make the folder readable") from error


def render(found: Statuses, console: Console) -> None:
    if not found.runs:
        console.print("no runs yet")
        return
    table = Table("sweep", "run", "state", "finished", "in flight", "verdict", "next")
    for each in found.runs:
        counts = (str(each.finished), str(each.in_flight))
        table.add_row(Text(each.sweep), each.run, each.state, *counts, each.verdict, to_resume(each))
    console.print(table)


def to_resume(run: RunStatus) -> str:
    """What is left to do about a run that no driver works on, in words; empty where nothing is."""
    if run.state == "done" and run.verdict == NOTHING:
        return "nothing was measured: `moetune report` says why"
    if run.cut_short and run.state != "done":
        return f"go on with --resume ({run.cut_short} cut short, to run again)"
    return "go on with --resume" if run.state == "resumable" else ""


def stop(sweep_folder: Path, wait_s: float) -> RunStatus:
    """Ask the latest running run to stop and wait until its driver let go. InputError where none is running."""
    latest = chosen_run(sweep_folder, None)
    run = next((each for each in reversed(runs_of(sweep_folder)) if each.running()), None)
    if run is None:
        raise InputError([Fault("this sweep is not running", str(latest.path))], "see `moetune status`")
    run.stop_file.touch()
    deadline = time.monotonic() + wait_s
    while run.running():
        if time.monotonic() > deadline:
            raise ResourceMissing(f"the driver of {run.path} did not stop in {wait_s:g} s", "wait longer with --wait")
        time.sleep(POLL_S)
    return status_of(run)
