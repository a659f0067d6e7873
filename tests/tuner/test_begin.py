"""How a driver begins: one a sweep, whatever became of earlier ones; and a finished run has nothing to do."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from search_spaces.errors import InputError, NothingAcceptable, ResourceMissing
from search_spaces.shapes import StackVersions
from tests.end_to_end.sweeps import write_sweep
from tests.tracking.sample import candidate, finished, head, measured, proposed
from tests.tuner.sessions import Bench, drive, result, run_with, speed
from tracking.journal import Journal
from tracking.lock import turn
from tracking.record import Compared, Event, Screened, SweepStarted
from train_worker.outcome import Crashed
from train_worker.rank_report import InterruptedGang
from tuner.begin import START_LOCK, begun, resumed
from tuner.commands import run as run_command
from tuner.commands.run import RunOptions, run
from tuner.commands.status import stop
from tuner.over import nothing_left
from tuner.run_folder import runs_of
from tuner.sweep import LoadedSweep, load_sweep
from tuner.verify import verify

ME = f"process {os.getpid()} on {socket.gethostname()}"


class Reached(Exception):
    """The run got as far as asking workers or starting Ray."""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedSweep:
    """No test here may start Ray or ask a worker: that is `Reached`."""

    def reach(*_: Any) -> Any:
        raise Reached

    monkeypatch.setattr(run_command, "_stack_of_workers", reach)
    monkeypatch.setattr(run_command, "_search_and_verify", reach)
    return load_sweep(write_sweep(tmp_path, 3))


def started(sweep: LoadedSweep, text: str | None = None, resumed: bool = False) -> SweepStarted:
    same = {"sweep_digest": sweep.digest, "space_digest": sweep.space.digest, "sweep_text": text or sweep.text}
    return head(resumed).model_copy(update=same)


def searched(sweep: LoadedSweep, trials: int = 3) -> list[Event]:
    """A search of so many trials, 1 s each."""
    events: list[Event] = [started(sweep)]
    for number in range(trials):
        each = candidate(micro_batch_size=number)
        events += [proposed(number, each), finished(number, each, measured(0.1))]
    return events


def verdict() -> Compared:
    ids = {"finalist_id": candidate().id, "default_id": candidate(micro_batch_size=0).id}
    return Compared(rounds=2, ratio=0.5, ratio_low=0.4, ratio_high=0.6, verdict="faster", **ids)


def written(sweep: LoadedSweep, events: list[Event], run_name: str = "001") -> Path:
    path = sweep.home / run_name / "journal.jsonl"
    with Journal.create(path) as journal:
        for event in events:
            journal.put(event)
    return path


def told(sweep: LoadedSweep, **options: Any) -> str:
    stream = io.StringIO()
    run(sweep, RunOptions(**options), Console(file=stream, width=300))
    return stream.getvalue()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_driver_is_refused_with_who_runs_and_how_far(sweep: LoadedSweep, resume: bool) -> None:
    path = written(sweep, searched(sweep, 2)[:-1])
    with Journal.open(path), pytest.raises(ResourceMissing, match="this sweep is running already") as caught:
        told(sweep, resume=resume)
    assert f"run 001 ({ME}; 1 trials finished, 1 in flight; {path.parent})" in caught.value.what
    assert caught.value.exit_code == 4
    for words in (f"moetune status {sweep.path}", f"moetune stop {sweep.path}", "--beside"):
        assert words in caught.value.next_step
    assert [each.name for each in sweep.home.iterdir() if each.is_dir()] == ["001"]


def test_another_one_starts_beside_it_where_that_is_asked(sweep: LoadedSweep) -> None:
    path = written(sweep, searched(sweep, 2))
    with Journal.open(path), ExitStack() as stack:
        folder, _ = begun(sweep, True, stack)
        assert folder.name == "002"
        with pytest.raises(ResourceMissing, match=r"run 001 .*; run 002 "):
            told(sweep)
        with pytest.raises(Reached):
            told(sweep, beside=True)


def test_stop_means_the_run_that_runs_although_a_later_one_is_over(sweep: LoadedSweep) -> None:
    path = written(sweep, searched(sweep, 2))
    written(sweep, searched(sweep, 2), "002")
    with Journal.open(path) as journal:
        threading.Timer(0.1, journal.close).start()
        assert stop(sweep.home, 60).run == "001"
    assert (path.parent / "stop-requested").exists()


def test_a_stop_counts_from_when_the_driver_has_its_journal(
    sweep: LoadedSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are asked for seconds before the search begins; what an earlier driver left is no stop."""
    stop_file = written(sweep, searched(sweep, 2)).parent / "stop-requested"
    stop_file.touch()
    left: list[bool] = []

    def ask(*_: Any) -> Any:
        left.append(stop_file.exists())
        stop_file.touch()
        return StackVersions(megatron_core="0.19.2", torch="2.11.0")

    def begins(*_: Any) -> Any:
        left.append(stop_file.exists())
        raise Reached

    monkeypatch.setattr(run_command, "_stack_of_workers", ask)
    monkeypatch.setattr(run_command, "_search_and_verify", begins)
    with pytest.raises(Reached):
        told(sweep, resume=True)
    assert left == [False, True]


