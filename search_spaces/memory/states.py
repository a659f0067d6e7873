"""Weights, gradients and optimizer state of one rank, in bytes: what lives from step to step.

A parameter costs 2 B of weight, 4 B of main gradient and 12 B of fp32 main weight and Adam moments in bf16 training;
the distributed optimizer splits the 12 over the ranks that hold the same weight (facts: 6 + 12/D).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from search_spaces.candidate import KnobValue
from search_spaces.memory.parameters import Parameters
from search_spaces.memory.setting import BYTES, FP4_BYTES, SCALES
from search_spaces.memory.shape import FactError, Grid


class Rates(NamedTuple):
    """Bytes a parameter, on each of the ranks that share it."""

    weight: float
    copies: float  # FP8 or FP4 copies, of weights of quantized linear layers only
    gradient: float
    optimizer: float
    step: float  # only while the optimizer steps: an fp32 gradient where gradients are bf16


class StateRates(NamedTuple):
    """By kind of parameter: `dense` is shared over DP x CP, `experts` over their own data-parallel ranks."""

    dense: Rates
    experts: Rates


class States(NamedTuple):
    """Bytes of one rank. `step` lives only while the optimizer steps."""

    dense_weights: int
    expert_weights: int
    quantized_copies: int
    gradients: int
    optimizer: int
    step: int

    @property
    def weights(self) -> int:
        return self.dense_weights + self.expert_weights + self.quantized_copies

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer


def rates_of(knobs: Mapping[str, KnobValue], grid: Grid, fp32: bool, sgd: bool) -> StateRates:
    """Bytes a parameter under the knobs."""
    return StateRates(_rates(knobs, fp32, sgd, grid.data), _rates(knobs, fp32, sgd, grid.expert_data))


MIB = 2**20


@lru_cache(maxsize=65536)
def states_of(rates: StateRates, found: Parameters, expert_matrix: int) -> States:
    """Bytes of one rank with these parameters. `expert_matrix`: elements of an expert's fc2; its fc1 has twice as many.

    Each state of each expert is a tensor of its own.
    """
    dense, experts = found.dense, found.experts
    one, other = rates
    padding = _padding(4 * expert_matrix) + _padding(8 * expert_matrix)
    padded = padding * experts / (3 * expert_matrix) * (other.optimizer / 4) if expert_matrix else 0
    return States(
        dense_weights=round(dense * one.weight),
        expert_weights=round(experts * other.weight),
        quantized_copies=round(found.quantized_dense * one.copies + experts * other.copies),
        gradients=round(dense * one.gradient + experts * other.gradient),
        optimizer=round(dense * one.optimizer + experts * other.optimizer + padded),
        step=round(dense * one.step + experts * other.step),
    )


def _padding(size: int) -> int:
    """What torch's allocator adds to a tensor: from 10 MiB on a segment is a multiple of 2 MiB, and a rest of up to
    1 MiB is not split off (c10/cuda/CUDACachingAllocator.cpp `should_split`, `get_allocation_size`)."""
    rest = -size % (2 * MIB)
    return rest if size >= 10 * MIB and rest <= MIB else 0


def _rates(knobs: Mapping[str, KnobValue], fp32: bool, sgd: bool, ranks: int) -> Rates:
    sharded = ranks if knobs.get("use_distributed_optimizer") else 1
    strategy = str(knobs.get("data_parallel_sharding_strategy") or "no_shard")
    fsdp = bool(knobs.get("use_megatron_fsdp"))
    if fsdp and strategy != "no_shard":
        sharded = ranks
    weights = ranks if fsdp and strategy == "optim_grads_params" else 1
    gradients = ranks if fsdp and strategy in ("optim_grads", "optim_grads_params") else 1
    weight, copies = _weight_bytes(knobs, fp32)
    in_fp32 = fp32 or knobs.get("grad_reduce_in_fp32") is not False
    optimizer = _optimizer_bytes(knobs, fp32, sgd)
    left = 1.0
    if knobs.get("optimizer_cpu_offload"):
        fraction = knobs.get("optimizer_offload_fraction")
        left -= 1.0 if fraction is None else float(fraction)
    return Rates(
        weight=weight / weights,
        copies=copies,
        gradient=(4 if in_fp32 else 2) / gradients,
        optimizer=optimizer * left / sharded,
        step=0 if in_fp32 else 4 * left / sharded,
    )


def _weight_bytes(knobs: Mapping[str, KnobValue], fp32: bool) -> tuple[float, float]:
    """(a weight, its quantized copies). Both layouts are kept, by row and by column; seen on one H200 as 2.06 B.

    `fp8_param` (`fp4_param`) makes the copies the weights: the bf16 ones go. Embedding and output stay bf16; their
    share is small, so the difference is booked with the copies.
    """
    whole = 4 if fp32 else 2
    if knobs.get("fp4"):
        return whole, 2 * FP4_BYTES - (whole if knobs.get("fp4_param") else 0)
    if not knobs.get("fp8"):
        return whole, 0
    scales = SCALES if knobs.get("fp8_recipe") in ("blockwise", "mxfp8") else 1
    return whole, 2 * scales - (whole if knobs.get("fp8_param") else 0)


def _optimizer_bytes(knobs: Mapping[str, KnobValue], fp32: bool, sgd: bool) -> float:
    """Main weight and moments of one parameter. Transformer Engine's SGD keeps a momentum even where it is 0.

    Seen on one H200: 14 B a parameter in all with SGD, 18 with Adam.
    """
    aware = bool(knobs.get("use_precision_aware_optimizer"))
    main = 0 if fp32 else _width(knobs, "main_params_dtype", aware)
    if sgd:
        return main + 4
    return main + _width(knobs, "exp_avg_dtype", aware) + _width(knobs, "exp_avg_sq_dtype", aware)


def _width(knobs: Mapping[str, KnobValue], name: str, aware: bool) -> int:
    value = knobs.get(name)
    if value is None or not aware:
        return 4
    word = str(value).removeprefix("torch.").replace("float32", "fp32").replace("bfloat16", "bf16")
    word = word.replace("float16", "fp16").replace("float8_e4m3fn", "fp8")
    if word not in BYTES:
        raise FactError(name, f"{name} {value!r} is no type the plan knows; known: {', '.join(BYTES)}")
    return BYTES[word]
