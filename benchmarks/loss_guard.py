"""What the guard lets pass on a shape that fills a GPU, by how the learning rate begins: bf16, FP8, and what is broken.

    python -m benchmarks.loss_guard benchmarks/tables/h200_loss_guard.jsonl      (some 75 s on one H200)
    python -m benchmarks.loss_guard benchmarks/tables/h200_loss_guard.jsonl --summary

From the root of the project. The Qwen3-like shape of `h200_table.py`, 12 steps of 32,768 tokens, with a constant
learning rate and with one that rises over 8 updates. Rows append, what is there is skipped. One JSON object a line:
name, updates of the rise, outcome, losses, commit.
"""

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.h200_table import CLUSTER, QWEN3_LIKE, TRAINING
from benchmarks.table_run import SEED
from search_spaces.candidate import Candidate, KnobValue
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from tuner.objective import mean_difference

RISES = (0, 8)
BASE: dict[str, KnobValue] = {
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "micro_batch_size": 8
}  # fmt: skip
# name -> (knobs, learning rates times the usual one); the first is the reference
TRIED: dict[str, tuple[dict[str, KnobValue], float]] = {
    "bf16": ({}, 1.0),
    "bf16, micro-batch 4": ({"micro_batch_size": 4}, 1.0),
    "FP8 blockwise": ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 1.0),
    "FP8 tensorwise": ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 1.0),
    "FP8 delayed": ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 1.0),
    "broken: learning rate x 1000": ({}, 1000.0),
    "broken: tokens sent at random": ({"moe_router_force_load_balancing": True}, 1.0),
}
REFERENCE = next(iter(TRIED))


def job(name: str, rise: int) -> TrialJob:
    knobs, times = TRIED[name]
    training = TRAINING.model_copy(
        update={
            "learning_rate": times * TRAINING.learning_rate, "learning_rate_warmup_steps": rise,
            "measured_steps": 9, "min_measured_steps": None, "target_relative_error": None,
        }
    )  # fmt: skip
    return TrialJob(
        trial_id=f"{list(TRIED).index(name)}-{rise}", candidate=Candidate(knobs=BASE | knobs), model=QWEN3_LIKE,
        cluster=CLUSTER, training=training, seed=SEED, time_limit_s=120, profile=False,
    )  # fmt: skip


def rows_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What a file holds; the later row of two of one trial."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["name"], row["rise"]): row for row in map(json.loads, lines)}


def run(path: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    done = rows_of(path)
    with tempfile.TemporaryDirectory() as folder, LocalGang(1, CLUSTER.device, Path(folder)) as gang:
        for rise, name in product(RISES, TRIED):
            if (name, rise) in done:
                continue
            outcome = gang.run(job(name, rise))
            losses = getattr(outcome, "losses", ())
            row = {"name": name, "rise": rise, "outcome": outcome.kind, "losses": losses}
            with path.open("a") as stream:
                stream.write(json.dumps(row | {"commit": commit.stdout.strip()}) + "\n")
            print(row, flush=True)


def distances(rows: dict[tuple[str, int], dict[str, Any]]) -> Iterator[str]:
    """How far each is from bf16 with the same rise: at the step where it is furthest, at the last, and on average."""
    for rise, name in product(RISES, TRIED):
        row, reference = rows.get((name, rise)), rows.get((REFERENCE, rise))
        if row is None or reference is None or name == REFERENCE:
            continue
        pairs = list(zip(row["losses"], reference["losses"], strict=False))
        if not pairs:  # one of them did not train
            yield f"rise {rise}, {name}: {row['outcome']}, no losses to compare"
            continue
        apart = [float("inf") if mine is None else abs(mine - other) / other for mine, other in pairs]
        furthest = max(range(len(apart)), key=apart.__getitem__)
        how = f"{apart[furthest]:.2%} off at step {furthest}, last {apart[-1]:.2%}"
        if math.isfinite(apart[furthest]):
            how += f", on average {mean_difference(row['losses'], reference['losses']):+.2%}"
        yield f"rise {rise}, {name}: {row['outcome']}, {how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="one JSON object a line; rows append")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.summary:
        run(options.rows)
    print("\n".join(distances(rows_of(options.rows))))


if __name__ == "__main__":
    main()
