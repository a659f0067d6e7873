"""Where one step's time went, and which wall it stands at: memory, communication, host or compute. Pure.

The method is the Three Walls workflow of NVIDIA's MoE optimization guide ("profile the dominant bottleneck"). It gives
no numbers for what is dominant; the thresholds here are ours and stand by name below.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from pydantic import Field

from search_spaces.shapes import Noun
from train_worker.kernels import Category, GpuEvent, StepTrace, intersect, length, subtract, union

Wall = Literal["memory", "communication", "host", "compute"]

MEMORY_SHARE = 0.90  # of the card in use: no room for a larger micro-batch or graph pools (2 to 13 GiB, measured)
HOST_SHARE = 0.25  # of the step in which the GPU does nothing
COMMUNICATION_SHARE = 0.10  # of the step, exposed; the published EP overlap brings it under 5% from 30 to 40%
ONCE = ("reduction", "optimizer")  # phases that a step has once, however many micro-batches it has
TOP = 10
NAME_LIMIT = 120

# Wall -> settings that the two guides name as its first fixes, in Megatron-Core's field names, in the guides' order:
# "MoE Training Optimization Workflow" (phase 1 for memory, the table of phase 3 and "Dispatcher And Overlap Guidance"
# for the others) and "MoE Expert-Parallel Overlap Skill" (overlap first, delayed wgrad once that works). One is ours:
# experts computed one by one are the most launches of all (4,224 ms a step against 415 ms and less, on one H200).
LARGER = "larger"  # than now
SUGGESTED: dict[Wall, tuple[str, ...]] = {
    "memory": (
        "recompute_granularity=selective",
        "recompute_modules",
        "fp8_recipe",
        "fine_grained_activation_offloading",
        "optimizer_cpu_offload",
        "pipeline_model_parallel_layout",
    ),
    "communication": (
        "moe_token_dispatcher_type=flex",
        "moe_flex_dispatcher_backend",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "overlap_grad_reduce",
        "tp_comm_overlap",
        "pipeline_model_parallel_layout",
    ),
    "host": (
        "moe_grouped_gemm=True",
        "cuda_graph_impl=transformer_engine",
        "cuda_graph_modules=attn+moe_router+moe_preprocess",
        "manual_gc",
        "micro_batch_size=larger",
        "cpu_affinity",
    ),
    "compute": (
        "moe_grouped_gemm=True",
        "NVTE_USE_CUTLASS_GROUPED_GEMM=1",
        "moe_permute_fusion",
        "moe_router_fusion",
        "fp8_recipe",
        "moe_token_dispatcher_type",
    ),
}

# What buys memory with time, switched off: comes first where memory is no wall; the first list above then not at all.
GIVEN_BACK = ("recompute_granularity=None", "fine_grained_activation_offloading=False", "optimizer_cpu_offload=False")


class KernelTotal(Noun):
    """One kernel's share of a step; `name` is cut to 120 characters, `seconds` summed over its `count` runs."""

    name: str
    category: Category
    count: int
    seconds: float


class PhaseMemory(Noun):
    """Peaks of allocated bytes on this rank. The pipeline's schedule mixes forward and backward: they are one phase."""

    forward_backward_bytes: int
    optimizer_bytes: int


class DeviceMemory(Noun):
    """Of the card, while the trial was measured; the largest over the ranks. `retries`: the allocator ran out, freed
    its cache and tried again, which stalls a step."""

    used_bytes: int
    total_bytes: int
    retries: int


