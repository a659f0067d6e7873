import io
import math
import re
from typing import Literal

import pytest
from rich.console import Console

from search_spaces.shapes import Routing
from tests.tracking.sample import candidate, compared, finished, head, measured, screened, sweep, trials, two_finalists
from tracking.record import Compared, Event, TrialRecord, Versus
from train_worker.outcome import Crashed, Diverged, Measured, OutOfMemory, StepSample, Work
from train_worker.timing import step_timing
from tuner.leaderboard import Leaderboard, leaderboard
from tuner.objective import Objective
from tuner.report import alike, cost_lines, milliseconds, place, render, seconds

FAST = candidate(moe_token_dispatcher_type="alltoall")
DEFAULT = candidate()


def printed(board: Leaderboard, width: int = 160) -> str:
    stream = io.StringIO()
    render(board, Console(file=stream, width=width))
    return stream.getvalue()


def test_rows_are_ranked_and_compared_with_the_default() -> None:
    board = leaderboard(sweep())
    assert [row.label for row in board.rows] == ["moe_token_dispatcher_type=alltoall", "micro_batch_size=8", "default"]
    assert [row.rank for row in board.rows] == [1, 2, 3]
    first, second, last = board.rows
    assert first.speed == pytest.approx(0.2 / 0.15, rel=0.01)
    assert last.speed == 1.0
    assert last.default
    assert first.step_time_low_s <= first.step_time_s <= first.step_time_high_s
    assert second.peak_memory_bytes == 30_000_000
    assert first.trials == (1,)  # the repeats that verify are in the verdict, not in the ranking


def test_overlapping_intervals_tie_with_the_leader_and_others_do_not() -> None:
    board = leaderboard([event for event in sweep() if getattr(event, "purpose", "") != "verify"])
    assert [row.tied for row in board.rows] == [True, True, False]
    assert [place(row).strip(" *") for row in board.rows] == ["1", "=2", "3"]


def test_the_noise_floor_ties_what_the_intervals_do_not() -> None:
    events: list[Event] = [head(), *trials()]
    assert leaderboard(events).noise_floor is None
    repeats = [finished(number, FAST, measured(0.15 * factor), "verify") for number, factor in ((9, 1.2), (10, 0.8))]
    noisy = leaderboard([*events, *repeats])
    assert noisy.noise_floor is not None
    assert noisy.noise_floor > 0.3
    assert all(row.tied for row in noisy.rows)


def test_a_proven_finalist_wins() -> None:
    board = leaderboard(sweep("faster"))
    assert board.winner_id == FAST.id
    assert board.verdict.words.startswith("Faster: moe_token_dispatcher_type=alltoall takes 25.0% less time a step")
    assert [row.winner for row in board.rows] == [True, False, False]


def test_a_tie_keeps_the_default() -> None:
    board = leaderboard(sweep("tie"))
    assert board.winner_id == DEFAULT.id
    assert board.verdict.words.startswith("Tie: ")
    assert board.verdict.words.endswith("Keep the default.")
    *rest, compared = sweep("tie")
    assert isinstance(compared, Compared)
    few = leaderboard([*rest, compared.model_copy(update={"rounds": 2})])
    assert few.verdict.words.endswith(
        "Keep the default. Verified in 3 rounds or more, smaller differences can be told."
    )
    assert "0.950 to 1.040" in board.verdict.words


def test_without_a_comparison_the_leader_is_unverified() -> None:
    board = leaderboard(sweep()[:-1])
    assert board.verdict.kind == "unverified"
    assert board.winner_id == FAST.id
    assert "not verified" in board.verdict.words


def test_a_finalist_that_fails_when_run_again_does_not_win() -> None:
    late = finished(9, FAST, Diverged(step=91, reason="loss is nan"), "verify")
    board = leaderboard([*sweep()[:-1], late, compared()])
    assert board.winner_id == DEFAULT.id
    assert "loss is nan" in board.verdict.words
    again = compared().model_copy(update={"verdict": "unverified", "rounds": 0})
    always = leaderboard([*sweep()[:-1], late, again])
    assert (always.winner_id, always.verdict.words) == (DEFAULT.id, board.verdict.words), "in no round did it run"
    lost = finished(9, FAST, Crashed(phase="measure", detail="node lost", infrastructure=True), "verify")
    assert leaderboard([*sweep()[:-1], lost, compared()]).winner_id == FAST.id


def test_a_fast_trial_with_a_loss_that_is_no_number_is_a_failure() -> None:
    wrong = finished(9, candidate(micro_batch_size=16), measured(0.01, loss=math.nan))
    board = leaderboard([*sweep(), wrong])
    assert board.rows[0].candidate_id == FAST.id
    assert board.failures[-1].kind == "diverged"


