"""Do two passes over the same configurations rank them alike? Kendall's tau-b with ties, from the rows of a table.

    python -m benchmarks.rank_stability benchmarks/tables/h200_qwen3_like.jsonl [--metric gpu_busy_s]

From the root of the project. Rows with `"pass"` 1 and 2 (`h200_table.py --again 20`) are compared by their median step
time, or by how long the GPU works in a step. Two configurations are tied in a pass where they differ by no more than
the noise floor: the 95% point of the difference between two trials of one configuration, from the table's repeats.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Literal

from train_worker.recorded_table import RecordedTable
from train_worker.table import MeasuredPart
from tuner.compare import noise_floor

Metric = Literal["step_time_s", "gpu_busy_s"]


@dataclass(frozen=True)
class Stability:
    """Pairs of configurations by how both passes order them. `tau_b` None: one pass ties every pair."""

    configurations: int
    noise_floor: float
    concordant: int
    discordant: int
    tied_in_both: int
    tied_in_one: int
    tau_b: float | None


def kendall(first: Sequence[float], second: Sequence[float], floor: float) -> Stability:
    """Of two sequences of positive numbers, one a configuration. `floor`: the share below which two are tied.

    tau-b = (concordant - discordant) / sqrt(untied in the first * untied in the second), Kendall 1945.
    """
    width = math.log1p(floor)
    pairs = [
        (_sign(first[i], first[j], width), _sign(second[i], second[j], width))
        for i, j in combinations(range(len(first)), 2)
    ]
    untied = [sum(pair[sweep] != 0 for pair in pairs) for sweep in (0, 1)]
    concordant = sum(a * b > 0 for a, b in pairs)
    discordant = sum(a * b < 0 for a, b in pairs)
    scale = math.sqrt(untied[0] * untied[1])
    return Stability(
        configurations=len(first),
        noise_floor=floor,
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


def stability(table: RecordedTable, metric: Metric = "step_time_s") -> Stability:
    """Of the two passes in a table. SystemExit where there are no two, or no repeats to know the noise from."""
    passes: dict[int, dict[str, float]] = {1: {}, 2: {}}
    repeats: dict[str, list[float]] = {}
    for row in table.rows:
        value = value_of(row.measured, metric) if row.measured else None
        if value is None:
            continue
        if row.sweep is not None:
            passes[row.sweep][row.id] = value
        else:
            repeats.setdefault(row.id, []).append(value)
    both = sorted(passes[1].keys() & passes[2].keys())
    floor = noise_floor(repeats.values())
    if len(both) < 2 or floor is None:
        raise SystemExit(f"{table.where}: {len(both)} configurations ran in both passes, noise floor {floor}")
    return kendall([passes[1][name] for name in both], [passes[2][name] for name in both], floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--metric", choices=["step_time_s", "gpu_busy_s"], default="step_time_s")
    options = parser.parse_args()
    print(json.dumps(asdict(stability(RecordedTable.read(options.table), options.metric))))


if __name__ == "__main__":
    main()