class StepProfile(Noun):
    """One step of rank 0, profiled after the measured ones. Seconds.

    compute_s + exposed_communication_s + exposed_copy_s + exposed_host_s = step_time_s where the GPU was idle at all.
    On a CPU the operators of torch stand for kernels and idle time is Python's.
    """

    step_time_s: float = Field(description="median of the measured steps: profiling itself slows the host")
    profiled_step_time_s: float
    repeated: float = Field(
        1.0,
        description="micro-batches of a step for each one profiled: a slow step is profiled with fewer, and all but "
        "its reduction and optimizer counted so often; profiled_step_time_s is as it was",
    )
    gpu_busy_s: float = Field(description="union of all kernels and copies over all streams")
    compute_s: float = Field(description="union of the kernels that do not communicate")
    exposed_communication_s: float = Field(
        description="communication under which nothing is computed; with the wait for peers"
    )
    waiting_s: float | None = Field(
        None,
        description="of exposed_communication_s, in which this rank waits for a peer to arrive and nothing is sent; "
        "None: not known, since the ranks communicated differently",
    )
    hidden_communication_s: float
    exposed_copy_s: float = Field(description="copies under which nothing is computed or communicated")
    exposed_host_s: float = Field(description="step time less gpu_busy_s: the GPU waits for the host")
    categories_s: dict[Category, float] = Field(
        description="union of each category's intervals; streams overlap, so that their sum is gpu_busy_s or more"
    )
    kernel_count: int
    launches: dict[str, int] = Field(description="CUDA calls of the host by name that launch or wait; none on a CPU")
    top_kernels: tuple[KernelTotal, ...]
    memory: PhaseMemory | None = None
    device_memory: DeviceMemory | None = None
    wall: Wall
    why: str
    suggested: tuple[str, ...] = Field(
        description="settings to try against this wall (SUGGESTED); none on a CPU, the guides are about GPUs"
    )


def profile_of(
    trace: StepTrace,
    step_time_s: float,
    device: Literal["cpu", "cuda"],
    memory: PhaseMemory | None = None,
    device_memory: DeviceMemory | None = None,
) -> StepProfile:
    """`step_time_s` is that of the measured steps. O(n log n) in the events of the trace."""
    once = [event for event in trace.events if event.phase in ONCE and trace.repeated != 1]
    often = [event for event in trace.events if event.phase not in ONCE or trace.repeated == 1]
    spent = _spent(once).and_often(_spent(often), trace.repeated)
    busy_s, exposed_s = spent.seconds["gpu_busy_s"], spent.seconds["exposed_communication_s"]
    waiting_s = spent.seconds["waiting_s"] if _shared(trace.events) else None
    wall, why = judged(step_time_s, busy_s, exposed_s, device, device_memory, waiting_s)
    return StepProfile(
        step_time_s=step_time_s,
        profiled_step_time_s=trace.step_time_us / 1e6,
        repeated=trace.repeated,
        **{name: seconds for name, seconds in spent.seconds.items() if name != "waiting_s"},
        waiting_s=waiting_s,
        exposed_host_s=max(step_time_s - busy_s, 0.0),
        categories_s=spent.categories_s,
        kernel_count=round(spent.kernels),
        launches={
            name: round(count * trace.repeated) for name, count in sorted(trace.host_calls.items()) if _telling(name)
        },
        top_kernels=top_kernels(trace.events, trace.repeated),
        memory=memory,
        device_memory=device_memory,
        wall=wall,
        why=why,
        suggested=SUGGESTED[wall] if device == "cuda" else (),
    )


class _Spent(NamedTuple):
    """What some events of a step are in sum: `seconds` by field of StepProfile, each a union over the streams."""

    seconds: dict[str, float]
    categories_s: dict[Category, float]
    kernels: float

    def and_often(self, other: "_Spent", times: float) -> "_Spent":
        """With `times` times the other."""
        names = {*self.categories_s, *other.categories_s}
        return _Spent(
            {name: value + times * other.seconds[name] for name, value in self.seconds.items()},
            {n: self.categories_s.get(n, 0.0) + times * other.categories_s.get(n, 0.0) for n in sorted(names)},
            self.kernels + times * other.kernels,
        )