def test_failures_carry_kind_and_reason() -> None:
    failures = {failure.kind: failure for failure in leaderboard(sweep()).failures}
    assert set(failures) == {"out_of_memory", "diverged", "crashed", "hung"}
    assert failures["out_of_memory"].reason == "out of device memory in measure: CUDA out <x>"
    assert failures["crashed"].reason == "crashed in build (exit code 1): boom"
    assert failures["hung"].label == "overlap_grad_reduce=True"


def test_nothing_measured_is_said() -> None:
    oom = finished(0, DEFAULT, OutOfMemory(where="host", phase="build", detail=""), "baseline")
    board = leaderboard([head(), screened(), oom])
    assert board.verdict.kind == "none"
    assert board.winner_id is None
    assert printed(board).startswith("Nothing acceptable was measured.")


def test_a_default_that_cannot_run_leaves_the_leader_unverified() -> None:
    oom = finished(0, DEFAULT, OutOfMemory(where="host", phase="build", detail=""), "baseline")
    none = Compared(
        finalist_id=FAST.id, default_id=DEFAULT.id, rounds=0, ratio=1, ratio_low=1, ratio_high=1, verdict="unverified"
    )
    board = leaderboard([head(), oom, finished(1, FAST, measured(0.1)), none])
    assert board.winner_id == FAST.id
    assert board.rows[0].speed is None
    assert board.rows[0].label == "moe_token_dispatcher_type=alltoall"


@pytest.mark.parametrize("metric", ["tokens_per_s", "peak_memory_bytes"])
def test_other_objectives_rank_their_own_way(metric: str) -> None:
    objective = Objective.model_validate({"metric": metric, "direction": "maximize" if "tok" in metric else "minimize"})
    small = finished(9, candidate(recompute="full"), measured(0.4, memory=5_000_000))
    first = leaderboard([*sweep(), small], objective).rows[0]
    assert first.label == ("recompute=full" if metric == "peak_memory_bytes" else "moe_token_dispatcher_type=alltoall")


def test_costs_count_what_is_not_training() -> None:
    costs = leaderboard(sweep()).costs
    assert costs.trials == 9
    assert costs.retries == 1
    assert costs.wall_s == 9 * 2.5
    assert costs.training_s == 5 * 1.5
    assert costs.fixed_median_s == pytest.approx(0.91)
    assert costs.elapsed_s == 8 * 60 + 2.5
    assert "0.91 s in the median (launch 0.20, import 0.01, process group 0.30, build 0.40" in cost_lines(costs)[1]


def test_the_terminal_report_begins_with_the_verdict_and_shows_text_as_it_is() -> None:
    tricky = finished(9, candidate(note="[red]x[/red]"), Crashed(phase="build", detail="[bold] KeyError: 'x'"))
    text = printed(leaderboard([*sweep(), tricky]))
    assert text.startswith("Faster: ")
    assert "note=[red]x[/red]" in text
    assert "fp8-needs-sm89" in text
    assert "Per trial outside training" in text
    assert "[bold] KeyError: 'x'" in text


def test_failures_with_one_reason_are_one_line_with_a_count() -> None:
    def oom(number: int, where: Literal["device", "host"] = "device") -> TrialRecord:
        detail = f"CUDA out of memory. Tried to allocate {number}.50 GiB."
        return finished(number, candidate(n=number), OutOfMemory(where=where, phase="warmup", detail=detail))

    board = leaderboard([*sweep(), *(oom(number) for number in range(20, 50)), oom(50, "host")])
    groups = alike(board.failures)
    assert [len(group) for group in groups] == [30, *[1] * 5]
    assert sorted(failure.number for group in groups for failure in group) == [f.number for f in board.failures]
    text = printed(board)
    assert re.search(r"30 x +out of memory +n=20 \(trial 20\) and 29 more +out of device memory in warmup: CUDA", text)
    assert re.search(r"^ *50 +out of memory +n=50 +out of host memory", text, re.MULTILINE)
    assert "more in --json" not in text


def test_reasons_beyond_the_most_shown_are_counted() -> None:
    odd = [finished(20 + n, candidate(n=n), Crashed(phase="build", detail="x" * (n + 1))) for n in range(20)]
    text = printed(leaderboard([head(), *odd, *(each.model_copy(update={"number": 60}) for each in odd[:1])]))
    assert "5 more in --json and in the HTML report" in text


