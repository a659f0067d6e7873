"""The proof of a winner among several: a trial that was lucky once is found out, and one that fails drops out."""

import json
from pathlib import Path

import pytest

from search_spaces.candidate import Candidate
from tests.tuner.sessions import Bench, drive, measured, result, run_with, speed
from tracking.journal import fold, read_events
from tracking.record import Compared
from train_worker.job import TrialJob
from train_worker.outcome import OutOfMemory
from train_worker.rank_report import InterruptedGang
from tuner.leaderboard import leaderboard
from tuner.over import nothing_left
from tuner.session import SweepSession
from tuner.verify import verify, what_follows

ROOT = Path(__file__).parents[2]
NO_ROOM = OutOfMemory(where="device", phase="measure", detail="CUDA out of memory")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def searched(bench: Bench) -> tuple[SweepSession, list[Candidate]]:
    """A search that is over, and its sides: the default, the best, the second."""
    session = bench.session()
    drive(session)
    sides = [session.default, *(record.candidate for record in session.finalists())]
    assert len(sides) == 3
    return session, sides


def test_the_rounds_turn_and_the_lucky_one_is_found_out(bench: Bench) -> None:
    session, (default, best, second) = searched(bench)
    truth = {default.id: 1.0, best.id: 0.8, second.id: 0.7}
    ran: list[str] = []
    compared = verify(session, run_with(lambda c, n: truth[c.id] * (1 + n / 1000), ran))
    assert ran == [each.id for each in (default, best, second, best, second, default)]
    assert compared is not None
    assert (compared.finalist_id, compared.verdict, compared.rounds) == (second.id, "faster", 2)
    (other,) = compared.runners_up
    assert (other.finalist_id, other.against_default.verdict, other.against_named.verdict) == (
        best.id,
        "faster",
        "slower",
    )
    assert other.against_named.ratio == pytest.approx(0.8 / 0.7, rel=0.01)
    board = leaderboard(bench.journal.events)
    assert board.winner_id == second.id
    assert [row.rank for row in board.rows if row.winner] == [2]
    (line,) = board.verdict.others
    assert line.startswith(f"Also run again: {best.label(default)}, 0.8")
    assert "; slower than the finalist above, 1.1" in line


def test_finalists_inside_the_noise_are_a_tie_and_it_is_told(bench: Bench) -> None:
    session, (default, *_) = searched(bench)
    # Their order changes from the first round to the second; both are far ahead of the default.
    compared = verify(session, run_with(lambda c, n: 2.0 if c == default else 1 + 0.01 * (n % 3), []))
    assert compared is not None
    assert compared.verdict == "faster"
    (other,) = compared.runners_up
    assert other.against_named.verdict == "tie"
    assert {compared.finalist_id, other.finalist_id} == {each.candidate.id for each in session.finalists()}
    assert "; a tie with the finalist above, 1.0" in leaderboard(bench.journal.events).verdict.others[0]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_finalist_that_fails_drops_out_and_the_other_goes_on(bench: Bench, fails: int) -> None:
    session, sides = searched(bench)
    ran: list[int] = []

    def run(job_json: str) -> str:
        side = sides.index(TrialJob.model_validate_json(job_json).candidate)
        ran.append(side)
        return result(NO_ROOM if side == fails else measured(1.0 if side == 0 else 0.8))

    compared = verify(session, run)
    assert ran == ([0, 1, 2, 2, 0] if fails == 1 else [0, 1, 2, 1, 0])
    assert compared is not None
    assert (compared.finalist_id, compared.verdict) == (sides[3 - fails].id, "faster")
    board = leaderboard(bench.journal.events)
    assert board.winner_id == sides[3 - fails].id
    assert "which failed: out of device memory" in board.verdict.others[0]


def test_where_all_finalists_fail_there_is_no_winner_and_no_more_is_measured(bench: Bench) -> None:
    session, sides = searched(bench)
    ran: list[int] = []

    def run(job_json: str) -> str:
        ran.append(sides.index(TrialJob.model_validate_json(job_json).candidate))
        return result(NO_ROOM if ran[-1] else measured(1.0))

    assert verify(session, run) is not None
    assert ran == [0, 1, 2]
    board = leaderboard(bench.journal.events)
    assert board.winner_id == session.default.id
    assert board.verdict.words.startswith(f"No winner: {sides[1].label(sides[0])} was measured once and failed")


def test_after_one_round_the_best_that_did_not_fail_is_told_without_proof(tmp_path: Path) -> None:
    bench = Bench(tmp_path, change=lambda text: text.replace("rounds: 2", "rounds: 1"))
    session, sides = searched(bench)

    def run(job_json: str) -> str:
        candidate = TrialJob.model_validate_json(job_json).candidate
        return result(NO_ROOM if candidate == sides[1] else measured(1.0))

    assert verify(session, run) is not None
    board = leaderboard(bench.journal.events)
    assert board.verdict.words.startswith(f"Best so far, not verified against the default: {sides[2].label(sides[0])}")
    assert board.winner_id == sides[2].id
    assert "which failed: out of device memory" in board.verdict.others[0]


