"""The comparison of strategies: every search begins where it should, and knows the same noise."""

from pathlib import Path

import pytest

from benchmarks.strategies import BUDGETS, main, regrets, starts
from tests.train_worker.recorded import BASELINE, CANDIDATES, measured, row, rows, write
from train_worker.outcome import OutOfMemory
from train_worker.recorded_table import RecordedTable
from train_worker.replay import Replay
from tuner.replay_strategies import STRATEGIES

TIMES: dict[str, float | None] = {each.id: 0.2 + number / 100 for number, each in enumerate(CANDIDATES)}


def table() -> RecordedTable:
    return RecordedTable(rows(TIMES), "table.jsonl")


def test_starts_are_configurations_that_ran_each_once() -> None:
    failed = CANDIDATES[3]
    found = starts(
        RecordedTable([*table().rows, row(failed, OutOfMemory(where="device", phase="warmup", detail=""))], "t"), 99
    )
    assert len({each.baseline.id for each in found}) == len(found)
    assert {each.baseline.id for each in found} == {each.id for each in CANDIDATES} - {failed.id}
    assert [each.baseline for each in starts(table(), 0)] == [BASELINE]


def test_a_search_of_one_trial_ends_where_it_began() -> None:
    replays = [Replay(each) for each in starts(table(), len(CANDIDATES))]
    truth = sorted(100 * (replay.values[replay.table.baseline.id] / replay.best_s - 1) for replay in replays)
    assert regrets(replays, "walls", 1, 1) == pytest.approx(truth)
    assert {replay.spread for replay in replays} == {Replay(table()).spread}


def test_a_line_for_each_strategy_with_a_cell_for_each_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "table.jsonl", [*table().rows, row(BASELINE, measured((0.21,) * 5), 99, repeat=2)])
    main([str(path), "--seeds", "1"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert "from the default" in head
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    assert {line.count("/") for line in lines} == {len(BUDGETS)}
