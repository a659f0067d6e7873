"""Runs trials on real gloo ranks: `run_gang` for tests, and the script it starts (`python gang_script.py FOLDER`).

The script imports once, then forks ranks: one gang for each world size and set of left-out shim rows, which runs its
trials in turn. Not done in pytest's own process, which has threads.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests.train_worker.silent_traps import trapped
from train_worker.job import TrialJob

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 280  # for all trials of a file; pytest's own limit is 300 s
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One trial, the rows of the CPU shim to leave out, and the feature that silently does not run (`silent_traps`)."""

    job: TrialJob
    without: tuple[str, ...] = ()
    trap: str = ""

    @property
    def gang(self) -> str:
        return "-".join([f"world{self.job.world_size}", *self.without])


def run_gang(cases: dict[str, Case], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """For each name what every rank answered: an outcome, or {"error": text} where the trial raised."""
    told = {
        name: {"job": case.job.model_dump(mode="json"), "without": case.without, "trap": case.trap}
        for name, case in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(told))
    env = os.environ | ONE_THREAD | {"PYTHONPATH": str(REPOSITORY)}
    _run_to_the_end([sys.executable, __file__, str(folder)], env, folder / "stderr")
    files = {
        name: [folder / f"{case.gang}.{rank}.json" for rank in range(case.job.world_size)]
        for name, case in cases.items()
    }
    return {name: [json.loads(path.read_text())[name] for path in paths] for name, paths in files.items()}


def _run_to_the_end(command: list[str], env: dict[str, str], errors: Path) -> None:
    """Run in a process group of its own, which is killed whole: a hung rank must not outlive the test."""
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, env=env, stderr=stderr, stdout=stderr, process_group=0)
    try:
        code = process.wait(LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert code == 0, errors.read_text()[-4000:]


def main(folder: Path) -> int:
    """Exit code: 0 where every rank wrote its answers."""
    from train_worker.megatron.preload import preload

    preload("cpu")  # raises where this process cannot be forked safely
    told = json.loads((folder / "cases.json").read_text())
    cases = {
        name: Case(TrialJob.model_validate(case["job"]), tuple(case["without"]), case["trap"])
        for name, case in told.items()
    }
    gangs: dict[str, dict[str, Case]] = {}
    for name, case in cases.items():
        gangs.setdefault(case.gang, {})[name] = case
    return max(run_ranks(gang, members, folder) for gang, members in gangs.items())


def run_ranks(gang: str, cases: dict[str, Case], folder: Path) -> int:
    children = []
    for rank in range(next(iter(cases.values())).job.world_size):
        pid = os.fork()
        if pid == 0:
            os._exit(rank_main(gang, cases, folder, rank))
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


def rank_main(gang: str, cases: dict[str, Case], folder: Path, rank: int) -> int:
    import torch

    from train_worker.cpu import megatron_on_cpu, shim_rows
    from train_worker.megatron import trial
    from train_worker.progress import Progress

    torch.set_num_threads(1)
    first = next(iter(cases.values()))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{gang}.store",
        rank=rank,
        world_size=first.job.world_size,
        timeout=timedelta(seconds=60),
    )
    vars(trial)["megatron_on_cpu"] = partial(megatron_on_cpu, frozenset(first.without))
    attributes = [(owner, name, getattr(owner, name, None)) for owner, name, _ in shim_rows()]
    answers = {}
    for name, case in cases.items():
        try:
            with trapped(case.trap):
                answers[name] = trial.run(case.job, Progress()).model_dump(mode="json")
        except Exception as error:  # noqa: BLE001  whatever a trial raises is what the test looks at
            traceback.print_exc()
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        answers[name]["shim_left"] = [name for owner, name, real in attributes if getattr(owner, name, None) != real]
    (folder / f"{gang}.{rank}.json").write_text(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
