"""The grids and how they run: how many, in which order, again from where they stopped. And the small form for real."""

import json
import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.contrasts import Contrast, pairs, said
from benchmarks.h200_table import GRIDS
from benchmarks.table_run import Grid, Planned, held, row_of, space_of, waiting
from benchmarks.two_gpus import GRIDS as TWO_GPUS
from benchmarks.two_gpus import SMALL
from tests.train_worker.recorded import measured
from train_worker.outcome import Crashed, Outcome, OutOfMemory
from train_worker.recorded_table import RecordedTable
from train_worker.table import TableRow
from tuner.objective import Guard
from tuner.replay_space import table_space

ROOT = Path(__file__).parents[2]
EVERY = {**GRIDS, **TWO_GPUS, "small": SMALL}
QWEN3 = GRIDS["qwen3-like"]


def recorded(grid: Grid, planned: Planned, outcome: Outcome, order: int = 1) -> TableRow:
    return row_of(grid, planned, order, "2026-01-02T03:04:05+00:00", outcome, 4.0)


def test_the_grids_are_as_large_as_they_should_be() -> None:
    counts = {name: len(grid.candidates) for name, grid in EVERY.items()}
    assert 150 <= counts["qwen3-like"] <= 175
    assert 40 <= counts["deepseek-like"] <= 48
    assert sum(counts[name] for name in TWO_GPUS) >= 60
    assert sum(each.repeat is not None for each in QWEN3.trials()) >= 10


@pytest.mark.parametrize("grid", EVERY.values(), ids=EVERY)
def test_every_candidate_runs_once_in_an_order_of_chance_with_the_baseline_between(grid: Grid) -> None:
    planned = list(grid.trials())
    order = [each.candidate.id for each in planned if each.repeat is None]
    assert sorted(order) == sorted(each.id for each in grid.candidates)
    assert len(set(order)) == len(order)
    assert order != [each.id for each in grid.candidates]
    repeats = [at for at, each in enumerate(planned) if each.repeat is not None]
    assert {planned[at].candidate.id for at in repeats} == {grid.baseline.id}
    assert [planned[at].repeat for at in repeats] == list(range(1, len(repeats) + 1))
    assert (repeats[0], repeats[-1]) == (0, len(planned) - 1)
    assert all(later - earlier <= grid.every + 1 for earlier, later in pairwise(repeats))
    assert list(grid.trials()) == planned


@pytest.mark.parametrize("grid", EVERY.values(), ids=EVERY)
def test_a_whole_table_of_a_grid_can_be_searched(grid: Grid) -> None:
    """The space that a replay makes of the rows has the grid's points, knobs that come and go included."""
    rows = [recorded(grid, each, measured((0.2,) * 5), order) for order, each in enumerate(grid.trials(), start=1)]
    legal = table_space(RecordedTable(rows, "rows"))
    assert sorted(each.id for each in legal) == sorted(each.id for each in grid.candidates)
    assert legal.space.default() == grid.baseline


def test_two_passes_hold_the_same_configurations_in_two_orders() -> None:
    planned = list(QWEN3.twice(20))
    first, second = planned[:20], planned[20:]
    assert {each.sweep for each in first} == {1}
    assert {each.sweep for each in second} == {2}
    assert {each.candidate.id for each in first} == {each.candidate.id for each in second}
    assert [each.candidate.id for each in first] != [each.candidate.id for each in second]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    planned = list(QWEN3.trials())[:6]
    ends = (
        *(measured((0.2,) * 3),) * 2,
        OutOfMemory(where="device", phase="warmup", detail="full"),
        Crashed(phase="build", detail="a fault"),
        Crashed(phase="fork", detail="gone", infrastructure=True),
    )
    path = tmp_path / "rows.jsonl"
    whole = "".join(recorded(QWEN3, each, end).line() for each, end in zip(planned, ends, strict=False))
    path.write_text(whole + '{"id": "half a li')
    found = held(path)
    assert path.read_text() == whole
    assert waiting(planned, found, []) == planned[4:]
    assert waiting(planned, found, ["crashed"]) == planned[3:]
    assert waiting(list(QWEN3.twice(2)), found, []) == list(QWEN3.twice(2))
    assert waiting(planned, held(tmp_path / "absent.jsonl"), []) == planned


