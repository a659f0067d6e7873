"""One outcome out of the ends of all ranks: the root cause, whichever rank had it and whoever reported first."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracking.sample import measured
from train_worker.failures import DETAIL_CHARACTERS, classify, without_home
from train_worker.outcome import Crashed, Diverged, Hung, Measured, Outcome, OutOfMemory, Rejected
from train_worker.rank_report import SIGKILL, RankReport, combine, explain

LIMIT_S = 30.0
OOM = OutOfMemory(where="device", phase="measure", detail="CUDA out of memory")
DIVERGED = Diverged(step=3, reason="loss is nan")
REJECTED = Rejected(rule="stack-refuses", reason="no")
CRASHED = Crashed(phase="measure", detail="KeyError: 'x'")
PEER_GONE = Crashed(phase="measure", detail="Connection reset by peer")

# What can end a rank for a reason of its own, most telling first, and what that comes to.
CAUSES: list[tuple[RankReport, type[Outcome]]] = [
    (RankReport(rank=0, outcome=OOM, exit_code=1), OutOfMemory),
    (RankReport(rank=0, killed="memory", signal=SIGKILL, note="the machine's memory is nearly full"), OutOfMemory),
    (RankReport(rank=0, signal=SIGKILL, host_oom_kills=1), OutOfMemory),
    (RankReport(rank=0, signal=6, log_tail="what():  std::bad_alloc"), OutOfMemory),
    (RankReport(rank=0, outcome=DIVERGED, exit_code=0), Diverged),
    (RankReport(rank=0, outcome=REJECTED, exit_code=0), Rejected),
    (RankReport(rank=0, outcome=CRASHED, exit_code=1), Crashed),
    (RankReport(rank=0, signal=11, log_tail="Segmentation fault"), Crashed),
    (RankReport(rank=0, exit_code=17), Crashed),
    (RankReport(rank=0, killed="deadline", signal=SIGKILL, stacks="File x"), Hung),
]
COLLATERAL = [
    RankReport(rank=0, outcome=PEER_GONE, collateral=True, exit_code=1),
    RankReport(rank=0, killed="peer", signal=SIGKILL, log_tail="waiting"),
    RankReport(rank=0, killed="peer"),  # never started
    RankReport(rank=0, killed="stop", signal=SIGKILL),
]
SEVERITY = [OutOfMemory, Diverged, Rejected, Crashed, Hung]

causes = st.sampled_from([report for report, _ in CAUSES])
collateral = st.sampled_from(COLLATERAL)
fine = st.builds(lambda: RankReport(rank=0, outcome=measured(0.1), exit_code=0))


def ranked(reports: list[RankReport]) -> list[RankReport]:
    return [report.model_copy(update={"rank": rank}) for rank, report in enumerate(reports)]


@st.composite
def gangs(draw: st.DrawFn) -> tuple[list[RankReport], list[RankReport]]:
    """Reports of 1 to 12 ranks in the order of ranks, and the same in another order."""
    reports = ranked(draw(st.lists(causes | collateral | fine, min_size=1, max_size=12)))
    return reports, draw(st.permutations(reports))


@given(gangs())
def test_who_reported_first_does_not_matter(gang: tuple[list[RankReport], list[RankReport]]) -> None:
    reports, shuffled = gang
    assert combine(shuffled, LIMIT_S) == combine(reports, LIMIT_S)


@given(st.lists(causes, min_size=1, max_size=4), st.lists(collateral | fine, max_size=8), st.randoms())
def test_the_most_telling_cause_wins_over_any_number_of_peers(
    own: list[RankReport], others: list[RankReport], random: Random
) -> None:
    """Whichever ranks they are: also where rank 0 is one that only lost its peer."""
    reports = [*own, *others]
    random.shuffle(reports)
    reports = ranked(reports)
    found = combine(reports, LIMIT_S)
    told = [explain(each, LIMIT_S) for each in reports if any(each.model_copy(update={"rank": 0}) == o for o in own)]
    assert found in told
    assert SEVERITY.index(type(found)) == min(SEVERITY.index(type(each)) for each in told)


@given(st.lists(fine, max_size=6), causes | collateral, st.lists(fine, max_size=6))
def test_one_rank_that_failed_fails_the_gang(
    before: list[RankReport], failed: RankReport, after: list[RankReport]
) -> None:
    assert not isinstance(combine(ranked([*before, failed, *after]), LIMIT_S), Measured)


@given(st.lists(collateral, min_size=1, max_size=6))
def test_where_all_only_lost_a_peer_it_is_a_crash(reports: list[RankReport]) -> None:
    assert isinstance(combine(ranked(reports), LIMIT_S), Crashed)


@given(st.permutations(range(4)))
def test_a_gang_that_measured_is_rank_0_s_measurement_with_the_launch_time(order: list[int]) -> None:
    reports = [RankReport(rank=rank, outcome=measured(0.1 + rank), exit_code=0, wall_s=10.0 + rank) for rank in order]
    found = combine(reports, LIMIT_S)
    assert isinstance(found, Measured)
    expected = measured(0.1)
    assert found.steps == expected.steps
    phases = found.phases
    assert phases.fixed_s + phases.warmup_s + phases.measure_s == pytest.approx(10.0)  # nothing is left out
    assert phases.model_copy(update={"launch_s": 0}) == expected.phases.model_copy(update={"launch_s": 0})


def test_a_clock_that_disagrees_gives_no_negative_launch_time() -> None:
    found = combine([RankReport(rank=0, outcome=measured(0.1), wall_s=0.5)], LIMIT_S)
    assert isinstance(found, Measured)
    assert found.phases.launch_s == 0.0


@pytest.mark.parametrize(("report", "kind"), CAUSES)
def test_each_end_of_a_rank_is_explained(report: RankReport, kind: type[Outcome]) -> None:
    assert type(explain(report, LIMIT_S)) is kind


def test_an_explanation_says_what_is_known() -> None:
    hung = explain(RankReport(rank=1, killed="deadline", signal=SIGKILL, phase="warmup", stacks="File x"), LIMIT_S)
    assert hung == Hung(phase="warmup", time_limit_s=LIMIT_S, detail="File x")
    without = explain(RankReport(rank=1, killed="deadline", log_tail="last words"), LIMIT_S)
    assert isinstance(without, Hung)
    assert without.detail == "last words"
    crash = explain(RankReport(rank=3, signal=11, phase="build", log_tail="Segmentation fault"), LIMIT_S)
    assert crash == Crashed(
        phase="build", detail="rank 3 ended with signal 11 and no report\nSegmentation fault", signal=11
    )
    exit_17 = explain(RankReport(rank=3, exit_code=17), LIMIT_S)
    assert exit_17 == Crashed(phase="fork", detail="rank 3 ended with exit code 17 and no report", exit_code=17)


def test_a_kill_of_ours_is_not_the_kernel_s() -> None:
    """SIGKILL alone says nothing; the cgroup's counter does."""
    assert isinstance(explain(RankReport(rank=0, signal=SIGKILL), LIMIT_S), Crashed)
    assert isinstance(explain(RankReport(rank=0, signal=11, host_oom_kills=1), LIMIT_S), Crashed)
    assert isinstance(explain(RankReport(rank=0, killed="deadline", signal=SIGKILL, host_oom_kills=1), LIMIT_S), Hung)


