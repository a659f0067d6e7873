"""`moetune report`: read a run's journal, print the leaderboard, fill in MLflow, write the HTML page."""

from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.text import Text

from search_spaces.memory.calibration import Errors
from search_spaces.shapes import Noun
from tracking.journal import JOURNAL_NAME, fold, read_events
from tracking.lock import holder
from tracking.mlflow_payload import EXPERIMENT
from tracking.mlflow_view import SyncResult, sync
from tracking.uri import masked, resolve_uri
from tuner.leaderboard import Leaderboard, leaderboard
from tuner.memory_errors import memory_errors, said
from tuner.objective import BETTER, Objective
from tuner.report import render
from tuner.sweep_yaml import parse


class Report(Noun):
    """What `moetune report --json` prints. `tracking_uri` has no password in it."""

    leaderboard: Leaderboard
    run_folder: str
    running: bool
    tracking_uri: str
    mlflow: SyncResult
    memory: Errors | None = Field(None, description="predicted against measured reserved memory; None without a GPU")
    html: str | None


def report(run_folder: Path, out_dir: Path | None, mlflow_uri: str | None, console: Console) -> Report:
    """Report on the run in `run_folder`, also while it goes on. A tracking server that fails is said, not raised.

    InputError for a journal that is absent, empty or damaged; ResourceMissing where `out_dir` cannot be written.
    """
    journal = run_folder / JOURNAL_NAME
    events = read_events(journal)
    state = fold(events)
    head = state.head
    objective = objective_of(head.sweep_text)
    board = leaderboard(events, objective)
    render(board, console)
    memory = memory_errors(run_folder, state.finished)
    if memory is not None:
        console.print(Text(said(memory)))
    html = None
    if out_dir is not None:
        from tuner.report_html import write_html  # plotly: half a second, and only for the page

        html = write_html(events, out_dir, objective)
        console.print(Text(f"HTML report: {html}"))
    running = holder(journal) is not None
    uri = resolve_uri(mlflow_uri, run_folder.parent.parent)
    found = sync(events, uri, ended=not running, experiment=experiment_of(head.sweep_text), run_folder=run_folder)
    _say(found, uri, console)
    return Report(
        leaderboard=board,
        run_folder=str(run_folder),
        running=running,
        tracking_uri=masked(uri),
        mlflow=found,
        memory=memory,
        html=str(html) if html else None,
    )


def objective_of(sweep_text: str) -> Objective:
    """The objective a sweep file names; the default one where it names none."""
    metric = _written(sweep_text, "objective", "metric")
    return next((Objective(metric=name, direction=BETTER[name]) for name in BETTER if name == metric), Objective())


def experiment_of(sweep_text: str) -> str:
    """MLflow's experiment that a sweep file names; the default one where it names none."""
    name = _written(sweep_text, "tracking", "experiment")
    return name if isinstance(name, str) else EXPERIMENT


def _written(sweep_text: str, section: str, key: str) -> object:
    """What the sweep file of a run says; None where it is silent. Unchecked: a version ago it may have been valid."""
    data = parse(sweep_text, "sweep.yaml").data
    found = data.get(section) if isinstance(data, dict) else None
    return found.get(key) if isinstance(found, dict) else None


def _say(found: SyncResult, uri: str, console: Console) -> None:
    if found.failed:
        console.print(Text(f"MLflow lacks {found.failed} events: {found.error}", style="yellow"))
        console.print("The journal has everything; run `moetune report` again when the server answers.")
    elif found.error:
        console.print(Text(f"MLflow: {found.error}", style="yellow"))
    else:
        console.print(Text(f"MLflow at {masked(uri)}: {found.written} events filled in, {found.already} were there"))
