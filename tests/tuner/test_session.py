"""A sweep from the inside: real Optuna, a real journal, and outcomes as a slot would bring them."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from search_spaces.candidate import Candidate
from search_spaces.errors import ResourceMissing
from tests.train_worker.recorded import PROFILE
from tests.tuner.sessions import Bench, drive, honest, measured, result
from tracking.record import Event, Proposed, TrialRecord
from train_worker.job import TrialJob
from train_worker.outcome import (
    Crashed,
    Diverged,
    Hung,
    Measured,
    Outcome,
    OutOfMemory,
)
from train_worker.rank_report import InterruptedGang, NoSlot
from tuner.proposer import Proposer


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_default_comes_first_and_the_budget_ends_it(bench: Bench) -> None:
    session = bench.session()
    ids = drive(session)
    assert len(ids) == len(set(ids)) == 8
    assert ids[0] == bench.sweep.space.default().id
    assert session.records[0].purpose == "baseline"
    assert session.next_job("more") == "done"
    assert "8 trials" in session.stop_reason
    assert [event for event in bench.seen if isinstance(event, TrialRecord)] == session.records


def test_a_trial_is_told_which_step_time_no_winner_has(bench: Bench) -> None:
    session = bench.session()
    limits = []
    for handle, seconds in (("a", 2.0), ("b", 4.0), ("c", 1.0), ("d", 3.0)):
        limits.append(TrialJob.model_validate_json(session.next_job(handle)).slow_above_s)
        session.finish(handle, result(measured(seconds)))
    assert limits == [None, 4.0, 4.0, 2.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("budget: {", "budget: {slow_factor: null, "),
        lambda text: text + "objective: {metric: peak_memory_bytes, direction: minimize}\n",
    ],
)
def test_no_trial_is_given_up_where_it_was_not_asked_for(tmp_path: Path, change: Callable[[str], str]) -> None:
    session = Bench(tmp_path, change=change).session()
    for handle in ("a", "b"):
        assert TrialJob.model_validate_json(session.next_job(handle)).slow_above_s is None
        session.finish(handle, result(measured(1.0)))


def test_a_trial_that_was_given_up_is_measured_and_wins_nothing(bench: Bench) -> None:
    session = bench.session()
    session.next_job("a")
    session.finish("a", result(measured(1.0)))
    session.next_job("b")
    session.finish("b", result(measured(4.0).model_copy(update={"given_up": True, "warmup": ()})))
    assert isinstance(session.records[1].outcome, Measured)
    assert session.finalists()[0] == session.records[0]


def test_one_slot_has_one_trial_at_a_time(bench: Bench) -> None:
    session = bench.session()
    first = session.next_job("a")
    assert first not in ("wait", "done")
    assert session.next_job("b") == "wait"
    session.finish("a", result(measured(1.0)))
    assert session.next_job("b") not in ("wait", "done")


def test_with_two_slots_the_baseline_still_ends_before_the_search(tmp_path: Path) -> None:
    bench = Bench(tmp_path, change=two_slots)
    session = bench.session()
    assert bench.sweep.spec.cluster.slots == 2
    assert session.next_job("a") not in ("wait", "done")
    assert session.next_job("b") == "wait"
    session.finish("a", result(measured(1.0)))
    assert session.next_job("b") not in ("wait", "done")
    assert session.next_job("c") not in ("wait", "done")
    assert session.next_job("d") == "wait"


def test_the_same_journal_gives_the_same_order_whoever_asks(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = drive(Bench(tmp_path / "whole", 12).session())
    parts = Bench(tmp_path / "parts", 12)
    ids: list[str] = []
    for _ in range(4):
        ids += drive(parts.session(), limit=3)
        parts.journal.close()
    assert ids == whole


def in_turns(bench: Bench, events: int = 99) -> list[str]:
    """Two slots, trials ending in another order than that of their numbers; the driver dies after `events` events."""
    session, handles, running = bench.session(), count(), list[tuple[str, Candidate]]()
    while len(bench.journal.events) < events:
        handle = str(next(handles))
        job = session.next_job(handle)
        if job not in ("done", "wait"):
            running.append((handle, TrialJob.model_validate_json(job).candidate))
        elif not running:
            break
        else:
            running.sort(key=lambda each: each[1].id)
            handle, candidate = running.pop()
            no_room = OutOfMemory(where="device", phase="warmup", detail="")
            session.finish(handle, result(no_room if int(candidate.id[0], 16) % 3 == 0 else honest(candidate)))
    bench.journal.close()
    return [event.candidate.id for event in bench.journal.events if isinstance(event, Proposed)]


def two_slots(text: str) -> str:
    return text.replace("workers: 2,", "workers: 4,")


def test_two_slots_resume_as_if_never_stopped(tmp_path: Path) -> None:
    """What a trial in flight was drawn as first is in no journal: the sampler must not go by it."""

    def bench(name: str) -> Bench:
        (tmp_path / name).mkdir()
        return Bench(tmp_path / name, 16, two_slots)

    whole = in_turns(bench("whole"))
    assert len(whole) == 16
    for events in range(18, 30, 2):
        stopped = bench(str(events))
        in_turns(stopped, events)
        assert in_turns(stopped) == whole


def test_a_trial_in_flight_stands_before_a_later_one_that_ended(tmp_path: Path) -> None:
    """The sampler's draw depends on the order of its trials."""
    bench = Bench(tmp_path, change=two_slots)
    session = bench.session()
    drive(session, limit=1)
    jobs = [TrialJob.model_validate_json(session.next_job(handle)) for handle in "ab"]
    session.finish("b", result(measured(0.5)))
    bench.journal.close()
    proposer = bench.session().proposer
    assert isinstance(proposer, Proposer)
    told = [trial.params for trial in proposer._study.trials]
    assert told == [proposer._params(each) for each in (session.default, *(job.candidate for job in jobs))]


