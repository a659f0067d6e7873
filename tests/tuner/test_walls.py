"""The wall of the default and of the winner, as a report says it."""

import io

import pytest
from rich.console import Console

from tests.tracking.sample import candidate, compared, finished, head, measured, profiled
from tracking.record import Event
from train_worker.outcome import Crashed, Measured
from train_worker.profile import SUGGESTED
from tuner.leaderboard import Leaderboard, leaderboard
from tuner.report import render
from tuner.report_html import page
from tuner.terminal import PatientConsole
from tuner.walls import untried, wall_line

DEFAULT, FAST = candidate(), candidate(moe_token_dispatcher_type="alltoall")


def board_of(default: Measured, fast: Measured) -> Leaderboard:
    return leaderboard(events_of(default, fast))


def events_of(default: Measured, fast: Measured) -> list[Event]:
    return [head(), finished(0, DEFAULT, default, "baseline"), finished(1, FAST, fast), compared("faster")]


def test_the_default_and_the_winner_have_a_line_each() -> None:
    board = board_of(profiled(0.2, busy=0.6), profiled(0.1, busy=0.9))
    default, winner = map(wall_line, board.walls)
    assert default == (
        "Wall of the default: host. GPU idle 40%, exposed communication 0% of a 200 ms step: idle more than 25% and "
        "more than communication; 120 ms of work (gemm 75%, elementwise 25%). Try: moe_grouped_gemm=True, "
        "cuda_graph_impl=transformer_engine, cuda_graph_modules=attn+moe_router+moe_preprocess, manual_gc, "
        "micro_batch_size=larger, cpu_affinity."
    )
    assert winner.startswith("Wall of the winner (moe_token_dispatcher_type=alltoall): compute. GPU idle 10%")
    stream = io.StringIO()
    render(board, Console(file=stream, width=1000))
    assert default in stream.getvalue()
    assert winner in stream.getvalue()


def test_what_is_set_already_is_not_suggested() -> None:
    graphed = candidate(
        moe_grouped_gemm=True, manual_gc=True, cuda_graph_impl="transformer_engine", cuda_graph_modules="attn"
    )
    left = untried(SUGGESTED["host"], graphed)
    assert left == ("cuda_graph_modules=attn+moe_router+moe_preprocess", "micro_batch_size=larger", "cpu_affinity")


def test_on_a_cpu_nothing_is_suggested() -> None:
    default, _ = map(wall_line, board_of(profiled(0.2, device="cpu"), profiled(0.1, device="cpu")).walls)
    assert default.startswith("Wall of the default: compute. Exposed communication 0% of a 200 ms step")
    assert "Try" not in default


def test_gpu_busy_is_beside_the_step_time() -> None:
    board = board_of(profiled(0.2, busy=0.6), profiled(0.1, busy=0.9))
    assert [row.gpu_busy_s for row in board.rows] == [pytest.approx(0.09), pytest.approx(0.12)]
    on_cpu = board_of(profiled(0.2, device="cpu"), measured(0.1))
    assert [row.gpu_busy_s for row in on_cpu.rows] == [None, None]


def test_a_failed_profile_says_so_and_none_at_all_says_nothing() -> None:
    failed = measured(0.2).model_copy(update={"profile_error": "ProfilerFailed: no CUPTI"})
    (default,) = map(wall_line, board_of(failed, measured(0.1)).walls)
    assert default == "Wall of the default: not known, the profiled step failed: ProfilerFailed: no CUPTI."
    assert board_of(measured(0.2), measured(0.1)).walls == ()


def test_the_page_has_the_lines_too() -> None:
    events = events_of(profiled(0.2), profiled(0.1))
    assert "Wall of the default: host." in page(events)


def test_a_profile_without_any_work_is_no_fault() -> None:
    fast = profiled(0.1)
    assert fast.profile is not None
    idle = fast.model_copy(update={"profile": fast.profile.model_copy(update={"gpu_busy_s": 0.0, "why": ""})})
    assert "0 ms of work" in wall_line(board_of(idle, idle).walls[0])


def test_what_a_trial_says_is_never_obeyed_by_a_terminal() -> None:
    """An escape sequence in a trial's words (coloured logs, titles of windows) is text without its ESC."""
    crashed = Crashed(phase="build", detail="\x1b]0;title\x07\x1b[31mred\x9b31m")
    board = leaderboard([head(), finished(0, DEFAULT, profiled(0.2), "baseline"), finished(1, FAST, crashed)])
    console = PatientConsole(file=io.StringIO(), width=160, force_terminal=True, color_system="truecolor")
    render(board, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "]0;title[31mred" in shown
    assert "\x1b[31m" not in shown
    assert not {"\x07", "\x9b"} & set(shown)
    assert "\x1b[" in shown  # rich's own styles
