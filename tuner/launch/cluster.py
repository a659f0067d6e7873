"""Joining Ray: a private cluster on this machine, or an existing one by address. Every failure says what to do."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from search_spaces.errors import Interrupted, ResourceMissing
from search_spaces.shapes import ClusterShape
from tuner.launch.reaper import Reaper

CONNECT_LIMIT_S = 5.0
# Room for actors that take no slot; a group as large as the cluster can deadlock on a leaked placement group.
SPARE_CPUS = 2
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one Python process less a worker group
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # 2 s by default: that is added to the end of every group
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "RAY_worker_maximum_startup_concurrency": "16",  # by default one a core, and a warning for each further one
    # Off in a private cluster: it would kill the board for a rank's memory (see train_worker.host_memory).
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle workers, one a CPU, would start while the first trial is timed
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Tune's own kills running trials and leaks their placement groups
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # the journal is the truth; nothing is restored from Tune's snapshots
    "TUNE_WARN_THRESHOLD_S": "30",
    "OMP_NUM_THREADS": "1",
}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}


@contextmanager
def joined(address: str | None, cluster: ClusterShape) -> Iterator[None]:
    """In the cluster at `address`, or in a private one sized for `cluster`, which ends with the block.

    Raises ResourceMissing (exit 4).
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if address is not None:
        _reach(address)
    import ray

    if address is None:
        require_here(cluster)
    reaper = Reaper() if address is None else None
    try:
        if reaper is not None:
            gpus = cluster.workers if cluster.device == "cuda" else None
            _start_private(num_cpus=cluster.workers + SPARE_CPUS, num_gpus=gpus, include_dashboard=False, **QUIET)
            reaper.watch(ray.get_runtime_context().get_session_name())
        else:
            _join(str(address), cluster)
        yield
    finally:
        ray.shutdown()
        if reaper is not None:
            reaper.close()


def require_here(cluster: ClusterShape) -> None:
    """What a private Ray on this machine needs. Raises ResourceMissing (exit 4)."""
    _path_without_blanks()
    if cluster.device == "cuda":
        _enough_gpus_here(cluster.workers)


def _join(address: str, cluster: ClusterShape) -> None:
    import ray

    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceMissing(
            f"cannot join the Ray cluster at {address}: {error}",
            "check it with `ray status --address ...`, and that its Ray and Python versions are the same as here",
        ) from error
    _enough(cluster, address)


def _path_without_blanks() -> None:
    """Ray 2.60 starts its workers by an unquoted shell command: with a blank in it they never come, without a word."""
    if any(each.isspace() for each in sys.prefix):
        raise ResourceMissing(
            f"Ray cannot start workers from a path with blanks: {sys.prefix}",
            "move the checkout (or its .venv) to a path without blanks, or join a running cluster with --address",
        )


def _enough_gpus_here(workers: int) -> None:
    """Ray takes any number of GPUs it is told; a trial would find out only when it runs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = len(list(Path("/dev").glob("nvidia[0-9]*")))
    here = here if visible is None else min(here, len([name for name in visible.split(",") if name.strip()]))
    if here < workers:
        raise ResourceMissing(
            f"this machine has {here} visible NVIDIA GPUs, the sweep file asks for {workers} workers",
            "run where the GPUs are, join their cluster with --address, or lower cluster.workers",
        )


def _start_private(**options: Any) -> None:
    """Start Ray on this machine. Its daemons must answer within 15 s, which a busy machine can miss: tried twice."""
    import ray

    for last in (False, True):
        try:
            ray.init(address="local", **options)
            return
        except SystemExit as error:  # Ray's own SIGTERM handler, which stands from the first moment of ray.init
            ray.shutdown()
            raise Interrupted("stopped while Ray was starting", "go on with --resume") from error
        except Exception as error:  # Ray raises a bare Exception where its daemons do not come up in time
            ray.shutdown()
            if last:
                raise ResourceMissing(
                    f"a private Ray could not be started: {error}",
                    "see that memory, processors and /tmp are not exhausted, then try again",
                ) from error


def _reach(address: str) -> None:
    """Fail in seconds on an address nobody listens at; ray.init itself waits for minutes."""
    plain = address.removeprefix("ray://")
    if address in ("auto", "local"):
        return
    host, _, port = plain.rpartition(":")
    if not host or not port.isdigit():
        raise ResourceMissing(f"{address!r} is not a Ray address", "give host:port, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()
    except OSError as error:
        raise ResourceMissing(
            f"no Ray cluster answers at {address}: {error}",
            "start one with `ray start --head`, or leave --address out to run on this machine",
        ) from error


def _enough(cluster: ClusterShape, address: str) -> None:
    import ray

    there = ray.cluster_resources()
    # Each worker takes a CPU (and a GPU); Tune's trials and Train's controllers need one more between them.
    needed = {"CPU": cluster.workers + 1, "GPU": cluster.workers if cluster.device == "cuda" else 0}
    for kind, count in needed.items():
        if there.get(kind, 0) < count:
            raise ResourceMissing(
                f"the cluster at {address} has {there.get(kind, 0):g} {kind}s; {cluster.workers} workers need {count}",
                "add nodes, or lower cluster.workers in the sweep file",
            )
