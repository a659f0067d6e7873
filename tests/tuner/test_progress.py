"""What a sweep shows while it runs: the live table on a terminal, one line an event elsewhere."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from search_spaces.candidate import Candidate
from tests.tracking.sample import compared, finished, head, measured, proposed, screened, two_finalists
from tracking.record import RuleCount
from train_worker.outcome import Crashed, Diverged, Hung, Outcome, OutOfMemory, Rejected
from tuner.commands.init import write_sweep
from tuner.progress import Progress, describe
from tuner.sweep import LoadedSweep, load_sweep


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sweep(tmp_path: Path) -> LoadedSweep:
    """Two ranks a trial; 16 trials, 600 s of search, one worker-hour."""
    path = tmp_path / "sweep.yaml"
    write_sweep("tiny-moe", "cpu", 2, path)
    text = path.read_text().replace("  # worker_hours: 8\n", "  worker_hours: 1\n  wall_time_s: 600\n")
    path.write_text(text)
    return load_sweep(path)


def changed(sweep: LoadedSweep, **knobs: int | str) -> Candidate:
    return Candidate(knobs=sweep.space.default().knobs | knobs)


def shown(progress: Progress, width: int = 160) -> str:
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(progress.table())
    return console.export_text()


def row(progress: Progress, name: str) -> list[str]:
    """Texts of the rows called `name`."""
    lines = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in shown(progress).splitlines()]
    return [line[1] for line in lines if line[0] == name]


def watched(sweep: LoadedSweep, view_status: str = "") -> tuple[Progress, Clock]:
    clock = Clock()
    return Progress(sweep, Console(file=io.StringIO(), record=True, width=200), lambda: view_status, clock), clock


def test_every_running_trial_is_shown_until_it_ends(sweep: LoadedSweep) -> None:
    progress, clock = watched(sweep)
    first, second = changed(sweep), changed(sweep, micro_batch_size=2)
    progress.on_event(proposed(0, first, "baseline"))
    clock.now += 5
    progress.on_event(proposed(1, second))
    clock.now += 7
    assert row(progress, "running") == ["0 [baseline] 12.0 s - default", "1 [search] 7.0 s - micro_batch_size=2"]
    progress.on_event(finished(0, first, measured(0.2), "baseline"))
    assert row(progress, "running") == ["1 [search] 7.0 s - micro_batch_size=2"]
    progress.on_event(finished(1, second, Hung(phase="warmup", time_limit_s=30)))
    assert row(progress, "running") == []


def test_many_running_trials_are_counted(sweep: LoadedSweep) -> None:
    progress, _ = watched(sweep)
    for number in range(9):
        progress.on_event(proposed(number, changed(sweep, micro_batch_size=number + 2)))
    assert len(row(progress, "running")) == 6
    assert "and 3 more" in shown(progress)


def test_what_is_used_and_what_is_left(sweep: LoadedSweep) -> None:
    progress, clock = watched(sweep)
    assert row(progress, "trials") == ["0 of 16"]
    clock.now += 90
    slow = finished(1, changed(sweep, micro_batch_size=2), OutOfMemory(where="host", phase="build", detail=""))
    progress.on_event(finished(0, changed(sweep), measured(0.2), "baseline").model_copy(update={"wall_s": 60}))
    progress.on_event(slow.model_copy(update={"wall_s": 30, "attempts": 3}))
    progress.on_event(finished(2, changed(sweep), measured(0.2), "verify").model_copy(update={"wall_s": 90}))
    assert row(progress, "trials") == ["2 of 16: 1 measured, 1 out of memory, 1 repeated to verify, 2 retries"]
    assert row(progress, "time") == ["1 min 30 s, 8 min 30 s of search left"]
    assert row(progress, "worker-hours") == ["0.1, 0.9 left"]  # (60 + 30 + 90) s on two ranks
    clock.now += 10_000
    assert row(progress, "time") == ["2 h 48 min, 0.0 s of search left"]


def test_a_resumed_sweep_counts_what_was_used_before(sweep: LoadedSweep) -> None:
    progress, clock = watched(sweep)
    waiting = proposed(2, changed(sweep, micro_batch_size=4))
    records = [
        finished(0, changed(sweep), measured(0.2), "baseline").model_copy(update={"wall_s": 100}),
        finished(1, changed(sweep, micro_batch_size=2), measured(0.1)).model_copy(update={"wall_s": 20}),
    ]
    progress.replay(records, [waiting])
    clock.now += 30
    assert row(progress, "trials") == ["2 of 16: 2 measured"]
    assert row(progress, "time") == ["30.0 s after 2 min 00 s before the resume, 7 min 30 s of search left"]
    assert row(progress, "best") == ["step_time_s 0.09987: micro_batch_size=2"]
    assert len(row(progress, "running")) == 1
    assert shown(progress).count("measured") == 1  # old trials are counted, not told again


def test_the_best_is_the_first_of_the_fastest_and_a_repeat_is_none(sweep: LoadedSweep) -> None:
    progress, _ = watched(sweep)
    fast, repeated = changed(sweep, micro_batch_size=2), changed(sweep, micro_batch_size=4)
    for number, (candidate, time_s) in enumerate([(changed(sweep), 0.2), (fast, 0.1), (changed(sweep, x=1), 0.1)]):
        progress.on_event(finished(number, candidate, measured(time_s)))
    progress.on_event(finished(3, repeated, measured(0.05), "verify"))
    assert row(progress, "best")[0].endswith(": micro_batch_size=2")


def test_rejections_are_told_by_reason(sweep: LoadedSweep) -> None:
    progress, _ = watched(sweep)
    progress.on_event(screened())
    assert row(progress, "rejected") == ["8 by fp8-needs-sm89: no FP8 <here>", "2 by ep-divides: 8 experts, EP 3"]
    many = [RuleCount(rule=f"r{n}", reason="no", count=1000 - n, example=changed(sweep)) for n in range(9)]
    progress.on_event(screened().model_copy(update={"rejected": tuple(many)}))
    assert row(progress, "rejected")[0] == "1,000 by r0: no"
    assert "2,979 by 3 more rules; see `moetune plan`" in shown(progress)


def test_a_view_that_lags_is_said(sweep: LoadedSweep) -> None:
    assert row(watched(sweep)[0], "MLflow") == []
    progress, _ = watched(sweep, "12 events behind: MLflow at http://***@x: refused")
    assert row(progress, "MLflow") == ["12 events behind: MLflow at http://***@x: refused"]


def test_a_terminal_gets_a_live_table_and_no_lines(sweep: LoadedSweep) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, legacy_windows=False)
    with Progress(sweep, console) as progress:
        progress.on_event(head())
        progress.on_event(proposed(0, changed(sweep), "baseline"))
        progress.on_event(finished(0, changed(sweep), measured(0.2), "baseline"))
        progress.say("[bold]searching")
    last = stream.getvalue().rpartition("moetune tiny-moe-2xcpu")[2]
    assert last.startswith(": [bold]searching")  # the state at the end stays on the screen; never read as markup
    assert "1 of 16: 1 measured" in last
    assert "[   " not in last  # no plain line beside the table


def test_elsewhere_it_is_a_line_an_event(sweep: LoadedSweep) -> None:
    progress, clock = watched(sweep)
    with progress:
        progress.on_event(head())
        progress.on_event(screened())
        progress.on_event(proposed(0, changed(sweep), "baseline"))
        clock.now += 2.5
        progress.on_event(finished(0, changed(sweep, note="[red]x"), measured(0.2), "baseline"))
        progress.on_event(compared())
        progress.say("done")
    lines = progress.console.export_text().splitlines()
    assert [re.sub(r"^\[ *([\d.]+) s\] ", r"\1 ", line) for line in lines] == [
        "0.0 started laptop/001",
        "0.0 30 of 40 configurations can run here",
        "2.5 trial 0 [baseline] 199.7 ms a step, 9.5 MiB - note=[red]x",
        "2.5 finalist against default: faster",
        "2.5 done",
    ]


def test_of_several_finalists_it_is_said_how_many_there_were(sweep: LoadedSweep) -> None:
    progress, _ = watched(sweep)
    progress.on_event(two_finalists())
    assert "finalist (named of 2) against default: faster" in progress.console.export_text()


def test_each_outcome_in_one_line() -> None:
    trace = "Traceback\n  File x\nKeyError: 'x'"
    outcomes: dict[str, Outcome] = {
        "199.7 ms a step, 9.5 MiB": measured(0.2),
        "out of device memory in measure: CUDA out of memory.": OutOfMemory(
            where="device", phase="measure", detail="CUDA out of memory."
        ),
        "rejected by ep-divides: 8 experts": Rejected(rule="ep-divides", reason="8 experts"),
        "hung in warmup, killed after 30 s": Hung(phase="warmup", time_limit_s=30),
        "diverged at step 3: loss is nan": Diverged(step=3, reason="loss is nan"),
        "crashed in build (exit code 1): KeyError: 'x'": Crashed(phase="build", detail=trace, exit_code=1),
        "lost to infrastructure in build: node gone": Crashed(phase="build", detail="node gone", infrastructure=True),
    }
    assert [describe(outcome) for outcome in outcomes.values()] == list(outcomes)
    long = describe(Rejected(rule="r", reason="x" * 1000))
    assert len(long) == 160
    assert long.endswith("...")
