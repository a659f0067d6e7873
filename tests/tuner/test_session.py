"""A sweep from the inside: real Optuna, a real journal, and outcomes as a slot would bring them."""

import base64
import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from search_spaces.candidate import Candidate
from search_spaces.errors import ResourceMissing
from search_spaces.screen import screen
from search_spaces.shapes import StackVersions
from tests.end_to_end.sweeps import write_sweep
from tracking.journal import Journal, JournalState, fold
from tracking.record import Event, SweepStarted, TrialRecord
from train_worker.job import TrialJob
from train_worker.outcome import (
    Crashed,
    Diverged,
    Fingerprint,
    Hung,
    Measured,
    Outcome,
    OutOfMemory,
    PhaseTimes,
    StepSample,
)
from train_worker.rank_report import InterruptedGang, NoSlot, SlotResult
from tuner.proposer import Proposer
from tuner.session import SweepSession
from tuner.sweep import LoadedSweep, load_sweep
from tuner.verify import verify

FINGERPRINT = Fingerprint(
    stack=StackVersions(megatron_core="0.19.2", torch="2.11.0"), python="3.12", device="cpu", device_name="x"
)


def measured(step_time_s: float, loss: float = 2.0) -> Measured:
    sample = StepSample(step_time_s=step_time_s, tokens_per_s=512 / step_time_s, loss=loss, grad_norm=1.0)
    return Measured(
        steps=(sample,) * 3,
        warmup=(sample,),
        peak_memory_bytes=1 << 20,
        parameter_count=1,
        effective={},
        fingerprint=FINGERPRINT,
        phases=PhaseTimes(measure_s=step_time_s * 3),
    )


def speed(candidate: Candidate) -> float:
    """Larger micro-batches are faster, the rest is noise that depends on the candidate alone."""
    return 1.0 / float(candidate.knobs["micro_batch_size"] or 1) + int(candidate.id[:4], 16) / 1e7


class Bench:
    """One sweep folder; `session()` is one driver's life."""

    def __init__(self, folder: Path, trials: int = 8, change: Callable[[str], str] = lambda text: text) -> None:
        path = write_sweep(folder, trials)
        path.write_text(change(path.read_text()))
        self.sweep: LoadedSweep = load_sweep(path)
        spec = self.sweep.spec
        self.legal = screen(self.sweep.space, self.sweep.model, spec.cluster, spec.training)
        self.path = folder / "journal.jsonl"
        self.seen: list[Event] = []

    def session(self) -> SweepSession:
        exists = self.path.exists()
        self.journal = Journal.open(self.path) if exists else Journal.create(self.path)
        state = fold(self.journal.events) if self.journal.events else None
        spec = self.sweep.spec
        proposer = Proposer(self.legal, "minimize", spec.seed, 8)
        session = SweepSession(self.sweep, self.journal, proposer, state, [self.seen.append])
        if not exists:
            session.emit(
                SweepStarted(
                    sweep_name="small",
                    run_name="001",
                    sweep_digest="d",
                    space_digest="s",
                    sweep_text="",
                    seed=spec.seed,
                    started_at="2026-11-30T00:00:00+00:00",
                )
            )
        return session

    def state(self) -> JournalState:
        return fold(self.journal.events)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def result(outcome: Outcome | InterruptedGang | NoSlot, wall_s: float = 1.0) -> str:
    return SlotResult(outcome=outcome, attempts=1, wall_s=wall_s).model_dump_json()


def honest(candidate: Candidate) -> Outcome:
    return measured(speed(candidate))


def drive(
    session: SweepSession, answer: Callable[[Candidate], Outcome | InterruptedGang | NoSlot] = honest, limit: int = 99
) -> list[str]:
    """Play Tune with one trial at a time; the candidate ids in order."""
    ids = []
    for number in range(limit):
        job = session.next_job(f"h{number}")
        if job in ("done", "wait"):
            break
        candidate = TrialJob.model_validate_json(job).candidate
        ids.append(candidate.id)
        session.finish(f"h{number}", result(answer(candidate)))
    return ids


def test_the_default_comes_first_and_the_budget_ends_it(bench: Bench) -> None:
    session = bench.session()
    ids = drive(session)
    assert len(ids) == len(set(ids)) == 8
    assert ids[0] == bench.sweep.space.default().id
    assert session.records[0].purpose == "baseline"
    assert session.next_job("more") == "done"
    assert "8 trials" in session.stop_reason
    assert [event for event in bench.seen if isinstance(event, TrialRecord)] == session.records


def test_one_slot_has_one_trial_at_a_time(bench: Bench) -> None:
    session = bench.session()
    first = session.next_job("a")
    assert first not in ("wait", "done")
    assert session.next_job("b") == "wait"
    session.finish("a", result(measured(1.0)))
    assert session.next_job("b") not in ("wait", "done")


def test_with_two_slots_the_baseline_still_ends_before_the_search(tmp_path: Path) -> None:
    bench = Bench(tmp_path, change=lambda text: text.replace("workers: 2,", "workers: 4,"))
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
    winner = session.winner()
    assert winner is not None
    assert winner.candidate.id == default
    assert not session.error


def test_a_fast_trial_with_another_loss_is_diverged_not_the_winner(bench: Bench) -> None:
    session = bench.session()
    default = bench.sweep.space.default().id
    drive(session, lambda c: measured(1.0) if c.id == default else measured(0.001, loss=2.2))
    assert {record.outcome.kind for record in session.records[1:]} == {"diverged"}
    winner = session.winner()
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


