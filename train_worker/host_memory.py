"""How full this machine's memory is, as Ray's memory monitor sees it, when a rank must go before Ray acts, and how many
processes the kernel has killed for it.

Ray knows nothing of forked ranks. When a node passes its threshold (95%), Ray 2.60 kills every Ray worker there,
the board and Train's controllers included (seen: 8 of 8), which ends the sweep. So the rank is killed first, alone.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RAY_SETTING = "RAY_memory_usage_threshold"  # Ray's own spelling
RAY_THRESHOLD = 0.95
AHEAD_OF_RAY = 0.02  # share of the memory; a rank is looked at 20 times a second
CALM_S, WAIT_S, POLL_S = 1.0, 15.0, 0.05
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Bytes in use and bytes there are: of the machine, or of the container where that is smaller."""

    used_bytes: int
    total_bytes: int

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes


def limit_share() -> float:
    """The share of memory at which a rank is killed: a little under the threshold that Ray is set to."""
    return float(os.environ.get(RAY_SETTING, RAY_THRESHOLD)) - AHEAD_OF_RAY


def host_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> HostMemory:
    """Read now. A container's own limit counts where it is below the machine's memory (cgroup v2, then v1)."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in proc.read_text().splitlines() if "kB" in line}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    for limit_file, used_file, stat_key in (
        (cgroup / "memory.max", cgroup / "memory.current", "inactive_file"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(limit_file)
        if limit is not None and limit < total:
            cached = _stat(limit_file.parent / "memory.stat", stat_key)
            return HostMemory((_number(used_file) or 0) - cached, limit)
    return HostMemory(total - free, total)


def wait_until_back(
    calm_s: float = 0.0,
    share: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once this machine's memory has been under the limit for `calm_s` seconds, at the latest after WAIT_S.

    A killed process of many GiB is gone from /proc before its memory is free, and Ray, which looks every 250 ms, acts
    on what it saw. It must not be the next trial that is blamed for it: CALM_S is for after a kill.
    """
    ask, limit = share or (lambda: host_memory().share), limit_share()
    began = calm_since = clock()
    while (now := clock()) - began < WAIT_S:
        if ask() > limit:
            calm_since = now
        elif now - calm_since >= calm_s:
            return
        sleep(POLL_S)


def oom_file(pid: int) -> Path | None:
    """Where the kernel counts OOM kills of the memory cgroup of `pid` (v1 or v2); None where it cannot be found."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
        if not controllers and (found := Path(f"/sys/fs/cgroup{path}/memory.events")).exists():
            return found
    return None


def count_oom_kills(file: Path | None) -> int:
    """OOM kills counted in `file`; 0 where it cannot be read."""
    try:
        lines = file.read_text().splitlines() if file else []
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(file: Path, key: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
