"""One warm gang for all tests of this folder, and a row for every trial in the file that MOETUNE_GPU_ROWS names."""

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.trials import FAMILIES, Trial, candidate_of, job
from train_worker.environment import gpu_arch
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from train_worker.outcome import Measured, Outcome

ROWS, SHARE = "MOETUNE_GPU_ROWS", "NCCL_MULTI_RANK_GPU_ENABLE"
Run = Callable[[TrialJob], Outcome]


def gpu_names() -> list[str]:
    """As a sweep file says them, such as "H200 sm_90"."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    pairs = [line.rsplit(",", 1) for line in lines]
    return [gpu_arch(name.strip(), *map(int, capability.strip().split("."))) for name, capability in pairs]


@pytest.fixture(scope="session")
def arch() -> str:
    return gpu_names()[0]


def _gang(ranks: int, folder: Path) -> Iterator[LocalGang]:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("no Transformer Engine on this machine")
    here = len(gpu_names())
    if here < ranks and os.environ.get(SHARE) != "1":
        pytest.skip(f"fewer than {ranks} GPUs on this machine; with NCCL 2.30 or newer export {SHARE}=1 to share one")
    with LocalGang(ranks, "cuda", folder, gpus=min(here, ranks)) as gang:
        yield gang


@pytest.fixture(scope="session")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGang]:
    yield from _gang(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGang]:
    yield from _gang(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="session")
def run(gang: LocalGang) -> Run:
    """Run a trial of one rank, and note what it came to."""
    return lambda trial: noted(gang, trial)


def noted(gang: LocalGang, trial: TrialJob) -> Outcome:
    start = time.monotonic()
    outcome = gang.run(trial)
    note(trial, outcome, time.monotonic() - start)
    return outcome


def note(trial: TrialJob, outcome: Outcome, wall_s: float) -> None:
    """Append a row to the file that MOETUNE_GPU_ROWS names."""
    if not (path := os.environ.get(ROWS)):
        return
    row = {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0], "trial": trial.trial_id,
        "knobs": trial.candidate.knobs, "env": trial.candidate.env, "outcome": outcome.kind,
        "wall_s": round(wall_s, 2),
    }  # fmt: skip
    if isinstance(outcome, Measured):
        row["phases"] = outcome.phases.model_dump()
        row["step_times_s"] = [round(step.step_time_s, 5) for step in outcome.steps]
        row["losses"] = [round(loss, 4) for loss in outcome.losses]
        row["memory"] = outcome.memory.model_dump() if outcome.memory else None
        row["evidence"] = [each.model_dump() for each in outcome.evidence]
        row["profile"] = outcome.profile.model_dump() if outcome.profile else outcome.profile_error
    else:
        row["why"] = str(getattr(outcome, "reason", "") or getattr(outcome, "detail", ""))[-1500:]
        row["phase"] = getattr(outcome, "phase", None)
    with Path(path).open("a") as stream:
        stream.write(json.dumps(row) + "\n")


@pytest.fixture(scope="session")
def baseline(run: Run) -> Callable[[str], Measured]:
    """The trial whose losses a family's others must follow; run once."""
    found: dict[str, Measured] = {}

    def measured(name: str) -> Measured:
        if name not in found:
            outcome = run(job(f"baseline {name}", candidate_of(Trial({}, name)), FAMILIES[name].model))
            assert isinstance(outcome, Measured), outcome
            found[name] = outcome
        return found[name]

    return measured