def run_with(times: Callable[[Candidate, int], float], ran: list[str]) -> Callable[[str], str]:
    def run(job_json: str) -> str:
        candidate = TrialJob.model_validate_json(job_json).candidate
        ran.append(candidate.id)
        return result(measured(times(candidate, len(ran))))

    return run


def test_verification_is_interleaved_and_finds_the_faster(bench: Bench) -> None:
    session = bench.session()
    drive(session)
    winner, default = session.winner(), bench.sweep.space.default()
    assert winner is not None
    ran: list[str] = []
    compared = verify(session, run_with(lambda c, n: speed(c) * (1 + n / 1000), ran))
    assert compared is not None
    assert ran == [default.id, winner.candidate.id, winner.candidate.id, default.id]
    assert (compared.verdict, compared.routing) == ("faster", "natural")
    assert bench.state().compared[-1] == compared


def test_the_first_repeat_of_each_side_leaves_its_trace(bench: Bench) -> None:
    session = bench.session()
    drive(session)
    asked: list[bool] = []

    def run(job_json: str) -> str:
        job = TrialJob.model_validate_json(job_json)
        asked.append(job.keep_trace)
        trace = base64.b64encode(job.trial_id.encode()).decode() if job.keep_trace else ""
        return SlotResult(outcome=measured(1.0), attempts=1, wall_s=1.0, trace=trace).model_dump_json()

    verify(session, run)
    assert asked == [True, True, False, False]
    traces = sorted((bench.path.parent / "traces").iterdir())
    finalists = [record for record in bench.state().finished if record.purpose == "verify"][:2]
    assert [path.name for path in traces] == [f"{record.trial_id}.json.gz" for record in finalists]
    assert traces[0].read_bytes() == finalists[0].trial_id.encode()
    assert "trace" not in bench.path.read_text()


def test_a_winner_inside_the_noise_is_a_tie(bench: Bench) -> None:
    session = bench.session()
    drive(session)
    compared = verify(session, run_with(lambda _, n: 1.0 + 0.1 * (n % 2), []))
    assert compared is not None
    assert compared.verdict == "tie"


def test_an_interrupted_verification_goes_on_where_it_stopped(bench: Bench) -> None:
    session = bench.session()
    drive(session)
    ran: list[str] = []

    def stops_at_third(job_json: str) -> str:
        return result(InterruptedGang()) if len(ran) == 2 else run_with(lambda c, _: speed(c), ran)(job_json)

    assert verify(session, stops_at_third) is None
    bench.journal.close()
    again = bench.session()
    assert again.next_job("h") == "done"
    unfinished = bench.state().in_flight
    assert [each.purpose for each in unfinished] == ["verify"]
    assert verify(again, run_with(lambda c, _: speed(c), ran), unfinished) is not None
    assert len(ran) == 4
    assert not bench.state().in_flight


def test_ctrl_c_in_the_verification_is_an_interruption_although_the_search_was_over(bench: Bench) -> None:
    session = bench.session()
    drive(session)
    assert "budget" in session.stop_reason
    session.interrupt()
    assert verify(session, lambda _: pytest.fail("nothing runs any more")) is None
    assert session.interrupted
    assert not bench.state().compared


def forced(text: str) -> str:
    return text.replace("measured_steps: 3", "measured_steps: 3\n  routing: forced")


def test_a_winner_found_with_forced_balance_is_verified_with_natural_routing(tmp_path: Path) -> None:
    """Another loss than the search's (2.0), which the guard must not hold against either side."""
    bench = Bench(tmp_path, change=forced)
    session = bench.session()
    drive(session)
    routings: list[str] = []

    def run(job_json: str) -> str:
        job = TrialJob.model_validate_json(job_json)
        routings.append(job.training.routing)
        return result(measured(speed(job.candidate), loss=1.5))

    compared = verify(session, run)
    assert routings == ["natural"] * 4
    assert compared is not None
    assert (compared.verdict, compared.routing) == ("faster", "natural")
    assert session.job("t", session.default).training.routing == "forced"
    assert all(isinstance(record.outcome, Measured) for record in session.records)


def test_the_guard_compares_natural_routing_with_the_default_under_natural_routing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, change=forced)
    session = bench.session()
    drive(session)

    def run(job_json: str) -> str:
        candidate = TrialJob.model_validate_json(job_json).candidate
        # The finalist has the loss of the search's baseline, and strays from the default's of this verification.
        return result(measured(speed(candidate), loss=1.5 if candidate == session.default else 2.0))

    compared = verify(session, run)
    assert compared is not None
    assert compared.verdict == "unverified"
    winner = session.winner()
    assert winner is not None
    assert all(isinstance(record.outcome, Diverged) for record in session.repeats(winner.candidate))


def test_a_larger_budget_is_verified_anew_not_against_yesterdays_default(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 4)
    session = bench.session()
    drive(session)
    verify(session, run_with(lambda c, _: speed(c) * 1.2, []))
    bench.journal.close()
    bench.sweep = load_sweep(write_sweep(tmp_path, 10))
    again = bench.session()
    drive(again)
    ran: list[str] = []
    verify(again, run_with(lambda c, _: speed(c), ran))
    assert ran.count(bench.sweep.space.default().id) == 2


def test_the_default_as_winner_needs_no_comparison(bench: Bench) -> None:
    session = bench.session()
    default = bench.sweep.space.default().id
    drive(session, lambda candidate: measured(0.1 if candidate.id == default else 1.0))
    compared = verify(session, lambda _: pytest.fail("nothing to measure"))
    assert compared is not None
    assert compared.verdict == "same"


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
