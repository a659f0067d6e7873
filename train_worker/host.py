"""What a recipe sets of the rank's own process: when Python collects garbage, and which cores it keeps to.

Both as launchers do it: Megatron-LM 0.19 training/training.py:3586 (`--manual-gc`) and :3222 (the interval).
"""

import gc
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import ClusterShape

MANUAL, INTERVAL, AFFINITY = "manual_gc", "manual_gc_interval", "cpu_affinity"
HOST_KNOBS = frozenset({MANUAL, INTERVAL, AFFINITY})
EXCLUSIVE = "exclusive"


class HostSettings:
    """In force inside the block; everything is put back after it. `rank` counts over the trial.

    Raises ValueError on entry where the cores allowed here are fewer than the ranks of a node.
    """

    def __init__(self, candidate: Candidate, cluster: ClusterShape, rank: int) -> None:
        knobs = candidate.knobs
        self.manual = bool(knobs.get(MANUAL))
        self.interval = int(knobs.get(INTERVAL) or 0)  # Megatron-LM's default 0: never
        self._exclusive = knobs.get(AFFINITY) == EXCLUSIVE
        self._here = min(cluster.workers_per_node, cluster.workers_per_trial)
        self._place = rank % self._here  # ranks of a node are numbered in a row
        self._allowed = frozenset(os.sched_getaffinity(0))
        self._share = self._allowed
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> Self:
        if self._exclusive:
            self._share = share(self._allowed, self._place, self._here)
            _pin(self._share)
        if self.manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._exclusive:
            _pin(self._allowed)
        if self.manual and self._was_enabled:
            gc.enable()

    def after_step(self, steps: int) -> None:
        """Inside the timed step, as the automatic collection is: `steps` are done, this one included."""
        if self.manual and self.interval and steps % self.interval == 0:
            gc.collect()

    def effective(self) -> dict[str, KnobValue]:
        """Read back from the process itself."""
        manual = not gc.isenabled()
        return {MANUAL: manual, INTERVAL: self.interval if manual else None, AFFINITY: self._affinity()}

    def _affinity(self) -> KnobValue:
        cores = frozenset(os.sched_getaffinity(0))
        if self._exclusive and cores == self._share:
            return EXCLUSIVE
        return None if cores == self._allowed else "cores " + ",".join(map(str, sorted(cores)))


def share(allowed: Iterable[int], place: int, ranks: int) -> frozenset[int]:
    """The cores of one of `ranks` ranks: equal parts, none twice; what is left over stays unused."""
    cores = sorted(allowed)
    each = len(cores) // ranks
    if not each:
        raise ValueError(f"cpu_affinity exclusive: {len(cores)} cores are allowed here, for {ranks} ranks")
    return frozenset(cores[place * each : (place + 1) * each])


def _pin(cores: Iterable[int]) -> None:
    """Every thread of this process: those of the process group are there already; later ones inherit."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
