"""`moetune report` on a journal on disk: the terminal, MLflow and the page together."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from search_spaces.errors import InputError
from tests.tracking.runs import prepare, read_runs
from tests.tracking.sample import candidate, finished, head, measured, sweep
from tracking.journal import JOURNAL_NAME, Journal
from tracking.record import Event
from tuner.commands.report import Report, experiment_of, objective_of, report


def run_folder(tmp_path: Path, events: list[Event]) -> Path:
    folder = tmp_path / "runs" / "laptop" / "001"
    with Journal.create(folder / JOURNAL_NAME) as journal:
        for event in events:
            journal.put(event)
    return folder


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def made(folder: Path, out: Path | None = None, uri: str | None = None) -> tuple[Report, str]:
    stream = io.StringIO()
    return report(folder, out, uri, Console(file=stream, width=200)), stream.getvalue()


def test_it_prints_fills_in_mlflow_and_writes_the_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, sweep())
    uri = prepare(tmp_path / "runs")
    found, text = made(folder, tmp_path / "out")
    assert text.startswith("Faster: ")
    assert found.leaderboard.verdict.kind == "faster"
    assert (found.mlflow.written, found.mlflow.failed) == (len(sweep()), 0)
    assert len(read_runs(uri)) == 10
    assert found.html == str(tmp_path / "out" / "index.html")
    assert (tmp_path / "out" / "index.html").exists()
    again, _ = made(folder)
    assert (again.mlflow.written, again.mlflow.failed) == (0, 0)
    assert not found.running


def test_a_dead_tracking_server_is_said_and_the_report_is_made(tmp_path: Path) -> None:
    found, text = made(run_folder(tmp_path, sweep()), None, "http://me:hunter2@127.0.0.1:9")
    assert found.mlflow.failed == len(sweep())
    assert "The journal has everything" in text
    assert "hunter2" not in text + found.model_dump_json()


def test_a_report_while_the_driver_is_at_work_leaves_the_run_open(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, sweep()[:4])
    uri = prepare(tmp_path / "runs")
    with Journal.open(folder / JOURNAL_NAME):
        assert made(folder)[0].running
    assert read_runs(uri)["laptop/001"].status == "RUNNING"
    made(folder)
    assert read_runs(uri)["laptop/001"].status == "FINISHED"


def test_the_objective_is_the_one_of_the_sweep_file(tmp_path: Path) -> None:
    text = "name: laptop\nobjective:\n  metric: peak_memory_bytes\n"
    assert objective_of(text).metric == "peak_memory_bytes"
    assert objective_of("name: x\n").metric == "step_time_s"
    assert objective_of("objective: {metric: nonsense}").metric == "step_time_s"
    small = finished(1, candidate(x=1), measured(0.4, memory=5))
    events: list[Event] = [head().model_copy(update={"sweep_text": text})]
    events += [finished(0, candidate(), measured(0.1), "baseline"), small]
    found, _ = made(run_folder(tmp_path, events), None, "http://127.0.0.1:9")
    assert found.leaderboard.rows[0].label == "x=1"


def test_mlflow_is_filled_in_the_experiment_of_the_sweep_file(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    assert experiment_of("name: x\n") == experiment_of("tracking: {experiment: [1]}") == "moetune"
    text = "name: laptop\ntracking:\n  experiment: team/moe\n"
    events: list[Event] = [head().model_copy(update={"sweep_text": text})]
    events += [finished(0, candidate(), measured(0.1), "baseline")]
    folder, uri = run_folder(tmp_path, events), prepare(tmp_path / "runs")
    assert made(folder)[0].mlflow.written == 2
    (found,) = (each for each in MlflowClient(tracking_uri=uri).search_experiments() if each.name != "Default")
    assert found.name == "team/moe"
    assert len(read_runs(uri)) == 2


def test_a_missing_and_an_empty_journal_are_faults_of_the_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        made(tmp_path)
    with pytest.raises(InputError, match="empty"):
        made(run_folder(tmp_path, []))
