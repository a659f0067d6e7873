"""The trials of the guard's benchmark are legal, and its summary says how far each is from bf16."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loss_guard import REFERENCE, RISES, TRIED, distances, job, rows_of
from benchmarks.table_run import GUARD, STACK
from search_spaces.rules import case_of
from search_spaces.screen import verdict
from train_worker.outcome import Diverged, Measured
from train_worker.recorded_table import RecordedTable
from tuner.objective import judge, mean_difference
from tuner.sweep import load_sweep

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "benchmarks/tables"


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
        "rise 0, FP8 delayed: measured, 25.00% off at step 1, last 25.00%, on average +12.50%",
    ]


def test_what_did_not_train_is_no_end_of_the_summary() -> None:
    rows: dict[tuple[str, int], dict[str, Any]] = {(REFERENCE, 0): {"losses": [5.0], "outcome": "measured"}}
    rows["FP8 delayed", 0] = {"losses": [], "outcome": "out_of_memory"}
    assert list(distances(rows)) == ["rise 0, FP8 delayed: out_of_memory, no losses to compare"]


@pytest.mark.parametrize("example", ["h200", "two-h200"])
def test_the_examples_have_the_guard_of_the_tables(example: str) -> None:
    assert load_sweep(ROOT / f"examples/{example}.yaml").spec.guard == GUARD


@pytest.mark.parametrize("name", ["h200_qwen3_like", "h200_deepseek_like", "two_gpus_qwen3", "two_gpus_moonlight"])
def test_the_guard_lets_every_recorded_trial_pass(name: str) -> None:
    """None of them is broken: 207 in bf16, 111 in FP8 with three recipes, up to 43% off at their worst step."""
    table = RecordedTable.read(TABLES / f"{name}.jsonl")
    outcomes = [outcome for row in table.rows if isinstance(outcome := row.recorded(), Measured)]
    base = max((row.recorded() for row in table.rows if row.repeat), key=lambda each: len(getattr(each, "losses", ())))
    assert isinstance(base, Measured)
    assert len(outcomes) > 25
    assert [refused for each in outcomes if isinstance(refused := judge(each, base, GUARD), Diverged)] == []


def test_the_guard_catches_what_is_broken_at_the_learning_rate_of_the_tables() -> None:
    rows = rows_of(TABLES / "h200_loss_guard.jsonl")
    allowed, reference = GUARD.low_precision_mean_loss_relative_tolerance, rows[REFERENCE, 0]["losses"]
    assert allowed is not None
    away = {name: abs(mean_difference(rows[name, 0]["losses"], reference)) for name in TRIED if name != REFERENCE}
    broken = {name for name, share in away.items() if share > allowed}
    assert broken == {name for name in TRIED if name.startswith("broken")}
    assert max(share for name, share in away.items() if name not in broken) < allowed / 2
    assert min(away[name] for name in broken) > 1.5 * allowed
