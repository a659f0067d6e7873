"""One profiled step: torch's profiler (kineto, CUPTI on a GPU) around it, and its events as `train_worker.kernels`.

Cheap by what it leaves out. No operator of the host is recorded on a GPU: each costs the step a callback, and kernels
are told apart without them: a kernel carries the number of the CUDA call that launched it, and that call its time and
thread. Launched before the schedule began (it clears the gradients) or after the optimizer did: "optimizer"; after the
last backward: "reduction"; by autograd's thread: "backward"; by the main one: "forward".
And torch.autograd.profiler is called directly: torch.profiler.profile imports Inductor first (3.7 s on 2 CPU cores).
"""

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from train_worker.host import HostSettings
from train_worker.job import TrialJob
from train_worker.keep import Keeper
from train_worker.kernels import GpuEvent, Kind, Phase, StepTrace, union, working
from train_worker.megatron.peers import with_shortest
from train_worker.megatron.step import Trainer
from train_worker.outcome import Measured
from train_worker.profile import DeviceMemory, PhaseMemory, profile_of

PROFILED_S = 0.5  # a step that takes longer is profiled in part, where every micro-batch does the same
CLOCKS_APART = 0.05  # share of the step by which the profiler's clock may miss the step's window
CLOCKS_APART_US = 2000.0  # and what it may always miss: nothing but the first and last kernels' phases depends on it
TOGETHER = (
    "overlap_moe_expert_parallel_comm", "overlap_grad_reduce", "overlap_param_gather",
    "fine_grained_activation_offloading",
)  # fmt: skip
BACKWARD = "autograd::engine::evaluate_function"  # what autograd runs a node in, on a CPU
OPERATOR = re.compile(r"^(aten|gloo|c10d|c10d_functional|_c10d_functional)\b")
COPIED = re.compile(r'"bytes": (\d+)')


class ProfilerFailed(RuntimeError):
    """The profiler did not start, or saw nothing of the step that ran. Says nothing about the trial."""


class Profiled(NamedTuple):
    """What one step was seen to do on this rank; `memory` on cuda only."""

    trace: StepTrace
    memory: PhaseMemory | None