@pytest.mark.parametrize("done", range(6))
def test_an_interrupted_verification_of_several_goes_on_in_the_same_order(bench: Bench, done: int) -> None:
    session, (default, best, second) = searched(bench)
    truth = {default.id: 1.0, best.id: 0.8, second.id: 0.7}
    ran: list[str] = []
    whole = run_with(lambda c, _: truth[c.id], ran)
    assert verify(session, lambda job: result(InterruptedGang()) if len(ran) == done else whole(job)) is None
    bench.journal.close()
    again = bench.session()
    compared = verify(again, whole, tuple(bench.state().in_flight))
    assert ran == [each.id for each in (default, best, second, best, second, default)]
    assert compared is not None
    assert compared.finalist_id == second.id
    assert not bench.state().in_flight


@pytest.mark.parametrize("done", range(3))
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_trial_cut_short_in_the_verification_is_history_where_a_larger_budget_searches_on(
    tmp_path: Path, done: int, factor: float
) -> None:
    """Under its old number it would count for no round; with other finalists it would be left to run for ever."""
    bench = Bench(tmp_path)
    session, _ = searched(bench)
    ran: list[str] = []
    whole = run_with(lambda c, _: speed(c), ran)
    assert verify(session, lambda job: result(InterruptedGang()) if len(ran) == done else whole(job)) is None
    assert len(bench.state().in_flight) == 1
    bench.journal.close()
    larger = Bench(tmp_path, trials=12)
    again = larger.session()
    drive(again, lambda candidate: measured(speed(candidate) * factor))
    assert not larger.state().in_flight
    compared = verify(again, whole, larger.state().in_flight)
    assert compared is not None
    assert [compared.rounds, *(each.against_default.rounds for each in compared.runners_up)] == [2, 2]
    assert nothing_left(larger.journal.events, larger.sweep.spec).startswith("budget: 12 trials")


def test_a_search_trial_cut_short_where_the_budget_is_used_up_since_keeps_no_run_open(tmp_path: Path) -> None:
    """It was in flight beside one that used the rest up, or the budget was made smaller: a resume never runs it."""
    bench = Bench(tmp_path)
    session = bench.session()
    drive(session, limit=5)
    assert session.next_job("cut short") not in ("wait", "done")
    bench.journal.close()
    smaller = Bench(tmp_path, trials=5)
    again = smaller.session()
    assert nothing_left(smaller.journal.events, smaller.sweep.spec) == ""
    assert drive(again) == []
    assert verify(again, run_with(lambda c, _: speed(c), []), smaller.state().in_flight) is not None
    assert [each.purpose for each in smaller.state().in_flight] == ["search"]
    assert nothing_left(smaller.journal.events, smaller.sweep.spec).startswith("budget: 5 trials")
    assert nothing_left(smaller.journal.events, bench.sweep.spec) == ""


def test_a_run_from_before_there_were_several_goes_on_with_one(bench: Bench) -> None:
    """Its head does not say how many, and its sweep file has the same digest as then (test_sweep)."""
    session, (default, best, _) = searched(bench)
    ran: list[str] = []
    whole = run_with(lambda *_: 1.0, ran)
    assert verify(session, lambda job: result(InterruptedGang()) if len(ran) == 2 else whole(job)) is None
    bench.journal.close()
    head, *rest = bench.path.read_text().splitlines(keepends=True)
    old = json.loads(head)
    assert old.pop("finalists") == 2
    in_flight = rest.pop()
    assert '"purpose":"verify"' in in_flight
    bench.path.write_text("".join([json.dumps(old) + "\n", *rest]))
    again = bench.session()
    compared = verify(again, whole)
    assert ran == [each.id for each in (default, best, best, default)]
    assert compared is not None
    assert compared.runners_up == ()


@pytest.mark.parametrize(
    ("rounds", "fast", "words"),
    [
        ("rounds: 2", True, "measuring 2 finalists against the default"),
        ("rounds: 2, finalists: 1", True, "measuring the finalist against the default"),
        ("rounds: 0", True, "verify.rounds is 0, so that the winner is not verified"),
        ("rounds: 2", False, "nothing beat the default"),
    ],
)
def test_what_follows_the_search_is_said(tmp_path: Path, rounds: str, fast: bool, words: str) -> None:
    session = Bench(tmp_path, change=lambda text: text.replace("rounds: 2", rounds)).session()
    assert what_follows(session) == "nothing was measured"
    drive(session, lambda candidate: measured(1.0 if candidate == session.default else 0.9 if fast else 1.1))
    assert what_follows(session) == words


def test_a_sweep_of_a_gpu_from_before_is_read_as_it_was() -> None:
    events = read_events(ROOT / "benchmarks" / "tables" / "h200_walls_sweep.jsonl")
    state = fold(events)
    assert state.head.finalists == 1
    assert state.compared[-1].runners_up == ()
    board = leaderboard(events)
    assert (board.verdict.kind, board.verdict.others) == ("faster", ())
    assert isinstance(events[-1], Compared)
    assert board.winner_id == events[-1].finalist_id
