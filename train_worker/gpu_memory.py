"""Whether a GPU's memory is free before a trial begins, asked of the driver (NVML): no context is made for it.

A trial that starts beside what another one left would run out of memory that its own plan has, and be blamed for it.
"""

import os
import time
from collections.abc import Callable

import pynvml

from train_worker.failures import MachineFault

TOLERATED_BYTES = 1 << 30  # a display, a monitoring daemon's context; an idle H200 reports 0 in use
WAIT_S = 20.0  # a killed process of 100 GiB was gone from the driver within 2 s
POLL_S = 0.2
OWN_CONTEXT_BYTES = 3 << 30  # what a process that has opened its process group holds before it builds a model


class GpuInUse(MachineFault):
    """Memory of the GPU is taken before the trial began, and stays so: the machine's fault, not the trial's."""


def wait_until_free(
    local_rank: int,
    tolerated_bytes: int = TOLERATED_BYTES,
    used_bytes: Callable[[int], int | None] | None = None,
    wait_s: float = WAIT_S,
) -> None:
    """Return once at most `tolerated_bytes` of the GPU of this rank are in use. Raises GpuInUse after `wait_s`.

    Where the driver does not tell (no NVML in a sandbox) it is not waited for: the trial then finds out itself.
    """
    ask = used_bytes or used_memory_bytes
    deadline = time.monotonic() + wait_s
    while (used := ask(local_rank)) is not None and used > tolerated_bytes:
        if time.monotonic() > deadline:
            told = f"{used / 2**30:.1f} GiB of GPU {local_rank} are in use before the trial began"
            raise GpuInUse(f"{told} (waited {wait_s:.0f} s){_by_whom(local_rank)}; see nvidia-smi on the worker")
        time.sleep(POLL_S)


def used_memory_bytes(local_rank: int) -> int | None:
    """Memory in use on the GPU of `local_rank` by any process, the driver's own reserve not counted; None: unknown."""
    return _asked(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(_handle(local_rank), version=pynvml.nvmlMemory_v2).used))


def device_names() -> tuple[str, ...]:
    """Names of all GPUs of this machine; none where the driver does not tell."""

    def names() -> tuple[str, ...]:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)

    return _asked(names) or ()


def visible_device(local_rank: int, visible: str | None) -> int | str:
    """What CUDA calls device `local_rank`, as NVML knows it: an index, or a UUID ("GPU-...", "MIG-...").

    `visible` is CUDA_VISIBLE_DEVICES; None or "" means all. Raises IndexError where it names fewer devices.
    """
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if names and local_rank >= len(names):
        raise IndexError(f"CUDA_VISIBLE_DEVICES={visible!r} has no GPU {local_rank}")
    name = names[local_rank] if names else str(local_rank)
    return int(name) if name.isdigit() else name


def _handle(local_rank: int) -> object:
    device = visible_device(local_rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if isinstance(device, int):
        return pynvml.nvmlDeviceGetHandleByIndex(device)
    return pynvml.nvmlDeviceGetHandleByUUID(device)


def _by_whom(local_rank: int) -> str:
    """The processes, where the driver names any that this machine's namespace shows."""
    found = _asked(lambda: [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(local_rank))])
    return f" by process {', '.join(map(str, found))}" if found else ""


def _asked[Answer](question: Callable[[], Answer]) -> Answer | None:
    """The driver's answer; None where there is no driver, or none that answers this."""
    try:
        pynvml.nvmlInit()
        try:
            return question()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