DRIVER = """
import sys
from pathlib import Path
from tracking.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
print("driving", flush=True)
sys.stdin.read()
"""


def test_a_killed_driver_blocks_nobody(sweep: LoadedSweep) -> None:
    path = written(sweep, searched(sweep, 2))
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "driving\n"
        with pytest.raises(ResourceMissing, match=f"process {driver.pid} on "):
            told(sweep)
        driver.send_signal(signal.SIGKILL)
    for resume in (False, True):
        with pytest.raises(Reached):
            told(sweep, resume=resume)


@pytest.mark.parametrize("left", [f"{os.getpid()}\n", f"{os.getpid()} {socket.gethostname()}\n", "1 elsewhere\n", ""])
def test_what_a_dead_driver_left_is_no_lock(sweep: LoadedSweep, left: str) -> None:
    """Its number may be another process's by now, after a reboot or on another host."""
    written(sweep, searched(sweep, 2)).with_suffix(".lock").write_text(left)
    with ExitStack() as stack:
        assert begun(sweep, False, stack)[0].name == "002"
    with ExitStack() as stack:
        assert resumed(sweep, False, stack)[0].name == "002"


def test_of_two_that_start_at_once_one_starts(sweep: LoadedSweep) -> None:
    """The other looks for drivers only once the first one has its journal."""
    refused: list[str] = []

    def second() -> None:
        with ExitStack() as stack:
            try:
                begun(sweep, False, stack)
            except ResourceMissing as error:
                refused.append(error.what)

    other = threading.Thread(target=second)
    with turn(sweep.home / START_LOCK):
        other.start()
        other.join(0.3)  # time enough to go wrong in
        first = Journal.create(sweep.home / "001" / "journal.jsonl")
    other.join()
    first.close()
    assert len(refused) == 1
    assert "run 001" in refused[0]


KILLED = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from tracking.journal import Journal
from tuner.begin import begun
from tuner.sweep import load_sweep
real = Journal.create
def create(path):
    if sys.argv[2] == "after":
        real(path)
    os.kill(os.getpid(), signal.SIGKILL)
