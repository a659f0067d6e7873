"""How the search strategies compare on recorded tables, at several budgets, from the default and from other rows.

    python -m benchmarks.strategies benchmarks/tables/h200_qwen3_like.jsonl benchmarks/tables/h200_deepseek_like.jsonl
    python -m benchmarks.strategies ... --starts 40 --seeds 2

A line is regret in percent, mean / 90th percentile, at each budget. With `--starts`, every search begins at one of so
many rows, drawn with seed 0, instead of the table's default: a strategy that only suits one default shows there.
"""

import argparse
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from search_spaces.candidate import Candidate
from train_worker.recorded_table import RecordedTable
from train_worker.replay import Replay
from train_worker.table import TableRow
from tuner.replay import Game, played, spread_over
from tuner.replay_space import table_space
from tuner.replay_strategies import STRATEGIES

BUDGETS = (8, 12, 16, 24, 40)


class StartedAt(RecordedTable):
    """The same rows, searched from another one."""

    def __init__(self, rows: Sequence[TableRow], where: str, start: Candidate) -> None:
        super().__init__(list(rows), where)
        self._start = start

    @cached_property
    def baseline(self) -> Candidate:
        return self._start


def starts(table: RecordedTable, count: int) -> list[RecordedTable]:
    """The table from `count` (at most all) of the configurations that ran; the table itself where `count` is 0."""
    if not count:
        return [table]
    ran = sorted((each for each in table.candidates if any(table.measured_of(each.id))), key=lambda each: each.id)
    drawn = random.Random(0).sample(ran, min(count, len(ran)))
    return [StartedAt(table.rows, table.where, each) for each in drawn]


def regrets(replays: Sequence[Replay], strategy: str, trials: int, seeds: int) -> list[float]:
    """Percent, of every start and seed, sorted. Random numbers differ from start to start."""
    found = []
    for number, replay in enumerate(replays):
        legal = table_space(replay.table)
        for seed in range(number * seeds, (number + 1) * seeds):
            found.append(played(Game(replay, legal, trials, seed), STRATEGIES[strategy]).regret_percent)
    return sorted(found)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=40, help="searches from each start (default: 40)")
    parser.add_argument("--starts", type=int, default=0, help="rows to start from (default: the table's default)")
    options = parser.parse_args(words)
    for path in options.tables:
        replays = [Replay(table) for table in starts(RecordedTable.read(path), options.starts)]
        origin = f"{len(replays)} starts" if options.starts else "from the default"
        print(f"{path.name}, {origin}, {options.seeds} seeds; trials: {', '.join(map(str, BUDGETS))}")
        for strategy in STRATEGIES:
            cells = []
            for trials in BUDGETS:
                found = spread_over(regrets(replays, strategy, trials, options.seeds))
                cells.append(f"{found.mean:5.2f} / {found.p90:5.2f}")
            print(f"  {strategy:10}", "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