class _Marks:
    """When the step, its schedule, its reduction of gradients and its optimizer began and when it ended (ns, the
    profiler's clock), and memory peaks between.

    The optimizer runs outside of every graph, so that its mark is there in a step that replays one too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began_ns = self.schedule_ns = self.reduction_ns = self.optimizer_ns = self.ended_ns = 0
        self.before_bytes = self.after_bytes = 0

    def begin(self) -> None:
        self._drain()
        self._peak()
        self.began_ns = time.time_ns()  # CLOCK_REALTIME, as kineto (c10/util/ApproximateClock.h)

    def schedule_begins(self) -> None:
        self.schedule_ns = time.time_ns()

    def reduction_begins(self) -> None:
        self.reduction_ns = time.time_ns()

    def optimizer_begins(self) -> None:
        self.before_bytes, self.optimizer_ns = self._peak(), time.time_ns()

    def phase(self, at_ns: float) -> Phase | None:
        """Of what was launched then: once a step, however many micro-batches it has, else None (also where no reduction
        was seen to begin)."""
        if at_ns >= self.optimizer_ns or at_ns < self.schedule_ns:
            return "optimizer"
        return "reduction" if self.reduction_ns and at_ns >= self.reduction_ns else None

    def end(self) -> None:
        self._drain()
        self.ended_ns, self.after_bytes = time.time_ns(), self._peak()

    def _drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _peak(self) -> int:
        """Peak of allocated bytes since the last call; reads a counter of the host, waits for nothing."""
        if self.device.type != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(peak)


class WithProfile(NamedTuple):
    """A measurement after the profiled step. `together`: this rank is out of the step, or none began it, so that a
    collective finds its peers; a step that failed on one rank has left them in one of its own."""

    measured: Measured
    trace: StepTrace | None
    together: bool


def with_profile(measured: Measured, trainer: Trainer, host: HostSettings, keeper: Keeper) -> WithProfile:
    """The measurement with the profile of one more step, or with the reason why there is none. Collective.

    Never raises for what happens in that step: what was measured stays measured.
    """
    device, together = trainer.device, False
    try:
        memory = _device_memory(measured, device)
        step_s = median(sample.step_time_s for sample in measured.steps)  # of the slowest rank: equal on all
        step = len(measured.warmup) + len(measured.steps)
        whole = trainer.batches(step)
        part = [each[: _fewer(trainer.job, len(each), step_s)] for each in whole]
        profiler, marks = _stepped(trainer, host, part, step)
        together = True
        profiled = _compared(profiler, marks, len(whole[0]) / len(part[0]), _alike(trainer.job))
        kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        profile = profile_of(profiled.trace, step_s, kind, profiled.memory, memory)
    except Exception as error:  # noqa: BLE001 - CUPTI, memory, a lost peer: none of it undoes the measured steps
        failed = measured.model_copy(update={"profile_error": f"{type(error).__name__}: {error}"})
        return WithProfile(failed, None, together or isinstance(error, ProfilerFailed))
    if trainer.job.keep_trace and torch.distributed.get_rank() == 0:
        keeper.traced(profiled.trace)
    return WithProfile(measured.model_copy(update={"profile": profile}), profiled.trace, together)


def _device_memory(measured: Measured, device: torch.device) -> DeviceMemory | None:
    """Of the measured steps; None on a CPU. Collective on cuda."""
    if measured.memory is None:
        return None
    retries = torch.tensor([torch.cuda.memory_stats(device)["num_alloc_retries"]], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(retries, op=torch.distributed.ReduceOp.MAX)
    _, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(used_bytes=measured.memory.device_used_bytes, total_bytes=total, retries=int(retries.item()))


def _fewer(job: TrialJob, count: int, step_s: float) -> int:
    """How many of the `count` micro-batches of a step to profile: all, or as many as take PROFILED_S, one at least.

    A step of many kernels costs as long again to read. All where the micro-batches depend on each other (stages,
    graphs, overlap, offload), where some work is done once amid them, and where people will look at the trace.
    """
    knobs = job.candidate.knobs
    if step_s <= PROFILED_S or job.keep_trace or any(knobs.get(name) for name in TOGETHER):
        return count
    if job.candidate.layout.pipeline > 1 or knobs.get("cuda_graph_impl", "none") != "none":
        return count
    return max(1, int(count * PROFILED_S / step_s))


def _stepped(
    trainer: Trainer, host: HostSettings, batches: list[list[torch.Tensor]], step: int
) -> tuple[profile, _Marks]:
    """Train on `batches` of step `step` under the profiler. Collective. The allocator's peaks are reset.

    Raises ProfilerFailed on every rank where one could not start; and whatever the step raises.
    """
    profiler, marks = _prepared(trainer.device), _Marks(trainer.device)
    reduction = _noticed(trainer.configs.transformer, "finalize_model_grads_func", marks.reduction_begins)
    schedule = _noticed(trainer, "schedule", marks.schedule_begins)
    with schedule, reduction, _noticed(trainer.built.optimizer, "step", marks.optimizer_begins):
        profiler._start_trace()
        try:
            marks.begin()
            trainer.step(batches)
            host.after_step(step + 1)
            marks.end()
        finally:
            profiler.__exit__(None, None, None)
    return profiler, marks


def _prepared(device: torch.device) -> profile:
    """A profiler that is ready on every rank: no step may begin while another rank still starts its own (CUPTI)."""
    on_cuda = device.type == "cuda"
    profiler = profile(use_cpu=not on_cuda, use_device="cuda" if on_cuda else None, use_kineto=True)
    why = ""
    try:
        profiler._prepare_trace()
    except RuntimeError as error:  # kineto's own; the step has not run
        why = str(error)
    failed = torch.tensor([1 if why else 0], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(failed)
    if failed.item():
        raise ProfilerFailed(f"the profiler did not start: {why or 'on another rank'}")
    return profiler


@contextmanager
def _noticed(owner: Any, name: str, begins: Callable[[], None]) -> Iterator[None]:
    """Say when `owner.name` is called; what was its own attribute before is so again, a method is its class's."""
    real, own = getattr(owner, name), name in vars(owner)

    def called(*arguments: Any, **named: Any) -> Any:
        begins()
        return real(*arguments, **named)

    setattr(owner, name, called)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, real)
        else:
            delattr(owner, name)


def _alike(job: TrialJob) -> bool:
    """Whether ranks meet in the same collectives: stages of a pipeline send and receive in turns."""
    return job.world_size > 1 and job.candidate.layout.pipeline == 1


def _compared(profiler: profile, marks: _Marks, repeated: float, alike: bool) -> Profiled:
    """What was read, its collectives compared with those of the other ranks where these are `alike`.

    Collective then. Raises what `_read` raises.
    """
    if not alike:
        return _read(profiler, marks, repeated)
    profiled, fault = None, None
    try:
        profiled = _read(profiler, marks, repeated)
    except Exception as error:  # noqa: BLE001 - raised below: the other ranks must not wait for this one
        fault = error
    events = with_shortest(profiled.trace.events if profiled else None, marks.device)
    if profiled is None:
        raise fault or ProfilerFailed("nothing was read")
    return profiled._replace(trace=profiled.trace._replace(events=events))


