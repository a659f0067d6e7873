"""What Ray Train calls on each worker. Two ways to run trials:

- `serve_slot`: one long-lived worker group a slot. Each worker keeps a `RankHost` (and so a clean parent) and
  asks the board for work; a trial is forked, watched and, if need be, killed alone. About 0.3 s of fixed cost.
- `run_one`: one Ray Train job a trial, in the Ray worker's own process (`--isolation job`).

The board is a Ray actor handle (`tuner.launch.board.Board`), passed in the config: this folder never imports it.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
import ray.util

from train_worker.gang import place_of
from train_worker.gpu_memory import OWN_CONTEXT_BYTES, wait_until_free
from train_worker.host_memory import CALM_S, wait_until_back
from train_worker.job import Order, RankPlace, TrialJob
from train_worker.keep import Keeper
from train_worker.outcome import Crashed
from train_worker.progress import Progress
from train_worker.rank import apply_environment, guarded, limit_memory
from train_worker.rank_host import ParentLost, RankHost
from train_worker.rank_report import RankReport

WATCH_S = 0.05


def serve_slot(config: dict[str, Any]) -> None:
    """Train function of a slot's worker group. `config`: board (actor handle), slot, incarnation, device."""
    context = ray.train.get_context()
    board, slot, incarnation = config["board"], config["slot"], config["incarnation"]
    rank = context.get_world_rank()
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch, contextlib.ExitStack() as stack:
        host = RankHost(config["device"], Path(scratch))
        stack.callback(host.close)
        host.start()
        wait_until_back()  # of a group before this one, whose rank may outlive it by a little
        seat = (slot, incarnation, rank)
        while True:
            order = Order.model_validate_json(ray.get(board.next_order.remote(*seat)))
            if order.verb == "stop":
                return
            if order.verb == "run" and order.job is not None:
                _run_attempt(board, order.attempt_id, order.job, host, rank, context.get_local_rank())


def _run_attempt(board: Any, attempt_id: str, job: TrialJob, host: RankHost, rank: int, local_rank: int) -> None:
    """One rank of one attempt: meet, fork, watch, report. Never raises for what the rank does."""
    local_rank = local_rank % max(_visible_devices(job), 1)
    meeting = None
    if rank > 0:
        meeting = ray.get(board.rendezvous.remote(attempt_id))
        if meeting is None:  # rank 0 died before anyone could meet it
            ray.get(board.report.remote(attempt_id, RankReport(rank=rank, killed="peer").model_dump_json()))
            return
    try:
        host.begin(job, place_of(rank, local_rank, job, meeting, ray.util.get_node_ip_address()))
        report = _watch(board, attempt_id, host, announces=rank == 0)
        if not report.ok:  # where Ray acts all the same the slot is lost meanwhile, and this trial is to blame
            wait_until_back(CALM_S if report.killed == "memory" else 0.0)
    except (ParentLost, OSError) as error:
        lost = Crashed(phase="fork", detail=f"{type(error).__name__}: {error}", infrastructure=True)
        report = RankReport(rank=rank, outcome=lost)
    ray.get(board.report.remote(attempt_id, report.model_dump_json()))


def _watch(board: Any, attempt_id: str, host: RankHost, announces: bool) -> RankReport:
    """Wait for the rank's end. The kill order is one pending call, so watching costs the trial no CPU."""
    kill_order = board.kill_order.remote(attempt_id)
    while True:
        report = host.poll(WATCH_S)
        if report is not None:
            return report
        if announces and (meeting := host.rendezvous()) is not None:
            ray.get(board.announce.remote(attempt_id, *meeting))
            announces = False
        if kill_order is not None and ray.wait([kill_order], timeout=0)[0]:
            why, kill_order = ray.get(kill_order), None
            if why is not None:
                host.kill(why)


def _visible_devices(job: TrialJob) -> int:
    """Devices this worker process sees; a plain Train worker sees only its own."""
    if job.cluster.device == "cpu":
        return job.cluster.workers_per_node
    return len([name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if name])


class TrialFailed(RuntimeError):
    """Raised by a rank of `run_one` so that Ray Train ends the gang. The message is the rank's report as JSON."""


def run_one(config: dict[str, Any]) -> str:
    """Train function of `--isolation job`: one rank in the Ray worker itself. Returns its report as JSON.

    A failed rank raises, because Ray Train ends the other ranks only then.
    """
    job = TrialJob.model_validate_json(config["job"])
    context, start = ray.train.get_context(), time.monotonic()
    place = RankPlace(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        master_host=os.environ.get("MASTER_ADDR", ""),
        master_port=int(os.environ.get("MASTER_PORT", 0)),
    )
    apply_environment(job, place)
    report = guarded(job, place, Progress(), lambda: _in_an_open_group(job, place), Keeper())
    report = report.model_copy(update={"wall_s": time.monotonic() - start})
    if not report.ok:
        raise TrialFailed(report.model_dump_json())
    return report.model_dump_json()


def _in_an_open_group(job: TrialJob, place: RankPlace) -> None:
    """Ray Train opened the process group already; what is left to do at that point is about memory."""
    if job.cluster.device == "cuda":
        wait_until_free(place.local_rank, OWN_CONTEXT_BYTES)
    elif job.cluster.memory_bytes is not None:
        limit_memory(job.cluster.memory_bytes)


def describe(device: Literal["cpu", "cuda"]) -> str:
    """A Ray task of `moetune fingerprint`: this worker's fingerprint as JSON."""
    from train_worker.environment import fingerprint

    return fingerprint(device).model_dump_json()
