"""Rows of recorded trials: what is written is read back, and what is no row is said with its line."""

import json
from pathlib import Path

import pytest

from search_spaces.errors import InputError
from tests.train_worker.recorded import BASELINE, CANDIDATES, measured, row, rows, write
from train_worker.outcome import Crashed, Diverged, Hung, Outcome, OutOfMemory, Rejected
from train_worker.recorded_table import RecordedTable
from train_worker.table import DETAIL_CHARACTERS, TableRow, shortened

TIMES = {each.id: 0.2 + number / 100 for number, each in enumerate(CANDIDATES)}
FAILURES = (
    OutOfMemory(where="device", phase="warmup", detail="no room", peak_memory_bytes=5),
    Rejected(rule="not-active", reason="no graph was replayed"),
    Hung(phase="measure", time_limit_s=10.0, detail="stacks"),
    Diverged(step=1, reason="loss nan", losses=(1.5, None)),
    Crashed(phase="build", detail="words", exit_code=1, signal=9, infrastructure=True),
)


@pytest.mark.parametrize("outcome", [measured((0.25, 0.26, 0.24)), *FAILURES], ids=lambda each: each.kind)
def test_an_outcome_comes_back_as_it_was_recorded(outcome: Outcome, tmp_path: Path) -> None:
    made = row(BASELINE, outcome, repeat=1)
    (found,) = RecordedTable.read(write(tmp_path / "table.jsonl", [made])).rows
    assert found == made
    assert found.recorded() == outcome


def test_a_line_is_flat_and_holds_every_knob() -> None:
    line = json.loads(row(BASELINE, measured((0.25, 0.26))).line())
    assert line["step_times_s"] == [0.25, 0.26]
    assert line["warmup_times_s"] == [1.0, 1.0]
    assert line["losses"] == [9, 8, 7, 6]
    assert line["memory"]["reserved_bytes"] == 20
    assert line["gpu_times_s"] == [0.5, 0.5, 0.125, 0.13]
    assert line["gpu_busy_s"] == line["profile"]["gpu_busy_s"] == 0.2
    assert line["evidence"][0]["knob"] == "moe_grouped_gemm"
    assert line["knobs"] == BASELINE.knobs
    assert line["knobs"]["fp8"] is None
    assert "measured" not in line


def test_a_failure_keeps_the_end_of_its_words() -> None:
    found = shortened(Crashed(phase="build", detail="a" * 5000 + "the error"))
    assert isinstance(found, Crashed)
    assert found.detail.endswith("the error")
    assert len(found.detail) == DETAIL_CHARACTERS


def test_a_later_row_of_the_same_trial_replaces_the_earlier(tmp_path: Path) -> None:
    crashed, ran = row(CANDIDATES[1], FAILURES[-1], 1), row(CANDIDATES[1], measured((0.3,)), 2)
    again = [row(BASELINE, measured((0.3,)), 3, repeat=number) for number in (1, 2)]
    table = RecordedTable.read(write(tmp_path / "table.jsonl", [crashed, ran, *again]))
    assert table.by_id[CANDIDATES[1].id] == [ran]
    assert len(table.by_id[BASELINE.id]) == 2
    assert table.baseline == BASELINE


def _spoilt(made: TableRow, **changes: object) -> str:
    return json.dumps(json.loads(made.line()) | changes) + "\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"id": "0" * 12}, "is not that of its knobs and env"),
        ({"gpu_times_s": [1.0]}, "gpu_times_s must be as many"),
        ({"losses": [1.0]}, "losses and grad_norms must be as many"),
        ({"step_times_s": [], "losses": [9, 8], "grad_norms": [1, 1]}, "step_times_s"),
        ({"step_times_s": [0.0] * 5}, "not from 1e-06 to 1e+09 s"),
        ({"step_times_s": [float("nan")] * 5}, "not from 1e-06 to 1e+09 s"),
        ({"step_times_s": [5e-324] * 5}, "not from 1e-06 to 1e+09 s"),
        ({"step_times_s": [1.7e308] * 5}, "not from 1e-06 to 1e+09 s"),
        ({"wall_s": 1.7e308}, "wall_s"),
        ({"outcome": "hung"}, "needs `measured` or `failure`"),
        ({"surprise": 1}, "surprise"),
        ({"training": None}, "training"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_is_no_row_is_said_with_its_line(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    made = rows(TIMES)
    path = tmp_path / "table.jsonl"
    path.write_text(made[0].line() + _spoilt(made[1], **changes) + "{half" + "\n" + "[" * 100_000 + "\n[]\n")
    with pytest.raises(InputError) as caught:
        RecordedTable.read(path)
    assert f"{path}:2: " in str(caught.value)
    assert said in str(caught.value)
    assert f"{path}:3:2: no JSON" in str(caught.value)
    assert f"{path}:4: nested too deeply" in str(caught.value)
    assert f"{path}:5: " in str(caught.value)


def test_a_number_without_end_is_said_with_its_line(tmp_path: Path) -> None:
    made = rows(TIMES)
    path = tmp_path / "table.jsonl"
    path.write_text(made[0].line() + made[1].line()[:-2] + f', "surprise": {"9" * 5000}}}\n')
    with pytest.raises(InputError, match="2: a number of over 4,300 digits"):
        RecordedTable.read(path)


def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path) -> None:
    made = rows(TIMES)
    path = tmp_path / "table.jsonl"
    path.write_text("".join(each.line().replace("T03:04", "\u2028\x8503:04") for each in made), encoding="utf-8")
    assert len(RecordedTable.read(path).rows) == len(made)


def test_rows_of_another_model_or_job_are_refused_and_more_warmup_is_not(tmp_path: Path) -> None:
    made = rows(TIMES)
    other = made[1].shape.model_copy(update={"name": "other"})
    batch = made[2].training.model_copy(update={"global_batch_size": 4})
    longer = made[3].training.model_copy(update={"measured_steps": 9})
    made[1] = made[1].model_copy(update={"shape": other})
    made[2] = made[2].model_copy(update={"training": batch})
    made[3] = made[3].model_copy(update={"training": longer})
    path = write(tmp_path / "table.jsonl", made)
    with pytest.raises(InputError) as caught:
        RecordedTable.read(path)
    assert [(fault.line, fault.message.split(" has ")[1]) for fault in caught.value.faults] == [
        (2, "another shape than the first row"),
        (3, "another training.global_batch_size than the first row"),
    ]


def test_a_table_without_repeats_or_rows_or_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "single.jsonl", rows(TIMES, repeats=0))
    (tmp_path / "empty.jsonl").write_text("")
    for name, said in (("single", "the baseline"), ("empty", "no rows"), ("absent", "cannot read it")):
        with pytest.raises(InputError, match=said):
            RecordedTable.read(tmp_path / f"{name}.jsonl")
