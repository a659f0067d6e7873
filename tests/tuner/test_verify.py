"""The proof of a winner: which trials run, with which routing, and what the guard holds them against."""

import base64
from pathlib import Path

import pytest

from tests.end_to_end.sweeps import write_sweep
from tests.tuner.sessions import Bench, drive, measured, one_finalist, result, run_with, speed
from train_worker.job import TrialJob
from train_worker.outcome import Measured
from train_worker.rank_report import InterruptedGang, SlotResult
from tuner.sweep import load_sweep
from tuner.verify import verify


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """One finalist: several are below."""
    return Bench(tmp_path, change=one_finalist)


def test_verification_is_interleaved_and_finds_the_faster(bench: Bench) -> None:
    session = bench.session()
    drive(session)
    winner, default = session.finalists()[0], bench.sweep.space.default()
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
        assert job.profile is job.keep_trace
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
    assert not again.search_left()
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
    return one_finalist(text).replace("measured_steps: 3", "measured_steps: 3\n  routing: forced")


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
    winner = session.finalists()[0]
    assert [record.outcome.kind for record in session.repeats(winner.candidate)] == ["diverged"]
    assert len(session.repeats(session.default)) == 1, "what nothing can come of is not measured on"


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