def test_a_rank_s_own_word_counts_more_than_how_it_ended() -> None:
    assert explain(RankReport(rank=0, outcome=OOM, signal=SIGKILL, killed="deadline"), LIMIT_S) == OOM


def test_a_cause_written_before_the_rank_was_killed_as_a_peer_still_counts() -> None:
    """Rank 0's error does not say that it lost a peer; rank 1 had said why, and hung on its way out."""
    reports = [
        RankReport(rank=0, outcome=Crashed(phase="measure", detail="NCCL error"), exit_code=1),
        RankReport(rank=1, outcome=OOM, killed="peer", signal=SIGKILL),
    ]
    assert combine(reports, LIMIT_S) == OOM


@pytest.mark.parametrize("home", ["/people/somebody", "/people/somebody/"])
def test_an_outcome_does_not_name_the_user(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    log = 'File "/people/somebody/.venv/megatron/core/x.py", line 3; /people/somebodyelse/x; /data/home/y'
    found = combine([RankReport(rank=0, exit_code=1, log_tail=log)], 60.0)
    assert isinstance(found, Crashed)
    assert found.detail.endswith('File "~/.venv/megatron/core/x.py", line 3; /people/somebodyelse/x; /data/home/y')
    said = Rejected(rule="stack-refuses", reason="ImportError: /people/somebody/x.so")
    refused = combine([RankReport(rank=0, outcome=said)], 60.0)
    assert refused == Rejected(rule="stack-refuses", reason="ImportError: ~/x.so")


def test_a_measurement_whose_profile_failed_does_not_name_the_user_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/people/somebody")
    error = "PermissionError: [Errno 13] Permission denied: '/people/somebody/.triton/cache'"
    found = combine([RankReport(rank=0, outcome=measured(0.1).model_copy(update={"profile_error": error}))], 60.0)
    assert isinstance(found, Measured)
    assert found.profile_error == "PermissionError: [Errno 13] Permission denied: '~/.triton/cache'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no room in '/people/somebody'", "no room in '~'"),
        ("cannot write /people/somebody.", "cannot write ~."),
        ("PATH=/people/somebody/bin:/people/somebody:/bin", "PATH=~/bin:~:/bin"),
        ("/people/somebody.else/x /people/somebody-2/x /people/somebody_3", None),
    ],
)
def test_a_home_folder_is_found_wherever_its_name_ends(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str | None
) -> None:
    monkeypatch.setenv("HOME", "/people/somebody")
    assert without_home(text) == (text if shown is None else shown)


def test_a_home_folder_that_is_a_link_is_found_under_both_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "disk7" / "somebody").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk7" / "somebody")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert without_home(f"{tmp_path}/home/x, {tmp_path}/disk7/somebody/y") == "~/x, ~/y"


@pytest.mark.parametrize("length", range(DETAIL_CHARACTERS - 45, DETAIL_CHARACTERS + 5))
def test_no_part_of_the_name_is_left_where_an_error_is_cut(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setenv("HOME", "/people/somebody")
    crashed = classify(RuntimeError("/people/somebody/x" + "." * length), "measure", 3)
    refused = classify(ValueError("." * length + "/people/somebody/x"), "build")
    assert isinstance(crashed, Crashed)
    assert isinstance(refused, Rejected)
    for words in (crashed.detail, refused.reason):
        assert not any(part in words for part in ("/peop", "/some", "body/"))


@pytest.mark.parametrize("home", ["/", ""])
def test_a_user_without_a_home_changes_no_path(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert without_home("/usr/lib/x.py") == "/usr/lib/x.py"


def test_no_report_at_all_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least one"):
        combine([], LIMIT_S)
