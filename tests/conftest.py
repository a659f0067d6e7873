"""What every test may rely on: a quiet environment, and nothing left running afterwards."""

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "MOETUNE_TEST_SESSION"
GRACE_S = 20.0  # Ray's processes need some seconds after ray.shutdown() on 2 busy cores
# Python's own helpers, which end with the interpreter that started them.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# At import, before any test module imports ray, torch or mlflow: they read these once.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    MLFLOW_DISABLE_TELEMETRY="true",
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
)
os.environ[MARK] = uuid.uuid4().hex
for _name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
    os.environ.pop(_name, None)  # a test must never join a cluster or write to a server that it did not start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def _marked_processes() -> dict[int, str]:
    """Live processes that were started, however indirectly, by this session: pid -> command line."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if command and not any(helper in command for helper in HELPERS):
            found[int(folder.name)] = command[:200]
    found.pop(os.getpid(), None)
    return found


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Fail the run if a process that a test started outlives the session. Set up first, so torn down last."""
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := _marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left by the tests (now killed): {left}"