def test_a_trial_in_flight_runs_again_first_and_under_its_number(bench: Bench) -> None:
    session = bench.session()
    drive(session, limit=3)
    lost = TrialJob.model_validate_json(session.next_job("killed"))
    bench.journal.close()  # the driver dies here
    again = bench.session()
    job = TrialJob.model_validate_json(again.next_job("h"))
    assert (job.trial_id, job.candidate) == (lost.trial_id, lost.candidate)
    again.finish("h", result(measured(0.5)))
    drive(again)
    numbers = [record.number for record in bench.state().finished]
    assert numbers == list(range(8))


@pytest.mark.parametrize(
    "outcome",
    [
        OutOfMemory(where="device", phase="measure", detail="CUDA out of memory"),
        Hung(phase="warmup", time_limit_s=1),
        Diverged(step=1, reason="nan"),
        Crashed(phase="build", detail="x"),
        Crashed(phase="unknown", detail="node lost", infrastructure=True),
    ],
)
def test_no_failure_ends_the_sweep_or_wins_it(bench: Bench, outcome: Outcome) -> None:
    session = bench.session()
    default = bench.sweep.space.default().id
    assert len(drive(session, lambda candidate: honest(candidate) if candidate.id == default else outcome)) == 8
    winner = session.finalists()[0]
    assert winner is not None
    assert winner.candidate.id == default
    assert not session.error


def test_a_fast_trial_with_another_loss_is_diverged_not_the_winner(bench: Bench) -> None:
    session = bench.session()
    default = bench.sweep.space.default().id
    drive(session, lambda c: measured(1.0) if c.id == default else measured(0.001, loss=2.2))
    assert {record.outcome.kind for record in session.records[1:]} == {"diverged"}
    winner = session.finalists()[0]
    assert winner is not None
    assert winner.candidate.id == default


def test_an_interrupted_trial_is_left_in_flight(bench: Bench) -> None:
    session = bench.session()
    drive(session, limit=2)
    session.next_job("h")
    session.request_stop("interrupted")
    session.finish("h", result(InterruptedGang()))
    assert session.next_job("i") == "done"
    state = bench.state()
    assert len(state.finished) == 2
    assert len(state.in_flight) == 1


def test_no_slot_is_a_missing_resource_and_costs_no_trial(bench: Bench) -> None:
    session = bench.session()
    drive(session, limit=2)
    session.next_job("h")
    session.finish("h", result(NoSlot(detail="no slot is left: node died")))
    assert session.next_job("i") == "done"
    assert isinstance(session.error, ResourceMissing)
    assert "node died" in str(session.error)
    assert len(bench.state().in_flight) == 1


def test_a_trial_that_tune_loses_is_run_again_once_then_recorded(bench: Bench) -> None:
    session = bench.session()
    drive(session, limit=1)
    first = TrialJob.model_validate_json(session.next_job("a"))
    session.finish("a", None)
    second = TrialJob.model_validate_json(session.next_job("b"))
    assert second.trial_id == first.trial_id
    session.finish("b", None)
    outcome = session.records[-1].outcome
    assert isinstance(outcome, Crashed)
    assert outcome.infrastructure
    assert len(drive(session)) == 6


def test_worker_hours_end_a_sweep(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, 99, lambda text: text.replace("trial_time_limit_s: 60", "trial_time_limit_s: 60, worker_hours: 1")
    )
    session = bench.session()
    for number in range(99):
        job = session.next_job(f"h{number}")
        if job == "done":
            break
        session.finish(f"h{number}", result(honest(TrialJob.model_validate_json(job).candidate), wall_s=600))
    assert len(session.records) == 4  # 2 workers x 600 s a trial: the third reaches one hour, the fourth passes it
    assert "worker-hours" in session.stop_reason


def test_a_listener_that_fails_stops_nothing(bench: Bench) -> None:
    session = bench.session()

    def broken(_event: Event) -> None:
        raise OSError("no MLflow today")

    session.listeners.insert(0, broken)
    assert len(drive(session)) == 8
    assert len(bench.seen) > 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs, which a really full disk needs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_stops_the_sweep_and_a_resume_loses_and_repeats_nothing(small_disk: Path) -> None:
    bench = Bench(small_disk, 12)
    session = bench.session()
    ids = drive(session, limit=4)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    ids += drive(session)
    assert isinstance(session.error, ResourceMissing)
    assert "--resume" in str(session.error)
    assert session.next_job("h") == "done"
    bench.journal.close()
    filler.unlink()

    again = bench.session()
    kept = [record.candidate.id for record in bench.state().finished]
    assert kept == ids, "a measured trial was lost on the full disk"
    rest = drive(again)
    assert not again.error
    assert len(ids + rest) == len(set(ids + rest)) == 12
    bench.journal.close()


@pytest.mark.parametrize(("metric", "wall"), [("step_time_s", "compute"), ("peak_memory_bytes", "memory")])
def test_a_search_for_less_memory_asks_for_what_saves_it_wherever_the_step_stands(
    tmp_path: Path, metric: str, wall: str
) -> None:
    bench = Bench(tmp_path, change=lambda text: f"{text}\nobjective:\n  metric: {metric}\n")
    session = bench.session()
    profiled = honest(session.default).model_copy(update={"profile": PROFILE})
    assert PROFILE.wall == "compute"
    assert session._told(profiled)[2] == wall
    assert session._told(honest(session.default))[2] is None