def _spent(events: Iterable[GpuEvent]) -> _Spent:
    groups: dict[Category, list[GpuEvent]] = defaultdict(list)
    for event in events:
        groups[event.category].append(event)
    unions = {category: union(event.interval for event in each) for category, each in groups.items()}
    communication, copies = unions.get("communication", []), unions.get("memcpy", [])
    compute = union(span for name, spans in unions.items() if name not in ("communication", "memcpy") for span in spans)
    working = union([*compute, *communication])
    transfers = union(event.transfer for event in groups.get("communication", ()))
    return _Spent(
        {
            "gpu_busy_s": length(union([*working, *copies])) / 1e6,
            "compute_s": length(compute) / 1e6,
            "exposed_communication_s": length(subtract(communication, compute)) / 1e6,
            "waiting_s": length(subtract(communication, union([*compute, *transfers]))) / 1e6,
            "hidden_communication_s": length(intersect(communication, compute)) / 1e6,
            "exposed_copy_s": length(subtract(copies, working)) / 1e6,
        },
        {category: length(spans) / 1e6 for category, spans in unions.items()},
        sum(event.kind == "kernel" for each in groups.values() for event in each),
    )


def _shared(events: Iterable[GpuEvent]) -> bool:
    """Whether the runs of all collectives on the other ranks are known, and there is any."""
    known = [event.shortest_us is not None for event in events if event.category == "communication"]
    return bool(known) and all(known)


def judged(
    step_s: float,
    busy_s: float,
    exposed_s: float,
    device: Literal["cpu", "cuda"],
    memory: DeviceMemory | None,
    waiting_s: float | None = None,
) -> tuple[Wall, str]:
    """The wall, and the numbers that decide. Memory comes first, as in the workflow: fit, then scale, then profile.

    A GPU that waits for a peer sends nothing: a better dispatcher or overlap would not help it. It counts as idle.
    A CPU has no idle device to see: there it is communication or compute.
    """
    if memory is not None and (full := _full(memory)):
        return "memory", full
    waiting = (waiting_s or 0.0) / step_s
    idle, exposed = max(step_s - busy_s, 0.0) / step_s, exposed_s / step_s - waiting
    told = f"exposed communication {exposed:.0%} of a {step_s * 1e3:.4g} ms step"
    if waiting_s is not None:
        told = f"waiting for other ranks {waiting:.0%}, {told}"
    neither = "that is no wall"
    if device == "cuda":
        told, neither = f"GPU idle {idle:.0%}, {told}", "neither is a wall"
        if idle + waiting > HOST_SHARE and idle + waiting > exposed:
            return "host", f"{told}: idle more than {HOST_SHARE:.0%} and more than communication"
    if exposed > COMMUNICATION_SHARE:
        return "communication", f"{told}: communication more than {COMMUNICATION_SHARE:.0%}"
    return "compute", f"{told}: {neither}"


def _full(memory: DeviceMemory) -> str:
    """Why memory is the wall; empty where it is not."""
    share = memory.used_bytes / memory.total_bytes
    if memory.retries:
        return f"the allocator ran out and retried {memory.retries} times; {share:.0%} of the card is in use"
    return f"{share:.0%} of the card is in use, more than {MEMORY_SHARE:.0%}" if share > MEMORY_SHARE else ""


def top_kernels(events: Iterable[GpuEvent], repeated: float = 1.0, count: int = TOP) -> tuple[KernelTotal, ...]:
    """Those that took the most time, the longest first. `repeated`: as of a StepTrace."""
    seconds, runs = defaultdict[str, float](float), defaultdict[str, float](float)
    categories: dict[str, Category] = {}
    for event in events:
        name = event.name
        times = 1 if event.phase in ONCE else repeated
        seconds[name] += times * event.duration_us / 1e6
        runs[name] += times
        categories.setdefault(name, event.category)
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))[:count]
    return tuple(
        KernelTotal(name=name[:NAME_LIMIT], category=categories[name], count=round(runs[name]), seconds=seconds[name])
        for name in longest
    )


def _telling(name: str) -> bool:
    return any(word in name for word in ("Launch", "Memcpy", "Malloc", "Free", "Synchronize"))
