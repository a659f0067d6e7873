"""What 10,000 memory plans cost in a process started cold, on candidates that differ.

    PYTHONPATH=. python benchmarks/memory_plans.py [--runs 5] >> benchmarks/tables/check_and_plan.jsonl

Four models of 48 layers on 256 GPUs: layouts, micro-batches, precision, recompute, CUDA graphs and the optimizer. Only
`plan_of` is timed, the first call included. One JSON object a line; the bar is 2 s.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from search_spaces.candidate import KnobValue
from search_spaces.memory.plan import plan_of
from search_spaces.presets import load_model
from search_spaces.rules.rule import Case
from search_spaces.shapes import ClusterShape, TrainingShape

PLANS, GPUS = 10_000, 256
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b-4l")
BASE: dict[str, KnobValue] = {
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "sequence_parallel": True,
    "expert_tensor_parallel_size": 1, "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
CHOICES: dict[str, tuple[KnobValue, ...]] = {
    "tensor_model_parallel_size": (1, 2, 4), "pipeline_model_parallel_size": (1, 2, 4, 8),
    "expert_model_parallel_size": (1, 2, 4, 8), "micro_batch_size": (1, 2, 4), "fp8": (None, "hybrid"),
    "recompute_granularity": (None, "selective", "full"), "recompute_modules": ("moe_act", "moe"),
    "use_distributed_optimizer": (True, False), "cuda_graph_impl": ("none", "transformer_engine"),
}  # fmt: skip


def cases() -> list[Case]:
    """10,000 candidates, each once: points of the grid drawn with a fixed seed, each with every model."""
    cluster = ClusterShape(
        device="cuda", workers=GPUS, workers_per_trial=GPUS, workers_per_node=8, gpu_arch="H200 sm_90"
    )
    training = TrainingShape(sequence_length=4096, global_batch_size=1024)
    models = [load_model(name).model_copy(update={"num_layers": 48}) for name in MODELS]
    points = Random(1).sample(list(product(*CHOICES.values())), PLANS // len(MODELS))
    knobs = (BASE | dict(zip(CHOICES, point, strict=True)) for point in points)
    return [Case(each, model, cluster, training) for each in knobs for model in models]


def timed() -> dict[str, float]:
    """Seconds of this process, which has planned nothing yet."""
    every = cases()
    began, before = time.monotonic(), time.process_time()
    for each in every:
        plan_of(each)
    return {"wall_s": time.monotonic() - began, "cpu_s": time.process_time() - before, "plans": len(every)}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="time this process; what each run calls")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(timed()))
        return
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root, check=False
    )
    done = [
        json.loads(subprocess.run([sys.executable, __file__, "--once"], capture_output=True, check=True).stdout)
        for _ in range(options.runs)
    ]
    row = {"what": "memory plans", "gpus": GPUS, "plans": done[0]["plans"], "runs": options.runs}
    row |= {name: spread([each[name] for each in done]) for name in ("wall_s", "cpu_s")}
    row |= {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps(row | {"load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
