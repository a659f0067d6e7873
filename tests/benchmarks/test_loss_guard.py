"""The trials of the guard's benchmark are legal, and its summary says how far each is from bf16."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loss_guard import REFERENCE, RISES, TRIED, distances, job, rows_of
from benchmarks.table_run import STACK
from search_spaces.rules import case_of
from search_spaces.screen import verdict


@pytest.mark.parametrize(("name", "rise"), list(product(TRIED, RISES)))
def test_a_trial_is_legal(name: str, rise: int) -> None:
    one = job(name, rise)
    assert verdict(case_of(one.candidate, one.model, one.cluster, one.training, STACK)) is None
    assert one.training.learning_rate_warmup_steps == rise


def test_each_is_compared_with_bf16_of_the_same_rise(tmp_path: Path) -> None:
    names = [("bf16", 0, [4.0, 2.0]), ("FP8 delayed", 0, [4.0, 2.5]), ("FP8 delayed", 8, [9.0, 9.0])]
    broken = {"name": "FP8 blockwise", "rise": 0, "outcome": "diverged", "losses": [4.0, None]}
    rows = [{"name": name, "rise": rise, "outcome": "measured", "losses": losses} for name, rise, losses in names]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, broken)))
    assert list(distances(rows_of(path))) == [
        "rise 0, FP8 blockwise: diverged, inf% off at step 1, last inf%",
        "rise 0, FP8 delayed: measured, 25.00% off at step 1, last 25.00%",
    ]


def test_what_did_not_train_is_no_end_of_the_summary() -> None:
    rows: dict[tuple[str, int], dict[str, Any]] = {(REFERENCE, 0): {"losses": [5.0], "outcome": "measured"}}
    rows["FP8 delayed", 0] = {"losses": [], "outcome": "out_of_memory"}
    assert list(distances(rows)) == ["rise 0, FP8 delayed: out_of_memory, no losses to compare"]
