"""Measured rows of memory, one JSON object a line, as samples for a calibration.

A row holds knobs, env, model and training (facts of `ModelShape` and `TrainingShape`), world_size, gpu_arch, outcome
(its kind), parameter_count, stack and routing, and of a measured one allocated_bytes, reserved_bytes and
device_used_bytes: the peaks of the most loaded rank.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from search_spaces.errors import Fault, InputError
from search_spaces.memory.calibration import Sample
from search_spaces.memory.plan import plan_of
from search_spaces.memory.shape import FactError
from search_spaces.rules.rule import Case
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def expandable(env: Mapping[str, str]) -> bool:
    """Whether the allocator grows segments in place."""
    return "expandable_segments:True" in env.get(ALLOCATOR, "")


def load_samples(path: Path) -> tuple[Sample, ...]:
    """The measured rows of a table. Raises InputError with file and line of every row that cannot be read."""
    samples, faults = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            if row["outcome"] == "measured":
                samples.append(sample_of(row))
        except (KeyError, TypeError, ValidationError, FactError, json.JSONDecodeError) as error:
            faults.append(Fault(f"no row of memory: {type(error).__name__}: {error}", str(path), number))
    if faults:
        raise InputError(faults, "give rows as benchmarks/tables/h200_memory.jsonl has them")
    return tuple(samples)


def sample_of(row: Mapping[str, Any]) -> Sample:
    """One measured row beside its plan."""
    return Sample(
        id=str(row["id"]),
        shape=str(row["model"]["name"]),
        stage=plan_of(case_of_row(row)).worst,
        expandable=expandable(row["env"]),
        reserved_bytes=int(row["reserved_bytes"]),
        device_used_bytes=row["device_used_bytes"],
    )


def case_of_row(row: Mapping[str, Any]) -> Case:
    world = int(row["world_size"])
    cluster = ClusterShape(
        device="cuda", workers=world, workers_per_trial=world, workers_per_node=min(world, 8), gpu_arch=row["gpu_arch"]
    )
    training = TrainingShape.model_validate(row["training"])
    return Case(row["knobs"], ModelShape.model_validate(row["model"]), cluster, training, row["env"])
