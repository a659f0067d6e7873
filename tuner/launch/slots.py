"""Slots: one long-lived Ray Train worker group each, supervised by a thread that starts it again when it dies."""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from search_spaces.errors import ResourceMissing
from search_spaces.shapes import ClusterShape
from train_worker.entry import serve_slot
from tuner.launch.board import SlotBoard

logger = logging.getLogger(__name__)
STARTS_IN_A_ROW = 3  # a group that dies this often without serving anything will not get better
JOIN_LIMIT_S = 60.0


class Slots:
    """The board and the supervisors. Use `start`, `wait_ready`, then `board`; `stop` releases everything."""

    def __init__(self, cluster: ClusterShape, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        names = [f"slot-{index}" for index in range(cluster.slots)]
        # On the driver's node: a board lost with another node would take every slot along. Each rank has at most
        # three calls pending (work, kill order, report).
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, max_concurrency=3 * cluster.workers + 100, scheduling_strategy=here)(SlotBoard)
        self.board: Any = actor.remote(dict.fromkeys(names, cluster.workers_per_trial))
        self.hurry = False  # a second Ctrl-C: end now, the reaper clears up
        self.faults: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._supervise, args=(n,), name=n, daemon=True) for n in names]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_ready(self, limit_s: float, stopped: Callable[[], bool] = lambda: False) -> float:
        """Seconds until the first slot was ready, or until `stopped` says so.

        Raises ResourceMissing after `limit_s` or when all slots are lost.
        """
        start = time.monotonic()
        while not ray.get(self.board.ready_slots.remote()) and not stopped():
            waited = time.monotonic() - start
            if waited > limit_s or not any(thread.is_alive() for thread in self._threads):
                why = self.faults[-1] if self.faults else "still starting"
                raise ResourceMissing(
                    f"no worker group was ready after {waited:.0f} s: {why}",
                    "check `ray status`, and that moetune is installed on the workers with the same Python",
                )
            time.sleep(0.1)
        return time.monotonic() - start

    def stop(self) -> None:
        """End the groups normally, so that their placement groups are released."""
        self._stopping.set()
        with suppress(RayError):  # a board that is gone has nobody to send home
            ray.get(self.board.stop.remote())
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(0 if self.hurry else JOIN_LIMIT_S)
        ray.kill(self.board)

    def _supervise(self, slot: str) -> None:
        try:
            self._keep_serving(slot)
        except RayError as error:  # the board itself is gone: its trials are told by `no_board`
            self.faults.append(f"{slot}: the board was lost: {_cause(error)}")

    def _keep_serving(self, slot: str) -> None:
        failures = 0
        while not self._stopping.is_set():
            incarnation = uuid.uuid4().hex[:8]
            ray.get(self.board.slot_opens.remote(slot, incarnation))
            fault = self._serve(slot, incarnation)
            if self._stopping.is_set():
                return
            failures = 1 if ray.get(self.board.served.remote(slot)) else failures + 1
            self.faults.append(f"{slot}: {_cause(fault)}")
            logger.warning("%s lost (%s), start %d", slot, _cause(fault), failures + 1)
            gone = failures >= STARTS_IN_A_ROW
            ray.get(self.board.slot_lost.remote(slot, _cause(fault), _host_out_of_memory(fault), gone))
            if gone:
                return

    def _serve(self, slot: str, incarnation: str) -> BaseException:
        """Run one worker group until it ends; what it ended with."""
        on_gpu = self.cluster.device == "cuda"
        trainer = DataParallelTrainer(
            serve_slot,
            train_loop_config={
                "board": self.board,
                "slot": slot,
                "incarnation": incarnation,
                "device": self.cluster.device,
            },
            scaling_config=ScalingConfig(
                num_workers=self.cluster.workers_per_trial,
                use_gpu=on_gpu,
                resources_per_worker={"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1},
                placement_strategy="STRICT_SPREAD" if self.cluster.workers_per_node == 1 else "PACK",
            ),
            run_config=RunConfig(
                name=f"{slot}-{incarnation}",
                storage_path=str(self.folder),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=1),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - any end of a group is a lost slot, whatever Ray calls it
            return error
        return RuntimeError("the worker group ended although nobody stopped it")


def _cause(error: BaseException) -> str:
    """The root cause of a Ray Train error in one line: the failures of all ranks, not the wrapper's text."""
    failures = getattr(error, "worker_failures", None) or {}
    inner = [getattr(each, "health_check_failure", None) or each for each in failures.values()] or [error]
    return "; ".join(f"{type(each).__name__}: {str(each).strip().splitlines()[0][:200]}" for each in inner if str(each))


def _host_out_of_memory(error: BaseException) -> bool:
    """Ray's memory monitor killed a worker. Its class is matched, never the text: every actor death names "OOM"."""
    failures = getattr(error, "worker_failures", None) or {}
    inner = [getattr(each, "health_check_failure", None) or each for each in failures.values()]
    return any(isinstance(each, ray.exceptions.OutOfMemoryError) for each in inner)
