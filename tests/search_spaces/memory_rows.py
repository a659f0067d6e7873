"""The measured rows of one H200, as cases."""

import json
from pathlib import Path
from typing import Any

from search_spaces.rules import Case
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape

TABLE = Path(__file__).parents[2] / "benchmarks" / "tables" / "h200_memory.jsonl"
ROWS: tuple[dict[str, Any], ...] = tuple(json.loads(line) for line in TABLE.read_text().splitlines())
MEASURED = tuple(row for row in ROWS if row["outcome"] == "measured")


def case_of_row(row: dict[str, Any]) -> Case:
    world = row["world_size"]
    return Case(
        row["knobs"],
        ModelShape.model_validate(row["model"]),
        ClusterShape(
            device="cuda", workers=world, workers_per_trial=world, workers_per_node=min(world, 8),
            gpu_arch=row["gpu_arch"],
        ),
        TrainingShape.model_validate(row["training"]),
        row["env"],
    )  # fmt: skip