def test_a_long_board_shows_the_top_the_default_and_the_winner() -> None:
    many = [finished(100 + n, candidate(n=n), measured(0.16 + n * 0.0001)) for n in range(60)]
    text = printed(leaderboard([*sweep(), *many]))
    assert "slower rows left out" in text
    assert re.search(r"^ *63 +default ", text, re.MULTILINE)


def test_a_narrow_terminal_cuts_no_number_off() -> None:
    text = printed(leaderboard(sweep()), width=80)
    for number in ("148.6-151.5", "3,418", "28.6", "1.333x"):
        assert number in text


def with_work(outcome: Measured, routing: Routing = "natural") -> Measured:
    work = Work(ranks=2, tokens_per_step=512, flops_per_token=3e12, routing=routing)
    return outcome.model_copy(update={"work": work, "timing": step_timing([s.step_time_s for s in outcome.steps])})


def test_throughput_is_of_one_rank_and_the_routing_is_said() -> None:
    default = finished(0, DEFAULT, with_work(measured(0.2), "forced"), "baseline")
    fast = finished(1, FAST, with_work(measured(0.1), "forced"))
    board = leaderboard([head(), default, fast, compared().model_copy(update={"routing": "natural"})])
    row = board.rows[0]
    seconds_a_step = row.step_time_s
    assert row.tokens_per_s_per_rank == pytest.approx(512 / 2 / seconds_a_step)
    assert row.tflops_per_rank == pytest.approx(3 * 512 / 2 / seconds_a_step)
    assert (row.routing, board.unit) == ("forced", "rank")
    text = printed(board)
    assert "TFLOP/s/rank" in text
    assert f"  {row.tflops_per_rank:,.0f} " in text
    assert "forced routing in the search" in text
    assert "4 interleaved rounds, natural routing)" in board.verdict.words
    assert "TFLOP/s" not in printed(board, width=80)
    assert "TFLOP/s" not in printed(leaderboard(sweep()))  # records from before it was kept


def test_odd_step_times_of_the_leader_and_the_default_are_said() -> None:
    def odd(outcome: Measured) -> Measured:
        return with_work(outcome.model_copy(update={"steps": (*outcome.steps[:-1], outcome.warmup[0], slow(outcome))}))

    def slow(outcome: Measured) -> StepSample:
        return outcome.steps[-1].model_copy(update={"step_time_s": 9.0})

    events = [finished(0, DEFAULT, odd(measured(0.2)), "baseline"), finished(1, FAST, with_work(measured(0.1)))]
    third = finished(2, candidate(micro_batch_size=9), odd(measured(0.15)))
    text = printed(leaderboard([head(), *events, third]), width=300)
    assert re.search(r"Step times of default: Far from the median of 9 steps: 8 \(\d+\.\d\dx\)", text)
    assert "another row has outliers, drift or two speeds" in text
    assert "Step times of moe_token" not in text


def test_the_other_finalists_stand_under_the_verdict() -> None:
    text = printed(leaderboard([*sweep()[:-1], two_finalists()]), width=200)
    assert text.splitlines()[1] == (
        "Also run again: micro_batch_size=8, 0.760 (0.750 to 0.770) of the default's step time (faster); a tie with "
        "the finalist above, 1.003 (0.980 to 1.030) of its step time."
    )
    few = Versus(rounds=1, ratio=1, ratio_low=1, ratio_high=1, verdict="unverified")
    assert "micro_batch_size=8, in too few rounds to tell." in printed(
        leaderboard([*sweep()[:-1], two_finalists(against_default=few, against_named=few)])
    )


def test_a_leaderboard_survives_json() -> None:
    board = leaderboard([*sweep()[:-1], two_finalists()])
    assert Leaderboard.model_validate_json(board.model_dump_json()) == board


def test_a_crash_without_an_exit_code_does_not_speak_of_one() -> None:
    crash = finished(9, candidate(x=1), Crashed(phase="warmup", detail="Traceback\n  ...\nAttributeError: no stream"))
    killed = finished(10, candidate(x=2), Crashed(phase="warmup", detail="", signal=9))
    reasons = [failure.reason for failure in leaderboard([*sweep(), crash, killed]).failures[-2:]]
    assert reasons == ["crashed in warmup: AttributeError: no stream", "crashed in warmup (signal 9)"]


def test_seconds_for_people() -> None:
    assert [milliseconds(value) for value in (0.1486, 4.588, 0.00123456)] == ["148.6", "4,588", "1.235"]
    assert [seconds(value) for value in (4.21, 185, 7800)] == ["4.2 s", "3 min 05 s", "2 h 10 min"]
