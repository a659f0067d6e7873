"""Slots on a real Ray of two nodes: warm workers, a lost node, Ray's memory monitor; nothing is left behind."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from search_spaces.shapes import ClusterShape
from tests.end_to_end.sweeps import gone
from tests.train_worker.test_gang import job
from train_worker.host_memory import RAY_SETTING, host_memory
from train_worker.outcome import Measured, OutOfMemory
from train_worker.rank_report import InterruptedGang, SlotResult
from tuner.launch import cluster as joining
from tuner.launch.slots import Slots

SHAPE = ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=1)
READY_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    os.environ.update(joining.SETTINGS)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    with joining.joined(nodes.address, SHAPE):
        yield nodes
    nodes.shutdown()


@pytest.fixture
def slots(nodes: Cluster, tmp_path: Path) -> Iterator[Slots]:
    assert nodes.address
    running = Slots(SHAPE, tmp_path)
    running.start()
    running.wait_ready(READY_LIMIT_S)
    yield running
    running.stop()
    assert not _living_groups(), "a placement group outlived its slot"


def _living_groups() -> list[Any]:
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def _run(slots: Slots, trial: Any) -> SlotResult:
    return SlotResult.model_validate_json(ray.get(slots.board.run.remote(trial.model_dump_json()), timeout=300))


def _ranks() -> set[int]:
    """Rank processes on this machine: forked from a clean parent, leaders of their own session."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            leads = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3]) == int(folder.name)
        except (OSError, IndexError):
            continue
        if b"train_worker.parent" in words and leads:
            found.add(int(folder.name))
    return found


@pytest.mark.timeout(600)
def test_a_slot_serves_loses_a_node_and_its_workers_and_goes_on(nodes: Cluster, slots: Slots) -> None:
    assert isinstance(_run(slots, job("plain")).outcome, Measured)
    assert not _ranks(), "a rank outlived its trial"

    # A node dies: the slot waits for another one, and the trial is retried there.
    running = _Background(slots, "node-lost")
    orphans = _ranks()
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
    with _ray_memory_monitor(room_bytes=3 * 2**30):
        nodes.add_node(num_cpus=1)
    assert not gone(orphans, 60), "a rank went on although its worker or its gang was gone"
    result = running.result()
    assert isinstance(result.outcome, Measured)
    assert result.attempts == 2
    assert not gone(_ranks(), 10)

    # Ray's memory monitor on that node kills its workers for the memory of a rank it does not know: out of memory.
    result = _run(slots, job("monitored", sequences=8192, micro_batch_size=4096))
    assert isinstance(result.outcome, OutOfMemory), result
    assert result.outcome.where == "host"
    assert result.attempts == 1
    # Until the rank that filled the memory is gone, the monitor would kill for it again, and the next trial be blamed.
    assert not gone(_ranks(), 30)
    assert isinstance(_run(slots, job("after-monitor")).outcome, Measured)

    # Interrupted: the running trial ends at once, and has no outcome.
    running = _Background(slots, "interrupted", steps=100_000)
    ray.get(slots.board.interrupt.remote())
    assert isinstance(running.result().outcome, InterruptedGang)
    assert not gone(_ranks(), 10)


@contextmanager
def _ray_memory_monitor(room_bytes: int) -> Iterator[None]:
    """Nodes started within watch memory, and act once `room_bytes` more are in use on this machine than now."""
    memory = host_memory()
    settings = {
        RAY_SETTING: f"{memory.share + room_bytes / memory.total_bytes:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    before = {name: os.environ.pop(name, None) for name in settings}
    os.environ.update(settings)
    yield
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


class _Background:
    """A trial long enough to be disturbed; returns from the constructor once both its ranks run."""

    def __init__(self, slots: Slots, name: str, steps: int = 400) -> None:
        self._results: list[SlotResult] = []
        trial = job(name, steps=steps, limit_s=120)
        self._thread = threading.Thread(target=lambda: self._results.append(_run(slots, trial)))
        self._thread.start()
        deadline = time.monotonic() + 120
        while len(_ranks()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def result(self) -> SlotResult:
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self._results[0]