Journal.create = create
begun(load_sweep(Path(sys.argv[1])), False, ExitStack())
"""


@pytest.mark.parametrize(("when", "runs"), [("before", []), ("after", ["001"])])
def test_a_driver_killed_at_its_start_leaves_no_run_without_its_sweep_file(
    sweep: LoadedSweep, when: str, runs: list[str]
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, sweep.path, when], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert [run.name for run in runs_of(sweep.home)] == runs
    assert (sweep.home / "001" / "sweep.yaml").read_text() == sweep.text
    with ExitStack() as stack:
        assert begun(sweep, False, stack)[0].name == "002"


def test_resuming_where_nothing_was_begun_leaves_no_folder(sweep: LoadedSweep) -> None:
    with pytest.raises(InputError, match="no run of this sweep here"):
        told(sweep, resume=True)
    assert not sweep.home.exists()


def test_a_finished_run_says_so_from_its_journal_alone(sweep: LoadedSweep) -> None:
    path = written(sweep, [*searched(sweep), verdict()])
    before = path.read_bytes()
    words = told(sweep, resume=True)
    assert "run 001 is finished, verdict faster: nothing is left to run (budget: 3 trials; with a larger one" in words
    assert path.read_bytes() == before
    with pytest.raises(Reached):  # without --resume it is run anew
        told(sweep)


def test_a_run_that_measured_nothing_is_over_too(sweep: LoadedSweep) -> None:
    crashed = Crashed(phase="build", detail="x")
    events: list[Event] = [started(sweep)]
    events += [finished(number, candidate(micro_batch_size=number), crashed) for number in range(3)]
    written(sweep, events)
    with pytest.raises(NothingAcceptable, match=r"no trial gave a measurement \(crashed\)"):
        told(sweep, resume=True)


def test_a_run_without_a_verdict_goes_on(sweep: LoadedSweep) -> None:
    written(sweep, searched(sweep))
    with pytest.raises(Reached):
        told(sweep, resume=True)


def test_what_is_left_of_a_real_search(tmp_path: Path) -> None:
    """Nothing, only once the last round of the verification is in; and again something with a larger budget."""
    bench = Bench(tmp_path, 4)
    session = bench.session()
    drive(session)
    ran: list[str] = []

    def stops_at_third(job_json: str) -> str:
        return result(InterruptedGang()) if len(ran) == 2 else run_with(lambda c, _: speed(c), ran)(job_json)

    assert nothing_left(bench.journal.events, bench.sweep.spec) == ""
    assert verify(session, stops_at_third) is None
    assert nothing_left(bench.journal.events, bench.sweep.spec) == ""
    assert verify(session, run_with(lambda c, _: speed(c), ran), bench.state().in_flight) is not None
    assert nothing_left(bench.journal.events, bench.sweep.spec).startswith("budget: 4 trials")
    assert nothing_left(bench.journal.events, load_sweep(write_sweep(tmp_path, 10)).spec) == ""
    assert nothing_left(bench.journal.events, load_sweep(write_sweep(tmp_path, 2)).spec).startswith("budget: 2 trials")


def test_every_way_in_which_a_search_is_over(tmp_path: Path) -> None:
    wall = load_sweep(write_sweep(tmp_path, 9))
    over = [*searched(wall), verdict()]
    # Under the same budget it ended by what no record holds: the clock of its driver, or memory.
    assert nothing_left(over, wall.spec).startswith("its budget is used up")
    all_tried = [over[0], Screened(total=40, accepted=3, rejected=()), *over[1:]]
    larger = load_sweep(write_sweep(tmp_path, 10))
    assert nothing_left(all_tried, larger.spec) == "every legal candidate was tried"
    assert nothing_left(over, larger.spec) == ""
    # A start with the larger budget that was stopped before its first trial came to no verdict.
    assert nothing_left([*over, started(wall, larger.text, resumed=True)], larger.spec) == ""
    # A sweep file of another release: what cannot be read is no reason to stop.
    assert nothing_left([started(wall, "budget: [9"), *over[1:]], wall.spec) == ""
    assert nothing_left([*over, proposed(7, candidate(note="new"))], wall.spec) == ""
    assert nothing_left([*over, finished(7, candidate(note="new"), measured(0.01))], wall.spec) == ""
    assert nothing_left([], wall.spec) == ""
