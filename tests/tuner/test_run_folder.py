"""Where runs live, which one is meant, and what one is doing, read from real journals and locks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from search_spaces.errors import InputError
from tests.end_to_end.sweeps import write_sweep
from tests.tracking.sample import candidate, finished, head, measured, proposed, sweep
from tracking.journal import Journal
from tracking.record import Event
from train_worker.outcome import Crashed
from tuner.commands.status import to_resume
from tuner.run_folder import RunFolder, chosen_run, next_run, runs_of, status_of


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "laptop"


def written(folder: RunFolder, events: list[Event]) -> RunFolder:
    with Journal.create(folder.journal) as journal:
        for event in events:
            journal.put(event)
    return folder


@pytest.fixture
def unfinished(home: Path) -> RunFolder:
    """One trial finished, one in flight."""
    events: list[Event] = [
        head(),
        proposed(0, candidate(), "baseline"),
        finished(0, candidate(), measured(0.2), "baseline"),
        proposed(1, candidate(micro_batch_size=2)),
    ]
    return written(next_run(home), events)


@pytest.fixture
def driver(unfinished: RunFolder) -> Iterator[Journal]:
    with Journal.open(unfinished.journal) as journal:
        yield journal


def test_runs_are_numbered_and_the_latest_is_meant(home: Path) -> None:
    assert runs_of(home) == []
    for name in ("001", "002"):
        run = next_run(home)
        assert run.name == name
        assert not run.path.exists()
        written(run, sweep())
    assert [run.name for run in runs_of(home)] == ["001", "002"]
    assert chosen_run(home, None).name == "002"
    assert chosen_run(home, "001").journal == home / "001" / "journal.jsonl"
    assert chosen_run(home, None).state().finished


def test_runs_are_ordered_by_number_not_by_name(home: Path) -> None:
    for name in ("1000", "999", "002"):
        written(RunFolder(path=home / name), [head()])
    assert [run.name for run in runs_of(home)] == ["002", "999", "1000"]
    assert next_run(home).name == "1001"


def test_what_is_no_run_is_left_alone(home: Path) -> None:
    written(next_run(home), [head()])
    for name in ("notes", "007", "²"):  # 007: a run that was killed before it had a journal; ² is a digit to Python
        (home / name).mkdir()
    (home / "mlflow.db").touch()
    assert [run.name for run in runs_of(home)] == ["001"]
    assert next_run(home).name == "008"  # never into a folder that is there


def test_a_run_that_is_not_there_lists_those_that_are(home: Path) -> None:
    with pytest.raises(InputError, match="no run of this sweep here") as none:
        chosen_run(home, None)
    assert "moetune run" in none.value.next_step
    written(next_run(home), [head()])
    written(next_run(home), [head()])
    with pytest.raises(InputError, match=r"no run '003' \(known: 001, 002\)"):
        chosen_run(home, "003")


def test_a_finished_run_is_done_with_its_verdict(home: Path) -> None:
    found = status_of(written(next_run(home), sweep("tie")))
    assert (found.sweep, found.run, found.state, found.verdict) == ("laptop", "001", "done", "tie")
    assert (found.finished, found.in_flight, found.cut_short) == (9, 0, 0)


def crashes(path: Path, trials: int, budget: int) -> list[Event]:
    """A real sweep file with that budget, and so many trials of it that came to nothing."""
    start = head().model_copy(update={"sweep_text": write_sweep(path, budget).read_text()})
    crash = Crashed(phase="build", detail="x")
    return [start, *(finished(number, candidate(micro_batch_size=number), crash) for number in range(trials))]


def test_a_run_that_measured_nothing_is_done_and_says_so(home: Path, tmp_path: Path) -> None:
    found = status_of(written(next_run(home), crashes(tmp_path, 3, budget=3)))
    assert (found.state, found.finished, found.verdict) == ("done", 3, "none")
    assert to_resume(found) == "nothing was measured: `moetune report` says why"
    going_on = status_of(written(next_run(home), crashes(tmp_path, 2, budget=3)))
    assert (going_on.state, going_on.verdict, to_resume(going_on)) == ("resumable", "", "go on with --resume")


def test_a_verdict_of_an_earlier_budget_does_not_end_a_run(home: Path, tmp_path: Path) -> None:
    """One that was resumed with a larger budget, and stopped in its search."""
    start, *_ = crashes(tmp_path, 0, budget=9)
    again = crashes(tmp_path, 0, budget=20)[0].model_copy(update={"resumed": True})
    events = [start, *sweep()[1:]]
    assert status_of(written(next_run(home), events)).state == "done"
    events += [again, finished(9, candidate(micro_batch_size=9), measured(0.1))]
    found = status_of(written(next_run(home), events))
    assert (found.state, found.verdict) == ("resumable", "faster")


def test_a_run_whose_driver_is_gone_is_resumable(unfinished: RunFolder) -> None:
    found = status_of(unfinished)
    assert (found.state, found.finished, found.verdict) == ("resumable", 1, "")
    assert (found.in_flight, found.cut_short) == (0, 1)


@pytest.mark.usefixtures("driver")
def test_a_run_with_a_driver_is_running_and_then_stopping(unfinished: RunFolder) -> None:
    assert unfinished.running()
    found = status_of(unfinished)
    assert (found.state, found.in_flight, found.cut_short) == ("running", 1, 0)
    unfinished.stop_file.touch()
    assert status_of(unfinished).state == "stopping"


def test_a_driver_that_has_just_started_is_running(home: Path) -> None:
    run = next_run(home)
    with Journal.create(run.journal):
        assert status_of(run).state == "running"
    assert status_of(run).state == "resumable"


def test_a_damaged_journal_is_shown_and_does_not_hide_the_others(home: Path, unfinished: RunFolder) -> None:
    broken = written(next_run(home), sweep())
    lines = broken.journal.read_text().splitlines(keepends=True)
    broken.journal.write_text("".join([lines[0], "{}\n", *lines[2:]]))
    assert [status_of(run).state for run in runs_of(home)] == ["resumable", "unreadable"]
    assert status_of(unfinished).finished == 1
