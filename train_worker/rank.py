"""One rank of one trial: what the forked process runs, from process group to written report.

Called in a fresh child of the clean parent (`train_worker.parent`), or in process by a Ray Train worker
(`--isolation job`). Nothing escapes: every exception becomes a report.
"""

import os
import resource
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from train_worker.failures import classify, is_collateral
from train_worker.gpu_memory import wait_until_free
from train_worker.job import RankPlace, TrialJob
from train_worker.keep import Keeper
from train_worker.outcome import Measured, Outcome
from train_worker.progress import Progress
from train_worker.rank_report import RankReport

RENDEZVOUS_FILE = "rendezvous"


def report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def progress_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.progress"


def write_report(report: RankReport, folder: Path) -> None:
    """Written whole or not at all: the launcher never reads half a report."""
    path = report_path(folder, report.rank)
    partial = path.with_suffix(".tmp")
    partial.write_text(report.model_dump_json())
    partial.rename(path)


def run_rank(job: TrialJob, place: RankPlace, folder: Path) -> None:
    """Run one rank in a fresh process and write its report to `folder`."""
    progress = Progress(progress_path(folder, place.rank))
    keeper = Keeper(lambda outcome: write_report(_report(outcome, place, progress), folder))
    report = guarded(job, place, progress, lambda: _open_process_group(job, place, folder), keeper)
    keeper.close()
    write_report(report, folder)


def guarded(
    job: TrialJob, place: RankPlace, progress: Progress, open_group: Callable[[], None], keeper: Keeper
) -> RankReport:
    """Train, and turn whatever happens into a report."""
    try:
        with progress.within("import"):
            from train_worker.megatron.trial import run
        with progress.within("process_group"):
            open_group()
        outcome = run(job, progress, keeper)
        return _report(outcome, place, progress, keeper.trace)
    except BaseException as error:  # noqa: BLE001 - a rank must always report; the process ends right after
        print(f"rank {place.rank} failed in {progress.phase}: {error!r}", file=sys.stderr)
        return RankReport(
            rank=place.rank,
            outcome=classify(error, progress.phase, progress.step),
            # A rank that cannot meet the others is the first to know; later, a lost peer is somebody else's fault.
            collateral=is_collateral(error) and progress.phase != "process_group",
            phase=progress.phase,
            step=progress.step,
        )


def _report(outcome: Outcome, place: RankPlace, progress: Progress, trace: str = "") -> RankReport:
    if isinstance(outcome, Measured):
        outcome = _with_phases(outcome, progress)
    return RankReport(rank=place.rank, outcome=outcome, phase=progress.phase, step=progress.step, trace=trace)


def _with_phases(outcome: Measured, progress: Progress) -> Measured:
    seconds = {f"{phase}_s": spent for phase, spent in progress.seconds.items()}
    known = {name: seconds.get(name, 0.0) for name in type(outcome.phases).model_fields if name in seconds}
    return outcome.model_copy(update={"phases": outcome.phases.model_copy(update=known)})


def _open_process_group(job: TrialJob, place: RankPlace, folder: Path) -> None:
    """Meet the gang over a TCPStore. Rank 0 takes a free port itself and announces it: no port is ever raced for."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=job.time_limit_s)
    if job.cluster.device == "cuda":
        if place.first_on_gpu:
            wait_until_free(place.local_rank)
        torch.cuda.set_device(place.local_rank)
    else:
        torch.set_num_threads(1)  # ranks share the cores; measured steadier than one thread a core
    leads = place.rank == 0
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without saying so
        place.master_host, place.master_port, place.world_size, leads, timeout=limit, wait_for_workers=False
    )
    if leads:
        announce(folder, place.master_host, store.port)
    backend = "nccl" if job.cluster.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    if job.cluster.device == "cpu" and job.cluster.memory_bytes is not None:
        limit_memory(job.cluster.memory_bytes)


def limit_memory(memory_bytes: int) -> None:
    """Let this process take `memory_bytes` more than it has now; beyond that its allocator fails.

    The limit is on the data segment (RLIMIT_DATA), not on address space: torch maps gigabytes that it never touches.
    Set after the process group is open, since the stacks of gloo's threads count too.
    """
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    limit = int(used.split()[1]) * 1024 + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def announce(folder: Path, host: str, port: int) -> None:
    partial = folder / f"{RENDEZVOUS_FILE}.tmp"
    partial.write_text(f"{host} {port}")
    partial.rename(folder / RENDEZVOUS_FILE)


def read_rendezvous(folder: Path) -> tuple[str, int] | None:
    """Where rank 0 listens, once it has said so."""
    try:
        host, port = (folder / RENDEZVOUS_FILE).read_text().split()
        return host, int(port)
    except FileNotFoundError:
        return None


def rank_environment(job: TrialJob, place: RankPlace) -> dict[str, str]:
    """What a rank finds in its environment: the candidate's variables over the launcher's usual ones."""
    usual = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "OMP_NUM_THREADS": "1",
    }
    return {**usual, **job.candidate.env}


def apply_environment(job: TrialJob, place: RankPlace) -> None:
    """Into this process. What it inherited of the variables that the sweep searches over goes first: else every trial,
    the default too, would run with it. Other variables stay as the worker's user set them."""
    for name in job.environment_knobs:
        os.environ.pop(name, None)
    os.environ.update(rank_environment(job, place))