def said_by(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.two_gpus", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("what", [["--list"], ["--summary"]])
def test_rows_that_cannot_be_read_are_an_error_with_file_and_line(tmp_path: Path, what: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(recorded(QWEN3, next(QWEN3.trials()), measured((0.2,) * 3)).line() + "\n{}\n")
    code, words = said_by(str(path), *what)
    assert code == 2
    assert f"{path}:2" in words
    assert "Traceback" not in words


def test_rows_of_another_shape_are_not_taken_for_this_one() -> None:
    for what in ("--list", "--summary"):
        code, words = said_by("benchmarks/tables/two_gpus_qwen3.jsonl", "--shape", "moonlight", what)
        assert code == 2
        assert "rows of qwen3-30b-a3b-8l" in words


def halved(grid: Grid, knob: str, value: object, loss: float = 9.0) -> RecordedTable:
    """A table in which `knob` at `value` halves the step time (and moves the first loss), and nothing else matters."""
    rows = []
    for number, each in enumerate(grid.trials()):
        there = {**each.candidate.knobs, **each.candidate.env}.get(knob) == value
        seconds = (0.2 if there else 0.4) * math.exp(0.01 * math.sin(number))
        row = json.loads(recorded(grid, each, measured((seconds,) * 5), number + 1).line())
        row["losses"][0] = loss if there else 9.0
        rows.append(TableRow.model_validate(row))
    return RecordedTable(rows, "rows")


def test_a_knob_that_halves_the_step_gains_half_and_the_others_tie() -> None:
    table = halved(QWEN3, "moe_token_dispatcher_type", "allgather")
    by_name = {each.name: said(table, QWEN3.space, each, Guard()) for each in QWEN3.contrasts}
    faster = re.match(r"allgather against alltoall: faster, \+(\S+)%", by_name["allgather against alltoall"])
    assert faster, by_name
    assert float(faster[1]) == pytest.approx(50, abs=0.5)  # what the pairs' noise does to the middle of 57 or so
    assert "losses agree" in by_name["allgather against alltoall"]
    assert ": tie, " in by_name["CUTLASS against cuBLAS"]
    assert ": tie, " in by_name["FP8 blockwise against bf16"]


def test_communication_is_said_where_it_matters() -> None:
    overlap = next(each for each in TWO_GPUS["qwen3"].contrasts if "overlap against" in each.name)
    table = halved(TWO_GPUS["qwen3"], overlap.knob, True)
    line = said(table, TWO_GPUS["qwen3"].space, overlap, Guard())
    assert "communication exposed 0.0 -> 0.0 ms, hidden 0.0 -> 0.0 ms" in line


def test_pairs_differ_in_one_knob_and_what_hangs_on_it() -> None:
    table = halved(QWEN3, "fp8", "hybrid")
    by_id = {each.id: each for each in QWEN3.candidates}
    found = pairs(table, QWEN3.space, Contrast("", "fp8", "hybrid", None))
    assert found
    for with_fp8, without, _ in found:
        mine, other = dict(by_id[with_fp8].knobs), dict(by_id[without].knobs)
        assert mine.pop("fp8_recipe") == "blockwise"
        assert (mine.pop("fp8"), other.pop("fp8")) == ("hybrid", None)
        assert mine == other
        assert not by_id[without].env


def test_pairs_are_of_one_stack() -> None:
    """On a newer stack everything takes twice as long: that is no effect of the knob."""
    contrast, older = QWEN3.contrasts[0], halved(QWEN3, "none of them", None)
    moved = []
    for row in older.rows:
        values = json.loads(row.line())
        if {**row.candidate.knobs}.get(contrast.knob) == contrast.value:
            values["fingerprint_digest"] = "another"
        moved.append(TableRow.model_validate(values | {"step_times_s": [2 * each for each in values["step_times_s"]]}))
    assert said(RecordedTable(moved, "rows"), QWEN3.space, contrast, Guard()).endswith("no pair was measured")
    newer = [
        TableRow.model_validate(json.loads(row.line()) | {"pass": 1, "repeat": None})
        for row in moved
        if row.measured and row.measured.fingerprint_digest == "another"
    ]
    both = RecordedTable([*older.rows, *newer], "rows")
    assert len(pairs(both, QWEN3.space, contrast)) == len(pairs(older, QWEN3.space, contrast)) > 5
    whole = [row for row in older.rows if row.repeat is None]
    again = [json.loads(row.line()) | {"pass": 1, "fingerprint_digest": "another"} for row in whole]
    twice = RecordedTable([*older.rows, *map(TableRow.model_validate, again)], "rows")
    assert len(pairs(twice, QWEN3.space, contrast)) > len(pairs(older, QWEN3.space, contrast))
    assert (
        said(twice, QWEN3.space, contrast, Guard()).split(";")[0]
        == said(older, QWEN3.space, contrast, Guard()).split(";")[0]
    )  # the same again on another stack is no more evidence of the knob
    assert ": tie, " in said(both, QWEN3.space, contrast, Guard())


def test_a_pair_that_trains_to_another_loss_is_said() -> None:
    table = halved(QWEN3, "moe_token_dispatcher_type", "allgather", loss=9.5)
    line = said(table, QWEN3.space, QWEN3.contrasts[0], Guard())
    assert "LOSSES DIFFER" in line
    assert "at step 0" in line


def test_a_block_of_an_unknown_knob_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such"):
        space_of({"no_such": (1,)})


def test_the_small_form_of_two_gpus_runs_on_two_cpu_ranks() -> None:
    command = ["bash", str(ROOT / "benchmarks/two_gpus.sh"), "--small"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "small: 5 configurations, 0 trials failed" in done.stdout
    for name in ("allgather against alltoall", "EP 2 against EP 1", "full recompute against none"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: ")]
        assert "losses agree within the guard" in line
    waits = re.search(r"exposed (\S+) -> \S+ ms, (\S+) -> \S+ ms of it waiting for the other rank", done.stdout)
    assert waits, done.stdout
    assert 0 < float(waits[2]) < float(waits[1])
