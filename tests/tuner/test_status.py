"""`moetune status` and `moetune stop`, on real journals and a driver that holds a real lock."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from search_spaces.errors import InputError, ResourceMissing
from tests.tracking.sample import candidate, finished, measured, sweep
from tracking.journal import Journal
from tuner.commands.status import render, statuses, stop, to_resume
from tuner.run_folder import RunFolder, RunStatus, next_run


def run_of(home: Path, verdict: bool = True) -> RunFolder:
    run = next_run(home)
    with Journal.create(run.journal) as journal:
        for event in sweep() if verdict else sweep()[:4]:
            journal.put(event)
    return run


@contextmanager
def driving(run: RunFolder, obeys: bool = True) -> Iterator[None]:
    """A driver: holds the journal until it is asked to stop, and writes one more record before it lets go."""
    over = threading.Event()

    def drive(journal: Journal) -> None:
        while not over.wait(0.01):
            if obeys and run.stop_file.exists():
                break
        journal.put(finished(50, candidate(), measured(0.1)))
        journal.close()

    thread = threading.Thread(target=drive, args=[Journal.open(run.journal)])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def printed(folder: Path) -> str:
    stream = io.StringIO()
    render(statuses(folder), Console(file=stream, width=120))
    return stream.getvalue()


def test_every_run_of_every_sweep_is_listed(tmp_path: Path) -> None:
    run_of(tmp_path / "b")
    run_of(tmp_path / "a", verdict=False)
    run_of(tmp_path / "a")
    (tmp_path / "mlartifacts").mkdir()
    (tmp_path / "mlflow.db").touch()
    found = statuses(tmp_path).runs
    assert [(each.sweep, each.run, each.state) for each in found] == [
        ("a", "001", "resumable"),
        ("a", "002", "done"),
        ("b", "001", "done"),
    ]
    assert found[0].folder == str(tmp_path / "a" / "001")


def test_the_table_shows_states_and_names_as_they_are(tmp_path: Path) -> None:
    run_of(tmp_path / "[red]odd")
    text = printed(tmp_path)
    assert "[red]odd" in text
    assert "faster" in text
    running = run_of(tmp_path / "laptop", verdict=False)
    with driving(running):
        assert "running" in printed(tmp_path)
        assert "--resume" not in printed(tmp_path)


@pytest.mark.parametrize(("events", "words"), [(5, " (1 cut short, to run again)"), (4, "")])
def test_what_a_resume_does_is_said_in_words(tmp_path: Path, events: int, words: str) -> None:
    run = next_run(tmp_path / "laptop")
    with Journal.create(run.journal) as journal:
        for event in sweep()[:events]:
            journal.put(event)
    found = statuses(tmp_path).runs[0]
    assert to_resume(found) == "go on with --resume" + words
    assert to_resume(found) in printed(tmp_path)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    assert printed(tmp_path) == "no runs yet\n"
    with pytest.raises(InputError, match="no such folder") as caught:
        statuses(tmp_path / "none")
    assert caught.value.exit_code == 2
    assert "tracking.folder" in caught.value.next_step


def test_stop_waits_until_the_driver_let_go_and_keeps_its_last_record(tmp_path: Path) -> None:
    run = run_of(tmp_path / "laptop", verdict=False)
    with driving(run):
        found = stop(tmp_path / "laptop", 60)
    assert (found.state, found.run) == ("resumable", "001")
    assert found.finished == 2
    assert not run.running()


def test_stop_means_the_latest_run(tmp_path: Path) -> None:
    run_of(tmp_path / "laptop")
    latest = run_of(tmp_path / "laptop", verdict=False)
    with driving(latest):
        assert stop(tmp_path / "laptop", 60).run == "002"


def test_a_driver_that_does_not_stop_is_a_missing_resource(tmp_path: Path) -> None:
    run = run_of(tmp_path / "laptop", verdict=False)
    with driving(run, obeys=False), pytest.raises(ResourceMissing, match=r"did not stop in 0\.1 s") as caught:
        stop(tmp_path / "laptop", 0.1)
    assert caught.value.exit_code == 4
    assert "--wait" in caught.value.next_step


def test_there_is_nothing_to_stop_where_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run of this sweep here"):
        stop(tmp_path / "laptop", 1)
    run = run_of(tmp_path / "laptop")
    with pytest.raises(InputError, match="this sweep is not running"):
        stop(tmp_path / "laptop", 1)
    assert not run.stop_file.exists()  # the next driver must not find it


def test_a_run_that_is_done_has_nothing_to_resume_although_a_trial_was_cut_short() -> None:
    """Of a search whose budget is used up since: a resume does not run it."""
    run = RunStatus(
        sweep="s", run="001", folder="f", state="done", finished=9, in_flight=0, cut_short=1, verdict="faster"
    )
    assert to_resume(run) == ""
    assert to_resume(run.model_copy(update={"state": "resumable"})) != ""
