"""A gang: the ranks of one trial, wherever they run. `GangState` decides; `LocalGang` acts on this machine.

`LocalGang` is the light twin of the Ray slot: no Ray, same parents, same forks, same reports, one driver.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from train_worker.job import RankPlace, TrialJob
from train_worker.outcome import Outcome
from train_worker.rank_host import RankHost
from train_worker.rank_report import RankReport, combine

PEER_GRACE_S = 2.0  # the other ranks' time to say what they saw, once one has failed
POLL_S = 0.02


@dataclass
class GangState:
    """What is known of one running trial. `now` arguments are seconds of one monotonic clock."""

    job: TrialJob
    reports: dict[int, RankReport] = field(default_factory=dict)
    failed_at: float | None = None
    rendezvous: tuple[str, int] | None = None

    def add(self, report: RankReport, now: float) -> None:
        self.reports[report.rank] = report
        if not report.ok and self.failed_at is None:
            self.failed_at = now

    @property
    def complete(self) -> bool:
        return len(self.reports) == self.job.world_size

    def peers_must_die(self, now: float) -> bool:
        """One rank failed and the rest had their grace: they sit in a collective that never ends."""
        return self.failed_at is not None and now - self.failed_at > PEER_GRACE_S

    @property
    def trace(self) -> str:
        """Of rank 0's profiled step; empty where it was not kept."""
        return self.reports[0].trace if 0 in self.reports else ""

    def outcome(self) -> Outcome:
        return combine(list(self.reports.values()), self.job.time_limit_s)


def place_of(
    rank: int, local_rank: int, job: TrialJob, rendezvous: tuple[str, int] | None, host: str, first_on_gpu: bool = True
) -> RankPlace:
    """A rank's place; rank 0 gets port 0 (it picks one), the others the announced one."""
    master_host, master_port = rendezvous or (host, 0)
    return RankPlace(
        rank=rank,
        local_rank=local_rank,
        world_size=job.world_size,
        master_host=master_host,
        master_port=master_port,
        first_on_gpu=first_on_gpu,
    )


class LocalGang:
    """All ranks on this machine, one warm parent each. Use as a context manager; `run` may be called many times.

    `gpus`: how many GPUs the ranks take in turn, where these are fewer (NCCL 2.30 and newer allow it with
    NCCL_MULTI_RANK_GPU_ENABLE=1). They then show what runs and trains alike, not how fast.
    """

    def __init__(self, world_size: int, device: Literal["cpu", "cuda"], folder: Path, gpus: int | None = None) -> None:
        self.hosts = [RankHost(device, folder / f"host-{rank}") for rank in range(world_size)]
        self._gpus = gpus or world_size

    def __enter__(self) -> Self:
        for host in self.hosts:
            host.spawn()  # all import at the same time
        for host in self.hosts:
            host.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for host in self.hosts:
            host.close()

    def run(self, job: TrialJob) -> Outcome:
        """Run one trial to its outcome. Always returns within the job's time limit plus a few seconds."""
        if job.world_size != len(self.hosts):
            raise ValueError(f"the job needs {job.world_size} ranks, this gang has {len(self.hosts)}")
        state = GangState(job)
        self.hosts[0].begin(job, self.place(0, job, None))
        waiting = list(range(1, len(self.hosts)))
        while not state.complete:
            state.rendezvous = state.rendezvous or self.hosts[0].rendezvous()
            if state.rendezvous:
                for rank in waiting:
                    self.hosts[rank].begin(job, self.place(rank, job, state.rendezvous))
                waiting = []
            self._collect(state)
            if state.failed_at is not None and waiting:  # rank 0 died before anyone could meet it
                state.reports |= {rank: RankReport(rank=rank, killed="peer") for rank in waiting}
                waiting = []
        return state.outcome()

    def place(self, rank: int, job: TrialJob, rendezvous: tuple[str, int] | None) -> RankPlace:
        return place_of(rank, rank % self._gpus, job, rendezvous, "127.0.0.1", first_on_gpu=rank < self._gpus)

    def _collect(self, state: GangState) -> None:
        for host in self.hosts:
            report = host.poll(POLL_S)
            if report is not None:
                state.add(report, time.monotonic())
        if state.peers_must_die(time.monotonic()):
            for host in self.hosts:
                if host.busy:
                    host.kill("peer")
