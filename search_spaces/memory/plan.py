"""Bytes per GPU by part, for every pipeline stage of one candidate, before anything runs. Pure.

A stage's peak is the largest of three moments: the loss of the last stage (logits beside everything saved), the
backward pass of its heaviest layer (gradients beside everything saved), and the optimizer's step. The most loaded rank
of the most loaded stage decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from search_spaces.candidate import KnobValue, modules
from search_spaces.memory.activations import Saved, added, layer_of
from search_spaces.memory.chunks import Chunk, stages_of
from search_spaces.memory.graphs import Captured, held, moved
from search_spaces.memory.parameters import Parameters, stage_parameters
from search_spaces.memory.schedule import in_flight
from search_spaces.memory.setting import Loss, Setting, load_of, loss_of, setting_of
from search_spaces.memory.shape import Decoder, FactError, Grid, check_split, decoder_of, grid_of, padded_vocabulary
from search_spaces.memory.states import States, rates_of, states_of
from search_spaces.partial import UnknownFact
from search_spaces.rules.rule import Case

MIB = 2**20
# GEMM workspaces of torch and Transformer Engine and small tensors; grouped GEMMs have 4 of 32 MiB, one a stream. Above
# 18 B a parameter, rows of one H200 have 0.23 GiB grouped and 0.11 not (benchmarks/tables/h200_memory.jsonl).
WORKSPACE_BYTES, GROUPED_BYTES = 107 * MIB, 128 * MIB
# Outside torch's allocator: what NCCL takes on the device for one group of several ranks, and what more where tokens
# are exchanged (two H200s, NCCL 2.30.7: 0.23, then 1.5 and 0.9 GiB; with more peers not measured). Assumed, not
# measured: the buffers of DeepEP, HybridEP and NCCL-EP.
GROUP_BYTES, FLEX_BYTES = 192 * MIB, 1024 * MIB
EXCHANGE_BYTES = {"alltoall": 1536 * MIB, "allgather": 896 * MIB, "flex": FLEX_BYTES}
EXPERT_SPREAD = 0.5  # assumed, not measured: standard deviation over mean of one expert's load under natural routing
Moment = Literal["loss", "backward", "forward", "optimizer"]


class Activity(NamedTuple):
    """What one stage's micro-batches do to memory, in bytes. `captured`: what CUDA graphs hold beyond eager steps.
    `logits`: of the last stage in the compute type, else 0. `recomputed`: what one layer drops and brings back right
    after the loss, less what the worst moment needs beyond the loss. `narrowed`: what FP8 or FP4 takes off `saved`.
    `pooled`: what of `saved` is in the graphs' pool."""

    saved: Saved
    transient: int
    moment: Moment
    captured: int
    logits: int
    recomputed: int
    narrowed: int
    pooled: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline rank, in bytes. `expert_matrix`: elements of one expert's second matrix, 0 without experts."""

    stage: int
    parameters: Parameters
    states: States
    active: Activity
    workspace: int
    communication: int  # on the device, not in torch's figures
    expert_matrix: int
    moe_layers: int
    exchanged: bool  # tokens go to experts of other ranks, more to one step's and fewer to the next

    @property
    def activations(self) -> int:
        """What the moment that decides has of activations; none while the optimizer steps."""
        kept = 0 if self.active.moment == "optimizer" else self.active.saved.total
        return kept + self.active.transient

    @property
    def total(self) -> int:
        """Predicted peak of allocated bytes in eager steps. Graphs are captured after some, so they need this too."""
        return self.states.resident + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every stage, and the assumption about routing: `load` is the most loaded expert rank over the mean."""

    stages: tuple[StagePlan, ...]
    load: float
    forced: bool

    @property
    def worst(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.total)


def plan_of(case: Case, load: float | None = None) -> MemoryPlan:
    """The plan of one candidate. `load` None: by the job's routing (forced is balanced, natural is assumed).

    Raises FactError naming the first fact that is missing or makes no sense.
    """
    knobs = case.knobs
    decoder = _decoder(case)
    grid = grid_of(knobs, case.world, case.on_cpu)
    check_split(decoder, grid)
    length, fp32, sgd, forced = _job(case)
    found = load if load is not None else load_of(knobs, decoder, grid, forced, EXPERT_SPREAD)
    setting = setting_of(knobs, decoder, grid, length, fp32, found)
    microbatches = _microbatches(case, grid)
    group = knobs.get("microbatch_group_size_per_vp_stage")
    overlapped = bool(knobs.get("overlap_moe_expert_parallel_comm"))
    captured = _captured(knobs)
    rates = rates_of(knobs, grid, fp32, sgd)
    loss = loss_of(knobs, setting.element)
    workspace = WORKSPACE_BYTES + (GROUPED_BYTES if setting.grouped else 0)
    communication = _communication(knobs, grid)
    expert_matrix = decoder.hidden * decoder.expert_width // grid.expert_tensor
    plans = []
    for stage, chunks in enumerate(stages_of(decoder, grid, knobs)):
        alive = in_flight(grid.pipeline, stage, len(chunks), microbatches, int(group or grid.pipeline), overlapped)
        held = stage_parameters(decoder, grid, chunks)
        moe_layers = sum(chunk.moe + chunk.mtp for chunk in chunks)
        active = _activations(decoder, grid, setting, loss, chunks, alive, captured)
        states = states_of(rates, held, expert_matrix)
        if states.step > active.saved.total + active.transient:
            active = active._replace(transient=states.step, moment="optimizer")
        plans.append(
            StagePlan(stage, held, states, active, workspace, communication, expert_matrix, moe_layers, grid.expert > 1)
        )
    return MemoryPlan(tuple(plans), found, forced)


@lru_cache(maxsize=65536)
def _activations(
    decoder: Decoder, grid: Grid, setting: Setting, loss: Loss, chunks: tuple[Chunk, ...], alive: tuple[int, ...],
    captured: frozenset[str],
) -> Activity:  # fmt: skip
    """Kept by all micro-batches in flight; beside it at the worst moment."""
    saved, pooled, narrowed, backward, forward, recomputed = Saved(), 0, 0, 0, 0, 0
    layers_alive = moe_layers = 0
    plain = setting._replace(recompute=frozenset()) if setting.block >= 0 else setting
    for (moe, kept), (checkpoints, layers, longest) in _counts(setting, chunks, alive).items():
        layer = layer_of(decoder, grid, setting if kept else plain, moe)
        saved = added(saved, layer.saved, checkpoints)
        layers_alive, moe_layers = layers_alive + layers, moe_layers + moe * layers
        pooled += moved(layer.saved, captured, layers) if captured else 0
        narrowed += checkpoints * layer.narrowed
        backward = max(backward, layer.backward + (longest - 1) * layer.whole.total)
        forward = max(forward, layer.forward)
        recomputed = max(recomputed, layer.whole.total - layer.saved.total)
    if setting.offload and saved.total:  # the last layer's activations are wanted back at once, so they stay
        saved = added(saved, _not_offloaded(decoder, grid, setting, chunks[-1].moe > 0), 1)
    moments: list[tuple[int, Moment]] = [(backward, "backward"), (forward, "forward")]
    logits = after = 0
    if chunks[-1].last:
        loss_bytes = _loss(decoder, grid, setting, loss, chunks[-1])
        moments.append((loss_bytes, "loss"))
        rows = padded_vocabulary(decoder.vocabulary, grid.tensor) // grid.tensor
        logits = setting.tokens * rows * setting.element
        if not 0 <= setting.block < chunks[-1].layers:  # else the first layer to go backward dropped nothing
            after = max(recomputed - max(max(moments)[0] - loss_bytes, 0), 0)
    transient, moment = max(moments)
    pool = held(decoder, grid, setting, Captured(captured, layers_alive, moe_layers), backward) if captured else 0
    return Activity(saved, transient, moment, pool, logits, after, narrowed, pooled)


def _counts(
    setting: Setting, chunks: tuple[Chunk, ...], alive: tuple[int, ...]
) -> dict[tuple[bool, bool], tuple[int, int, int]]:
    """By (MoE layer, under the recompute setting): checkpoints alive, layers alive, layers of the longest checkpoint.

    Uniform recompute has one checkpoint for `span` layers; block recompute leaves all but a chunk's first layers alone.
    """
    found: dict[tuple[bool, bool], tuple[int, int, int]] = {}
    for chunk, count in zip(chunks, alive, strict=True):
        left = setting.block
        for moe, number in ((False, chunk.dense), (True, chunk.moe + chunk.mtp)):
            kept = number if setting.block < 0 else min(left, number)
            left -= kept
            for under, layers in ((True, kept), (False, number - kept)):
                if not layers:
                    continue
                span = min(setting.span, layers) if under else 1
                one, two, three = found.get((moe, under), (0, 0, 0))
                found[moe, under] = (one + count * -(-layers // span), two + count * layers, max(three, span))
    return found


def _not_offloaded(decoder: Decoder, grid: Grid, setting: Setting, moe: bool) -> Saved:
    stays = layer_of(decoder, grid, setting._replace(offload=frozenset()), moe).saved
    gone = layer_of(decoder, grid, setting, moe).saved
    return Saved(*(max(one - other, 0) for one, other in zip(stays, gone, strict=True)))


def _loss(decoder: Decoder, grid: Grid, setting: Setting, loss: Loss, chunk: Chunk) -> int:
    """Logits and cross entropy over this rank's part of the vocabulary, and the final norm's input and output.

    In the backward pass the output layer's weight gradient (bf16, unless added in the GEMM) stands beside them.
    """
    rows = padded_vocabulary(decoder.vocabulary, grid.tensor) // grid.tensor
    logits = setting.tokens * rows * (1 + chunk.mtp)
    matrix = 0 if setting.wgrad_fused else rows * decoder.hidden * setting.element
    ends = 2 * setting.split * decoder.hidden * setting.element
    return ends + max(logits * loss.forward, logits * loss.backward, logits * setting.element + matrix)


def _communication(knobs: Mapping[str, KnobValue], grid: Grid) -> int:
    """Buffers of communicators on the device: one for each kind of group that has several ranks."""
    sizes = (grid.tensor, grid.context, grid.pipeline, grid.expert, grid.expert_tensor, grid.data, grid.expert_data)
    found = GROUP_BYTES * sum(size > 1 for size in sizes)
    sent = str(knobs.get("moe_token_dispatcher_type") or "allgather")
    return found + (EXCHANGE_BYTES.get(sent, 0) if grid.expert > 1 or sent == "flex" else 0)  # `check` names a word


def _captured(knobs: Mapping[str, KnobValue]) -> frozenset[str]:
    """The modules that CUDA graphs capture; {} without graphs, {"all"} where whole layers or iterations are."""
    if (knobs.get("cuda_graph_impl") or "none") == "none":
        return frozenset()
    return frozenset(modules(knobs.get("cuda_graph_modules"))) or frozenset({"all"})


def _microbatches(case: Case, grid: Grid) -> int:
    """Micro-batches of a step. Without a pipeline one is in flight however many there are, so it may be unsaid."""
    try:
        count = case.microbatches
    except UnknownFact as missing:
        if grid.pipeline == 1:
            return 2
        name = str(missing.args[0])
        raise FactError(name, f"{name} is missing, and a pipeline's plan needs it") from missing
    if count < 1:
        size, batch, ranks = case.integer("micro_batch_size", 1), case.training.global_batch_size, case.data_parallel
        what = f"global_batch_size {batch} does not divide into micro-batches of {size} on {ranks} data-parallel ranks"
        raise FactError("global_batch_size", what)
    return count


def _job(case: Case) -> tuple[int, bool, bool, bool]:
    """(sequence length, whether parameters are fp32, whether the optimizer is SGD, whether routing is forced)."""
    training = case.training
    try:
        length = training.sequence_length
    except UnknownFact as missing:
        raise FactError("seq_length", "seq_length is missing, and the plan needs it") from missing
    if length < 1:
        raise FactError("seq_length", f"seq_length {length} must be at least 1")
    forced = training.routing == "forced" or bool(case.knobs.get("moe_router_force_load_balancing"))
    sgd = (case.text("optimizer") or training.optimizer) == "sgd"
    return length, training.params_dtype == "fp32", sgd, forced


_DECODERS: dict[int, tuple[object, bool, Decoder]] = {}


def _decoder(case: Case) -> Decoder:
    """`decoder_of`, once a model object: reading its fields costs more than the rest of a plan."""
    gate = bool(case.knobs.get("moe_shared_expert_gate"))
    known = _DECODERS.get(id(case.model))
    if known is not None and known[0] is case.model and known[1] == gate:
        return known[2]
    found = decoder_of(case.model, case.knobs)
    if len(_DECODERS) > 256:
        _DECODERS.clear()
    _DECODERS[id(case.model)] = (case.model, gate, found)
    return found
