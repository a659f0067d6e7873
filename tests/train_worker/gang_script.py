"""Runs trials on real gloo ranks: `python gang_script.py FOLDER WORLD`, jobs in FOLDER/jobs.json.

Imports once, forks WORLD ranks, runs every job in turn in them, and writes FOLDER/rank{r}.json: for each job the
outcome, or {"error": text} for one that raised. Not done in pytest's own process, which has threads.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from train_worker.megatron.preload import preload


def main(folder: Path, world: int) -> int:
    preload("cpu")
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os._exit(rank_main(folder, world, rank))
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


def rank_main(folder: Path, world: int, rank: int) -> int:
    """Exit code of one rank; stops at a job that raised, since other ranks may be left in a collective."""
    import torch

    from train_worker.job import TrialJob
    from train_worker.megatron.trial import run
    from train_worker.progress import Progress

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    answers = []
    for text in json.loads((folder / "jobs.json").read_text()):
        try:
            answers.append(json.loads(run(TrialJob.model_validate(text), Progress()).model_dump_json()))
        except Exception as error:  # noqa: BLE001  whatever a trial raises is what the test looks at
            traceback.print_exc()
            answers.append({"error": f"{type(error).__name__}: {error}"})
    (folder / f"rank{rank}.json").write_text(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
