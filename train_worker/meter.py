"""Clock and memory of the steps. One interface for CUDA (the allocator's counters) and CPU (live tensor bytes)."""

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from train_worker.outcome import MemoryPeaks


class StepClock:
    """Times of one step on this rank, seconds: the wall's, the device drained before both readings, and on cuda the
    one between two events on the current stream.

    Events wait for what the current stream waits for: work left on another stream at the end of a step (a parameter
    gather that the next step needs) is in the wall time only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.gpu_seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step. A step that raises has no time."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - start)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        begin.record()
        yield
        end.record()
        torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.gpu_seconds.append(begin.elapsed_time(end) / 1e3)  # the events have passed: the device is drained

    def latest(self) -> list[float]:
        """Of the last step on this rank: wall time, and on cuda the events' time."""
        return [self.seconds[-1], *self.gpu_seconds[-1:]]


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of live tensor storages while entered: the CPU twin of torch.cuda.max_memory_allocated.

    Deterministic, where RSS is noise (it rose under recompute). Each storage counts once, whatever its views; it is
    subtracted when freed. `held` are the tensors that are alive before and count too (weights, gradients, optimizer
    state). Slows a step about 1.5 times: enter it for a step that is not timed.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = list(held)
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, Any] = {}

    def __enter__(self) -> "LiveBytes":
        gc.collect()  # a storage kept by garbage would be forgotten at a moment that depends on chance
        for tensor in self._held:
            self._watch(tensor)
        self._held.clear()
        self._real_resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._booking_resize()  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._real_resize  # type: ignore[method-assign]
        for watcher in list(self._watchers.values()):  # a copy: a tensor that dies meanwhile takes its own away
            watcher.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for found in tree_iter(output):
            if isinstance(found, torch.Tensor):
                self._watch(found)
        return output

    def _watch(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._watchers:
            self._watchers[key] = weakref.finalize(storage, self._forget, key)
            self._watchers[key].atexit = False
        self._set_size(key, size)

    def _set_size(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)
        del self._watchers[key]

    def _booking_resize(self) -> Any:
        """torch.UntypedStorage.resize_ that also books the new size: recompute frees storages with resize_(0)."""

        def resize(storage: Any, size: int) -> Any:
            done = self._real_resize(storage, size)
            if storage._cdata in self._watchers:
                self._set_size(storage._cdata, storage.nbytes())
            return done

        return resize


class PeakMemory:
    """Peak memory of this rank, bytes: on cuda after `observe`, on cpu of the one step run within it.

    `held` gives the tensors that live from step to step; only a CPU asks for them.
    """

    def __init__(self, device: torch.device, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.device = device
        self.held = held
        self._cpu_peak = 0

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Around the last warm-up step: the step that a CPU measures, and after which cuda counts anew."""
        if self.device.type == "cuda":
            yield
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.reset_accumulated_memory_stats(self.device)  # the allocator's retries of warm-up do not count
            return
        with LiveBytes(self.held()) as live:
            yield
        self._cpu_peak = live.peak_bytes

    def peaks(self) -> MemoryPeaks | None:
        """What the allocator and the device say, the largest over the ranks; None on a CPU. Collective on cuda."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        mine = [
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            total - free,
            torch.cuda.memory_allocated(self.device),
        ]
        found = torch.tensor(mine, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        allocated, reserved, used, static = (int(each) for each in found)
        return MemoryPeaks(
            allocated_bytes=allocated, reserved_bytes=reserved, device_used_bytes=used, static_bytes=static
        )

    def largest(self) -> int:
        """The largest peak over the ranks, bytes. Collective."""
        mine = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._cpu_peak
        peak = torch.tensor([mine], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
        return int(peak.item())
