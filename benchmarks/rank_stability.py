"""Do two passes over the same configurations rank them alike? Kendall's tau-b with ties, from the rows of a table.

    python -m benchmarks.rank_stability benchmarks/tables/h200_qwen3_like.jsonl [--metric gpu_busy_s]

From the root of the project. Rows with `"pass"` 1 and 2 (`h200_table.py --again 20`) are compared by their median step
time, or by how long the GPU works in a step. Two configurations are tied in a pass where they differ by no more than
their noise: the 95% point of the difference of two trials that wait for the host as long as these do, from all repeats
of the table (`train_worker.noise`). `--no-ties` counts every difference.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Literal

from train_worker.noise import fitted, idle_share, pooled
from train_worker.recorded_table import RecordedTable
from train_worker.table import MeasuredPart

TWICE = 1.96  # standard deviations: 95% of differences are smaller
Metric = Literal["step_time_s", "gpu_busy_s"]


@dataclass(frozen=True)
class Stability:
    """Pairs of configurations by how both passes order them. `tau_b` None: one pass ties every pair. `floors`: the
    share below which two are tied, the least and the largest of the pairs."""

    configurations: int
    floors: tuple[float, float]
    concordant: int
    discordant: int
    tied_in_both: int
    tied_in_one: int
    tau_b: float | None


def kendall(first: Sequence[float], second: Sequence[float], spreads: Sequence[float]) -> Stability:
    """Of two sequences of positive numbers, one a configuration. `spreads`: standard deviations of their logs; two
    numbers are tied where their logs differ by no more than twice that of the difference.

    tau-b = (concordant - discordant) / sqrt(untied in the first * untied in the second), Kendall 1945.
    """
    chosen = list(combinations(range(len(first)), 2))
    widths = [TWICE * math.hypot(spreads[i], spreads[j]) for i, j in chosen]
    pairs = [
        (_sign(first[i], first[j], width), _sign(second[i], second[j], width))
        for (i, j), width in zip(chosen, widths, strict=True)
    ]
    untied = [sum(pair[sweep] != 0 for pair in pairs) for sweep in (0, 1)]
    concordant = sum(a * b > 0 for a, b in pairs)
    discordant = sum(a * b < 0 for a, b in pairs)
    scale = math.sqrt(untied[0] * untied[1])
    return Stability(
        configurations=len(first),
        floors=(math.expm1(min(widths)), math.expm1(max(widths))),
        concordant=concordant,
        discordant=discordant,
        tied_in_both=sum(a == b == 0 for a, b in pairs),
        tied_in_one=sum((a == 0) is not (b == 0) for a, b in pairs),
        tau_b=(concordant - discordant) / scale if scale else None,
    )


def _sign(one: float, other: float, width: float) -> int:
    difference = math.log(one) - math.log(other)
    return 0 if abs(difference) <= width else (1 if difference > 0 else -1)


def value_of(part: MeasuredPart, metric: Metric) -> float | None:
    """Of one trial, in seconds; None where it was not profiled."""
    return part.gpu_busy_s if metric == "gpu_busy_s" else median(part.step_times_s)


def stability(table: RecordedTable, metric: Metric = "step_time_s", ties: bool = True) -> Stability:
    """Of the two passes in a table. SystemExit where there are no two, or no repeats to know the noise from."""
    passes: dict[int, dict[str, float]] = {1: {}, 2: {}}
    for row in table.rows:
        value = value_of(row.measured, metric) if row.measured else None
        if value is not None and row.sweep is not None:
            passes[row.sweep][row.id] = value
    both = sorted(passes[1].keys() & passes[2].keys())
    spread = spreads_of(table, metric)
    if len(both) < 2 or spread is None:
        known = "no repeats" if spread is None else "repeats"
        raise SystemExit(
            f"{table.where}: {len(both)} configurations ran in both passes, {known} to know the noise from"
        )
    return kendall(
        [passes[1][name] for name in both],
        [passes[2][name] for name in both],
        [spread(name) if ties else 0.0 for name in both],
    )


def spreads_of(table: RecordedTable, metric: Metric) -> Callable[[str], float] | None:
    """The standard deviation of a trial's log metric, by the id of its configuration; None without any repeats."""
    parts = {name: list(table.measured_of(name)) for name in table.by_id}
    if metric == "step_time_s":
        noise = fitted(list(parts.values()))
        return noise and (lambda name: noise.spread(idle_share(parts[name])))
    logs = [[math.log(part.gpu_busy_s) for part in found if part.gpu_busy_s] for found in parts.values()]
    shared = pooled(logs)  # a GPU's own work does not know how long it waited
    return shared and (lambda _: math.sqrt(shared.variance))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--metric", choices=["step_time_s", "gpu_busy_s"], default="step_time_s")
    parser.add_argument("--no-ties", action="store_true", help="every difference counts, however small")
    options = parser.parse_args()
    found = stability(RecordedTable.read(options.table), options.metric, ties=not options.no_ties)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
