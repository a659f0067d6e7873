"""What one rank saw of one step, as numbers: filled by `train_worker.megatron.observe`, judged by `evidence_checks`."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from search_spaces.shapes import Noun
from train_worker.kernels import StepTrace, intersect, length, union

IN_GRAPH = "inside a replayed CUDA graph, where no call is seen"
SHARES_NOTHING = "no group of more than one rank shares these parameters"
NO_MOE, NO_LAYER = "no MoE layer on this rank", "no layer on this rank"
ALL_IN_BF16 = "every layer on this rank stays in bf16 as asked"
NO_STATE = "no optimizer on this rank"
NOT_HERE = (NO_MOE, NO_LAYER, ALL_IN_BF16, NO_STATE)  # said by a rank that has nothing of what a knob is about


class Seen(NamedTuple):
    """What was seen, with the numbers, and whether that is the knob at work (None: cannot be told)."""

    seen: str
    active: bool | None


class Calls(Noun):
    """Calls of one part of the layers in the observed step, summed over the layers of a rank."""

    forward: int = Field(description="in the forward passes")
    again: int = Field(description="inside the backward passes: recomputed")


class Sent(Noun):
    """Collectives of the data-parallel buckets, of groups with more than one rank."""

    early: int = Field(description="asynchronous and started before their result was waited for")
    late: int = Field(description="all others")


class OptimizerState(Noun):
    """Where the optimizer keeps its state, and how."""

    classes: tuple[str, ...]
    dtypes: dict[str, tuple[str, ...]] = Field(description='state name ("exp_avg", ...) -> dtypes seen')
    host_bytes: int
    device_bytes: int


class Kernel(Noun):
    """All launches of one kernel in the profiled step."""

    name: str
    count: int


class Kernels(Noun):
    """The profiled step on one GPU."""

    kernels: tuple[Kernel, ...]
    communication_s: float = Field(description="union of the intervals of communication kernels")
    hidden_communication_s: float = Field(description="the part of it during which other kernels computed")
    graph_launches: int
    to_host_bytes: int
    to_device_bytes: int


def kernels_of(trace: StepTrace) -> Kernels:
    """The kernels of a profiled step by name, in no order, and what its intervals and copies add up to."""
    kernels = [event for event in trace.events if event.kind == "kernel"]
    sent = union(event.interval for event in kernels if event.category == "communication")
    computed = union(event.interval for event in kernels if event.category != "communication")
    copies = [event for event in trace.events if event.kind == "memcpy"]
    return Kernels(
        kernels=tuple(Kernel(name=name, count=count) for name, count in Counter(each.name for each in kernels).items()),
        communication_s=length(sent) / 1e6,
        hidden_communication_s=length(intersect(sent, computed)) / 1e6,
        graph_launches=sum(count for name, count in trace.host_calls.items() if "GraphLaunch" in name),
        to_host_bytes=sum(each.size_bytes for each in copies if "DtoH" in each.name),
        to_device_bytes=sum(each.size_bytes for each in copies if "HtoD" in each.name),
    )


class Observed(Noun):
    """One rank's observed step. Counts are of that step; nothing in it is a rate or a guess."""

    device: Literal["cpu", "cuda"]
    first_step: bool = Field(description="no step ran before it, so that Megatron had not learnt its buckets' order")
    micro_batches: int
    layers: int
    moe_layers: int
    low_precision_layers: int = Field(description="not kept in bf16 by first_last_layers_bf16")
    last_stage: bool = Field(description="this rank computes the loss")
    captured: tuple[str, ...] = Field(description='graph modules replayed; ("full_iteration",) for the whole step')
    graphs_captured: int
    graphs_replayed: int
    dispatched: dict[str, int] = Field(description='"alltoall", "flex/deepep", ... -> calls of token_dispatch')
    experts: dict[str, int] = Field(description="class of the experts -> forward calls")
    parts: dict[str, Calls]
    part_sizes: dict[str, int] = Field(description="part -> how many of it this rank has")
    fused: dict[str, int] = Field(description="knob -> calls of its fused functions")
    reductions: Sent
    gathers: Sent
    planned_layers: int = Field(description="layers run by schedule plans (combined 1F1B), forward or backward or both")
    paired_layers: int = Field(description="those of one micro-batch forward with those of another backward")
    delayed_wgrads: int = Field(description="weight-gradient GEMMs taken from Transformer Engine's store")
    shared_overlapped: int = Field(description="shared-expert outputs fetched by a dispatcher")
    offloaded_bytes: dict[str, int] = Field(description="offload group -> bytes copied to the host")
    optimizer: OptimizerState
    precisions: dict[str, int] = Field(description='"hybrid/blockwise" -> modules whose last forward ran so')
    quantized_parameters: dict[str, int] = Field(description="class -> weights kept in FP8 or FP4")
    fused_gradients: int = Field(description="weights whose GEMM added its gradient up itself")
    kernels: Kernels | None = Field(None, description="None before the profiled step, and on a CPU")

    def hidden(self, *modules: str) -> bool:
        """Whether replayed graphs hold one of these modules: its Python code does not run, so no call proves less."""
        return any(module in self.captured for module in (*modules, "full_iteration"))


def told(counts: Mapping[str, int], what: str) -> str:
    """ "alltoall: 8 calls, flex: 2 calls"."""
    return ", ".join(f"{name}: {count} {what}" for name, count in sorted(counts.items())) or f"no {what}"
