"""What a trial costs, by isolation: a warm slot against a Ray Train job of its own, in one run on one machine.

    python benchmarks/trial_cost.py [--slot-trials 8] [--job-trials 4] >> benchmarks/tables/trial_cost.jsonl
    python benchmarks/trial_cost.py --sweep examples/h200.yaml --knobs '{"moe_grouped_gemm": true, ...}'

Wall seconds a trial, and CPU-seconds of the whole machine meanwhile (from /proc/stat: keep it quiet). The trial is the
sweep's default (`--knobs`: with these changes), on the laptop with the fewest steps, the same every time. `fixed_s` is
all but the steps, `unmeasured_s` all but the measured steps. One JSON object a line.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import ray

from train_worker.job import TrialJob
from train_worker.outcome import Measured, PhaseTimes
from train_worker.rank_report import SlotResult
from tuner.launch.cluster import joined
from tuner.launch.slots import Slots
from tuner.launch.trials import run_as_job
from tuner.sweep import load_sweep

ROOT = Path(__file__).parents[1]


def busy_cpu_s() -> float:
    """CPU-seconds that this machine has worked since boot, all processes."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def job(options: argparse.Namespace) -> TrialJob:
    sweep = load_sweep(options.sweep)
    spec, default = sweep.spec, sweep.space.default()
    fewest = {"warmup_steps": 1, "measured_steps": 1} if spec.cluster.device == "cpu" else {}
    return TrialJob(
        trial_id="cost",
        candidate=default.model_copy(update={"knobs": default.knobs | json.loads(options.knobs)}),
        model=sweep.model,
        cluster=spec.cluster,
        training=spec.training.model_copy(update=fewest),
        seed=spec.seed,
        time_limit_s=spec.budget.trial_time_limit_s,
    )


def measure(how: str, job: TrialJob, trials: int, run: Callable[[str], str]) -> dict[str, object]:
    walls, cpus, training, measuring, phases = [], [], [], [], []
    for number in range(trials):
        each = job.model_copy(update={"trial_id": f"cost-{how}-{number}"})
        began, cpu = time.monotonic(), busy_cpu_s()
        outcome = SlotResult.model_validate_json(run(each.model_dump_json())).outcome
        walls.append(time.monotonic() - began)
        cpus.append(busy_cpu_s() - cpu)
        if not isinstance(outcome, Measured):
            raise SystemExit(f"{how}: {outcome}")
        training.append(outcome.phases.warmup_s + outcome.phases.measure_s)
        measuring.append(outcome.phases.measure_s)
        phases.append(outcome.phases)
    unmeasured = [wall - steps for wall, steps in zip(walls, measuring, strict=True)]
    fixed = [wall - steps for wall, steps in zip(walls, training, strict=True)]
    return {
        "isolation": how,
        "trials": trials,
        "wall_s": spread(walls),
        "cpu_s": spread(cpus),
        "training_s": spread(training),
        "fixed_s": spread(fixed),
        "unmeasured_s": spread(unmeasured),
        "phases_s": {name: spread([getattr(each, name) for each in phases]) for name in PhaseTimes.model_fields},
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slot-trials", type=int, default=8)
    parser.add_argument("--job-trials", type=int, default=4)
    parser.add_argument("--sweep", type=Path, default=ROOT / "examples/laptop.yaml")
    parser.add_argument("--knobs", default="{}", help="JSON object: changes to the default candidate")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    trial = job(options)
    shape = trial.cluster
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, joined(None, shape):
        started_s = time.monotonic() - began
        rows = [measure("job", trial, options.job_trials, run_as_job)]
        slots = Slots(shape, Path(scratch))
        slots.start()
        ready_s = slots.wait_ready(300)
        rows.append(
            measure("slot", trial, options.slot_trials, lambda text: str(ray.get(slots.board.run.remote(text))))
        )
        slots.stop()
    once: dict[str, object] = {"sweep": options.sweep.stem, "device": shape.device, "knobs": trial.candidate.knobs}
    once |= {
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "ray_start_s": started_s,
        "slot_start_s": ready_s,
    }
    for row in rows:
        print(json.dumps(row | once), flush=True)


if __name__ == "__main__":
    main()
