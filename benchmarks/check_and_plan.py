"""What deciding before any worker starts costs: `check` of 1,000 configurations, `plan` of spaces, one legal draw.

    PYTHONPATH=. python benchmarks/check_and_plan.py [--runs 5] >> benchmarks/tables/check_and_plan.jsonl

`check` and `plan` are whole commands, a process each, started cold; `cpu_s` is their processor time (the machine may be
shared). The configurations are the tests' fixtures, repeated. One JSON object a line.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from search_spaces.screen import screen
from tests.search_spaces.published import FIXTURES, cases, models, published_cases, recipe_cases, rows
from tuner.sweep import load_sweep

ROOT = Path(__file__).parents[1]
CASES, DRAWS = 1000, 2000
SWEEP = """\
schema_version: 1
name: {name}
model: {{preset: qwen3-30b-a3b}}
cluster: {{device: cuda, workers: {gpus}, workers_per_trial: {gpus}, workers_per_node: 8, gpu_arch: H200 sm_90}}
training: {{sequence_length: 4096, global_batch_size: 1024}}
space:
  name: {space}
  choices: {choices}
budget: {{trials: 64, trial_time_limit_s: 300}}
seed: 1
"""
# Narrowed to 103,680 points.
NARROWED = {
    "tensor_model_parallel_size": [1], "pipeline_model_parallel_size": [1], "expert_model_parallel_size": [1, 2, 8],
    "moe_token_dispatcher_type": ["alltoall", "flex"], "micro_batch_size": [1, 2],
}  # fmt: skip
PLANS = (
    ("moe-core, narrowed", "moe-core", 8, NARROWED), ("moe-core", "moe-core", 8, {}), ("moe-core", "moe-core", 64, {}),
    ("moe-full", "moe-full", 8, {}), ("moe-full", "moe-full", 64, {}),
)  # fmt: skip


def fixtures() -> list[dict[str, object]]:
    """1,000 configurations: the tests' fixtures, each under an id of its own, repeated."""
    facts = models() | json.loads((FIXTURES / "kinds_models.json").read_text())
    kinds = [case | {"model": {"name": case["model"], **facts[case["model"]]}} for case in rows("kinds.jsonl")]
    found = [
        *kinds,
        *cases("validation_cases.json"),
        *published_cases(named_launcher=True),
        *recipe_cases(as_paths=True),
    ]
    return [found[number % len(found)] | {"id": str(number)} for number in range(CASES)]


def command(runs: int, *arguments: object) -> dict[str, object]:
    """Wall and processor seconds of one command, and what it wrote last."""
    walls, cpus, written = list[float](), list[float](), ""
    for _ in range(runs):
        began, before = time.monotonic(), children_cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", "tuner.cli", *map(str, arguments), "--json"],
            capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        walls.append(time.monotonic() - began)
        cpus.append(children_cpu_s() - before)
        written = done.stdout
        if done.returncode:
            raise SystemExit(done.stderr)
    return {"runs": runs, "wall_s": spread(walls), "cpu_s": spread(cpus), "written": json.loads(written)}


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def measure_check(runs: int, folder: Path) -> dict[str, object]:
    path = folder / "cases.json"
    path.write_text(json.dumps({"cases": fixtures()}))
    row = command(runs, "check", path)
    answers = row.pop("written")
    assert isinstance(answers, list)
    return {"what": "check", "cases": len(answers), "valid": sum(each["valid"] for each in answers), **row}


def measure_plan(runs: int, folder: Path, name: str, space: str, gpus: int, choices: object) -> dict[str, object]:
    path = folder / "sweep.yaml"
    path.write_text(SWEEP.format(name="bench", gpus=gpus, space=space, choices=json.dumps(choices)))
    row = command(runs, "plan", path)
    answer = row.pop("written")
    assert isinstance(answer, dict)
    return {"what": "plan", "space": name, "gpus": gpus, "points": answer["total"], "legal": answer["accepted"], **row}


def measure_draw(runs: int, folder: Path, name: str, space: str, gpus: int, choices: object) -> dict[str, object]:
    path = folder / "sweep.yaml"
    path.write_text(SWEEP.format(name="bench", gpus=gpus, space=space, choices=json.dumps(choices)))
    sweep = load_sweep(path)
    legal = screen(sweep.space, sweep.model, sweep.spec.cluster, sweep.spec.training, sweep.spec.stack)
    source, each_us = random.Random(1), list[float]()
    for _ in range(runs):
        began = time.process_time()
        for _ in range(DRAWS):
            legal.draw(source)
        each_us.append((time.process_time() - began) / DRAWS * 1e6)
    return {"what": "draw", "space": name, "gpus": gpus, "draws": DRAWS, "runs": runs, "cpu_us": spread(each_us)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    once = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        show(measure_check(runs, folder) | once)
        for plan in PLANS:
            show(measure_plan(runs, folder, *plan) | once)
        for plan in PLANS:
            show(measure_draw(runs, folder, *plan) | once)


def show(row: dict[str, object]) -> None:
    print(json.dumps(row | {"load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