def _read(profiler: profile, marks: _Marks, repeated: float = 1.0) -> Profiled:
    if profiler.kineto_results is None:
        raise ProfilerFailed("the profiler returned nothing")
    found = profiler.kineto_results.events()
    on_cuda = marks.device.type == "cuda"
    events, calls = _from_cuda(found, marks) if on_cuda else (_from_cpu(found, marks), Counter[str]())
    if not events:
        raise ProfilerFailed(f"the profiler saw no work of the step on the {marks.device.type}")
    step_us = (marks.ended_ns - marks.began_ns) / 1e3
    first = min(event.start_us for event in events)
    last = max(event.start_us + event.duration_us for event in events)
    if max(-first, last - step_us) > max(CLOCKS_APART * step_us, CLOCKS_APART_US):
        raise ProfilerFailed(
            f"the profiler's clock is apart: events from {first:.0f} to {last:.0f} us of {step_us:.0f}"
        )
    memory = PhaseMemory(forward_backward_bytes=marks.before_bytes, optimizer_bytes=marks.after_bytes)
    return Profiled(StepTrace(tuple(events), step_us, dict(calls), repeated), memory if on_cuda else None)


def _from_cuda(found: Iterable[Any], marks: _Marks) -> tuple[list[GpuEvent], Counter[str]]:
    """Kernels and copies, each with the phase of the CUDA call that launched it; the calls counted by name."""
    work: list[Any] = []
    launches: dict[int, tuple[int, int]] = {}
    calls = Counter[str]()
    for each in found:
        if each.device_type() == DeviceType.CUDA:
            if not each.is_user_annotation():
                work.append(each)
        elif (name := each.name()).startswith("cu"):  # cuda* of the runtime, cu* of the driver
            calls[name] += 1
            launches[each.correlation_id()] = each.start_ns(), each.device_resource_id()  # the calling thread
    main_thread = min(launches.values())[1] if launches else 0  # the step begins in it, with cleared gradients

    def phase(correlation: int) -> Phase:
        launch = launches.get(correlation)
        if launch is None:
            return "unknown"
        at_ns, thread = launch
        return marks.phase(at_ns) or ("forward" if thread == main_thread else "backward")

    return [_device_event(each, marks.began_ns, phase(each.correlation_id())) for each in work], calls


def _device_event(event: Any, began_ns: int, phase: Phase) -> GpuEvent:
    name, size_bytes = event.name(), 0
    kind: Kind = "kernel"
    if name.startswith(("Memcpy", "Memset")):
        kind = "memcpy" if name.startswith("Memcpy") else "memset"
        said = COPIED.search(event.metadata_json())
        size_bytes = int(said[1]) if said else 0
    start_us, duration_us = (event.start_ns() - began_ns) / 1e3, event.duration_ns() / 1e3
    return GpuEvent(name, start_us, duration_us, event.device_resource_id(), kind, phase, size_bytes)


def _from_cpu(found: Iterable[Any], marks: _Marks) -> list[GpuEvent]:
    """The working operators of each thread. gloo's collectives end in a thread of theirs: each spans its own time."""
    threads: dict[int, list[tuple[float, float, str]]] = {}
    backward: list[tuple[float, float]] = []
    for each in found:
        name, start_us = each.name(), (each.start_ns() - marks.began_ns) / 1e3
        end_us = start_us + each.duration_ns() / 1e3
        if name.startswith(BACKWARD):
            backward.append((start_us, end_us))
        elif OPERATOR.match(name):
            # Collectives may overlap each other, and operators do not nest in them.
            thread = -1 if name.startswith("gloo:") else each.start_thread_id()
            threads.setdefault(thread, []).append((start_us, end_us, name))
    behind = union(backward)
    starts = [start for start, _ in behind]

    def phase(at_us: float) -> Phase:
        if after := marks.phase(marks.began_ns + at_us * 1e3):
            return after
        index = bisect_right(starts, at_us) - 1
        return "backward" if index >= 0 and at_us < behind[index][1] else "forward"

    return [
        GpuEvent(name, start, end - start, thread, "kernel", phase(start))
        for thread, spans in threads.items()
        for start, end, name in (spans if thread == -1 else working(spans))
    ]
