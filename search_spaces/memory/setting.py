"""What of a candidate's knobs decides bytes: read once, as plain numbers that caches can hash."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from search_spaces.candidate import KnobValue, modules
from search_spaces.memory.shape import Decoder, FactError, Grid

SCALES = 1 + 4 / 128  # an FP8 value and its share of the scale: one fp32 a block of 128 (blockwise); others have fewer
FP4_BYTES = 0.5 + 1 / 16  # NVFP4: one scale a block of 16
RECEIVE = "moe_expert_rank_capacity_factor"  # size of the receive buffer over the mean load of a rank
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "uint8": 1}  # of optimizer dtype knobs, "torch." left out


class Setting(NamedTuple):
    """Sizes in tokens, bytes of one element, and switches.

    `tokens` a micro-batch has on a rank inside attention; `split` of them where sequence parallelism splits (norms,
    residuals, router); `routed` arrive at the experts of the most loaded rank. `saved` are the bytes of one element
    that a linear layer keeps for its backward pass: 2 in bf16, about 1 in FP8.
    """

    tokens: int
    split: int
    routed: int
    element: int
    saved: float
    quantized: bool
    recompute: frozenset[str]  # modules; {"full"} for whole layers
    span: int  # layers one checkpoint spans (full, uniform)
    block: int  # layers of a chunk that are checkpointed (full, block); -1: all
    offload: frozenset[str]
    offload_fraction: float
    act_fused: bool
    grouped: bool
    wgrad_fused: bool
    gathered: int  # tokens that the allgather dispatcher holds at once; 0: another dispatcher
    permutes: bool  # the dispatcher permutes tokens before it sends them: all-to-all
    length: int  # of a sequence, in tokens


class Loss(NamedTuple):
    """Bytes of logits and loss for one element of the vocabulary and one token."""

    forward: int
    backward: int


def loss_of(knobs: Mapping[str, KnobValue], element: int) -> Loss:
    """Logits and what the cross entropy keeps beside them.

    Unfused and "native": an fp32 softmax beside the logits, and in the backward pass beside their gradient
    (core/tensor_parallel/cross_entropy.py:24, core/fusions/fused_cross_entropy.py). "te": a copy of the logits that
    becomes the gradient (transformer_engine/pytorch/triton/cross_entropy.py:40, 2.20.2).
    """
    if knobs.get("cross_entropy_loss_fusion") and knobs.get("cross_entropy_fusion_impl") == "te":
        return Loss(2 * element, element)
    return Loss(element + 4, element + 4)


def load_of(knobs: Mapping[str, KnobValue], decoder: Decoder, grid: Grid, forced: bool, spread: float) -> float:
    """Most loaded expert rank over the mean. `spread`: standard deviation over mean of one expert's load.

    One rank that holds every expert has exactly the mean. Of EP ranks with E / EP experts each, the largest of EP
    normal draws lies about sqrt(2 ln EP) deviations up; never more than all tokens choosing that rank. A capacity caps
    it (`moe_expert_capacity_factor`); padding to it makes it exact. Raises FactError for a receive buffer of no size.
    """
    capacity = knobs.get("moe_expert_capacity_factor")
    if capacity is not None and knobs.get("moe_pad_expert_input_to_capacity"):
        return float(capacity)
    receive = knobs.get(RECEIVE)
    if receive is not None:
        if float(receive) <= 0:
            raise FactError(RECEIVE, f"{RECEIVE} {receive} must be above 0")
        return float(receive)  # the receive buffer has one size, whatever arrives
    if forced or grid.expert == 1 or not decoder.experts:
        return 1.0
    local = decoder.experts // grid.expert
    most = grid.expert * min(decoder.topk, local) / decoder.topk
    load = min(most, 1 + spread / math.sqrt(local) * math.sqrt(2 * math.log(grid.expert)))
    return min(load, float(capacity)) if capacity is not None else load


def setting_of(
    knobs: Mapping[str, KnobValue], decoder: Decoder, grid: Grid, sequence_length: int, fp32: bool, load: float
) -> Setting:
    """Raises FactError for a micro-batch or sequence that makes no sense."""
    micro = knobs.get("micro_batch_size")
    size = 1 if micro is None else int(micro)
    if size < 1:
        raise FactError("micro_batch_size", f"micro_batch_size {size} must be at least 1")
    tokens = size * sequence_length // grid.context
    split = tokens // grid.tensor if grid.sequence else tokens
    routed = int(split * grid.expert_tensor * decoder.topk * load)
    quantized = bool(knobs.get("fp8") or knobs.get("fp4"))
    element = 4 if fp32 else 2
    offload = bool(knobs.get("fine_grained_activation_offloading"))
    fraction = knobs.get("activation_offload_fraction")
    dispatcher = knobs.get("moe_token_dispatcher_type") or "allgather"
    full, blocks = knobs.get("recompute_granularity") == "full", knobs.get("recompute_method") == "block"
    count = int(knobs.get("recompute_num_layers") or 1)
    return Setting(
        tokens=tokens,
        split=split,
        routed=routed,
        element=element,
        saved=(FP4_BYTES if knobs.get("fp4") else SCALES) if quantized else element,
        quantized=quantized,
        recompute=recomputed(knobs),
        span=count if full and not blocks else 1,
        block=count if full and blocks else -1,
        offload=frozenset(modules(knobs.get("offload_modules"))) if offload else frozenset(),
        offload_fraction=1.0 if fraction is None else float(fraction),
        act_fused=bool(knobs.get("bias_activation_fusion") or knobs.get("use_transformer_engine_op_fuser")),
        grouped=bool(knobs.get("moe_grouped_gemm")),
        wgrad_fused=bool(knobs.get("gradient_accumulation_fusion")),
        gathered=split * grid.expert_tensor * grid.expert if dispatcher == "allgather" else 0,
        permutes=dispatcher == "alltoall",
        length=sequence_length,
    )


@lru_cache(maxsize=1024)
def _module_set(text: KnobValue) -> frozenset[str]:
    return frozenset(modules(text)) or frozenset({"core_attn"})


def recomputed(knobs: Mapping[str, KnobValue]) -> frozenset[str]:
    """Modules whose activations are recomputed; {"full"} for whole layers. Selective's default is core_attn."""
    granularity = knobs.get("recompute_granularity")
    if granularity == "full":
        return frozenset({"full"})
    return _module_set(knobs.get("recompute_modules")) if granularity == "selective" else frozenset()
