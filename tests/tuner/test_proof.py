"""The winner's evidence reaches whoever asks: the terminal, --json, the page."""

import io

from rich.console import Console

from tests.tracking.sample import candidate, finished, head, measured, sweep, trials
from tests.train_worker.recorded import CUTLASS, PROFILE
from tracking.record import Event
from train_worker.outcome import Evidence, Rejected
from tuner.leaderboard import Leaderboard, leaderboard
from tuner.proof import TITLE
from tuner.report import render
from tuner.report_html import page

FAST = candidate(moe_token_dispatcher_type="alltoall")
SENT = Evidence(
    knob="moe_token_dispatcher_type", requested="alltoall", seen="alltoall: 8 dispatches by 4 MoE layers", active=True
)
UNKNOWN = Evidence(knob="overlap_grad_reduce", requested=True, seen="no group shares <b>", active=None)


def events(*more: Event) -> list[Event]:
    """The sample sweep, whose winner was measured once more with evidence."""
    seen = measured(0.15).model_copy(update={"evidence": (SENT, UNKNOWN)})
    return [*sweep("faster"), finished(20, FAST, seen, "verify"), *more]


def printed(board: Leaderboard) -> str:
    stream = io.StringIO()
    render(board, Console(file=stream, width=160))
    return stream.getvalue()


def test_the_winners_evidence_is_shown_and_kept() -> None:
    board = leaderboard(events())
    assert board.winner_id == FAST.id
    assert board.evidence == (SENT, UNKNOWN)
    text = printed(board)
    assert TITLE in text
    assert "alltoall: 8 dispatches by 4 MoE layers" in text
    assert "cannot be told: no group shares <b>" in text
    assert Leaderboard.model_validate_json(board.model_dump_json()) == board


def test_the_page_has_it_as_text() -> None:
    text = page(events())
    assert TITLE in text
    assert "cannot be told: no group shares &lt;b&gt;" in text


def test_old_records_without_evidence_show_no_table() -> None:
    board = leaderboard(sweep("faster"))
    assert board.evidence == ()
    assert TITLE not in printed(board)


def test_evidence_of_another_candidate_is_not_the_winners() -> None:
    other = measured(0.3).model_copy(update={"evidence": (UNKNOWN,)})
    assert leaderboard(events(finished(21, candidate(), other, "verify"))).evidence == (SENT, UNKNOWN)


def test_a_repeat_that_was_not_profiled_does_not_hide_what_kernels_showed() -> None:
    """Calls cannot tell of CUTLASS: only the first repeat of a winner, the profiled one, has its kernels."""
    calls = Evidence(knob=CUTLASS, requested="1", seen="no call shows it", active=None)
    kernels = calls.model_copy(update={"seen": "no call shows it; 96 grouped CUTLASS kernels", "active": True})
    first = measured(0.15).model_copy(update={"evidence": (kernels,), "profile": PROFILE})
    again = measured(0.15).model_copy(update={"evidence": (calls,)})
    board = leaderboard([*sweep("faster"), finished(20, FAST, first, "verify"), finished(21, FAST, again, "verify")])
    assert board.evidence == (kernels,)


def test_what_did_not_run_is_a_failure_with_what_was_seen() -> None:
    refused = Rejected(rule="not-active", reason="asked for and not active: fp8: requested 'hybrid', seen: no modules")
    board = leaderboard([head(), *trials(), finished(9, FAST, refused)])
    assert "seen: no modules" in board.failures[-1].reason
