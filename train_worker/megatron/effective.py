"""The effective configuration, read back from the objects that were built, and how it differs from the request.

Megatron overwrites and ignores settings without a word (grouped GEMM under the local spec, recompute of a module that
has no code for it), so the request proves nothing. Each reader below looks at what will run: a class, a flag of a
layer, a process group. Where no reader exists the built config object is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from search_spaces.candidate import MODULE_SEPARATOR, Candidate, KnobValue, modules
from train_worker.megatron.config import LIST_KNOBS, field_names, megatron_value, unset
from train_worker.megatron.model import Built
from train_worker.outcome import Rejected

DISPATCHERS = {
    MoEAllGatherTokenDispatcher: "allgather",
    MoEAlltoAllTokenDispatcher: "alltoall",
    MoEFlexTokenDispatcher: "flex",
}
RECOMPUTE_FLAGS: dict[str, Callable[[TransformerLayer], Any]] = {
    "core_attn": lambda layer: layer.self_attention.checkpoint_core_attention,
    "mla_up_proj": lambda layer: layer.self_attention.recompute_up_proj,
    "layernorm": lambda layer: layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm,
    "mlp": lambda layer: layer.recompute_mlp,
    "moe": lambda layer: layer.mlp.moe_layer_recompute,
    "shared_experts": lambda layer: layer.mlp.shared_experts_recompute and layer.mlp.use_shared_expert,
    "moe_act": lambda layer: layer.mlp.experts.activation_recompute,
}


@dataclass(frozen=True)
class Run:
    """What is read: the built objects and the micro-batches seen by the last step."""

    built: Built
    micro_batch_sizes: tuple[int, ...]

    def layers(self) -> list[TransformerLayer]:
        inside = (module for model in self.built.models for module in model.modules())
        return [module for module in inside if isinstance(module, TransformerLayer)]

    def moe_layers(self) -> list[MoELayer]:
        return [layer.mlp for layer in self.layers() if isinstance(layer.mlp, MoELayer)]


def effective_configuration(candidate: Candidate, run: Run) -> dict[str, KnobValue]:
    """Every knob of the candidate, the layout in force, the dispatcher and the batch split, as they really are here.

    `num_microbatches` and `data_parallel_size` are added to the knobs. Raises ValueError for a knob nothing holds.
    """
    names = [*candidate.knobs, *(name for name in ALWAYS if name not in candidate.knobs)]
    found = {name: read(name, run) for name in names}
    found["data_parallel_size"] = parallel_state.get_data_parallel_world_size()
    chunks = len(run.built.chunks)
    found["num_microbatches"] = len(run.micro_batch_sizes) // chunks
    return found


def read(name: str, run: Run) -> KnobValue:
    """One knob as it is in the built objects of this rank."""
    if name in READERS:
        return _plain(READERS[name](run))
    for holder in (run.built.chunks[0].ddp_config, run.built.optimizer.config, run.built.models[0].config):
        if name in field_names(type(holder)):
            return _plain(getattr(holder, name))
    raise ValueError(f"knob {name!r} is in no built object")


def mismatch(candidate: Candidate, effective: dict[str, KnobValue]) -> Rejected | None:
    """The knobs whose effective value is not the requested one, or None."""
    wrong = [
        f"{name}: requested {value!r}, effective {effective[name]!r}"
        for name, value in candidate.knobs.items()
        if not _same(name, _resolved(name, value, candidate), effective[name])
    ]
    return Rejected(rule="effective-differs", reason="; ".join(wrong)) if wrong else None


def first_mismatch_of_ranks(mine: Rejected | None) -> Rejected | None:
    """The same verdict on every rank: the lowest rank's that has one. Collective."""
    found: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine.reason if mine else None)
    reasons = [reason for reason in found if reason]
    return Rejected(rule="effective-differs", reason=reasons[0]) if reasons else None


def _resolved(name: str, value: KnobValue, candidate: Candidate) -> KnobValue:
    """What a request of None means: an expert tensor size that follows TP."""
    return candidate.layout.expert_tensor if name == "expert_tensor_parallel_size" else value


def _same(name: str, requested: KnobValue, effective: KnobValue) -> bool:
    if name in LIST_KNOBS:
        return unset(name, requested) or set(modules(requested)) == set(modules(effective))
    return bool(megatron_value(name, requested) == effective)


def _plain(value: Any) -> KnobValue:
    """A Megatron value as a knob value: enums by name, lists joined with "+"."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return MODULE_SEPARATOR.join(str(_plain(part)) for part in value) or None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _all_equal(values: list[Any], what: str) -> Any:
    """The one value that all layers of this rank share; a mixture is written out, so that it equals no request."""
    distinct = sorted(set(values), key=str)
    if not distinct:
        return None
    return distinct[0] if len(distinct) == 1 else f"mixed {what}: {', '.join(map(str, distinct))}"


def _dispatcher(run: Run) -> Any:
    """From the classes of the built dispatchers; a stage without MoE layers can only tell what its config says."""
    layers = run.moe_layers()
    if not layers:
        return run.built.models[0].config.moe_token_dispatcher_type
    return _all_equal([DISPATCHERS[type(layer.token_dispatcher)] for layer in layers], "dispatchers")


def _grouped_gemm(run: Run) -> Any:
    layers = run.moe_layers()
    if not layers:
        return run.built.models[0].config.moe_grouped_gemm
    return _all_equal([not isinstance(layer.experts, SequentialMLP) for layer in layers], "experts")


def _shared_expert_overlap(run: Run) -> Any:
    layers = run.moe_layers()
    if not layers:
        return run.built.models[0].config.moe_shared_expert_overlap
    return _all_equal([bool(layer.use_shared_expert and layer.shared_expert_overlap) for layer in layers], "layers")


def _recompute_modules(run: Run) -> Any:
    """The asked modules without those that this rank has layers for and that none of them recomputes."""
    config = run.built.models[0].config
    asked = config.recompute_modules if config.recompute_granularity == "selective" else []
    return [name for name in asked if name not in RECOMPUTE_FLAGS or _recomputed(name, run)]


def _recomputed(name: str, run: Run) -> bool:
    """True also where the layers it is about are on other stages; a dense MLP may be nowhere."""
    layers = run.layers()
    if name in ("moe", "moe_act", "shared_experts"):
        layers = [layer for layer in layers if isinstance(layer.mlp, MoELayer)]
    elif name == "mlp":
        layers = [layer for layer in layers if not isinstance(layer.mlp, MoELayer)]
        if not layers:
            return 0 in run.built.models[0].config.moe_layer_freq
    return not layers or any(_flag(name, layer) for layer in layers)


def _flag(name: str, layer: TransformerLayer) -> bool:
    try:
        return bool(RECOMPUTE_FLAGS[name](layer))
    except AttributeError:  # the class in that place (a dense MLP, SequentialMLP) has no code for it
        return False


def _virtual_pipeline(run: Run) -> Any:
    return len(run.built.chunks) if len(run.built.chunks) > 1 else None


READERS: dict[str, Callable[[Run], Any]] = {
    "tensor_model_parallel_size": lambda _: parallel_state.get_tensor_model_parallel_world_size(),
    "pipeline_model_parallel_size": lambda _: parallel_state.get_pipeline_model_parallel_world_size(),
    "context_parallel_size": lambda _: parallel_state.get_context_parallel_world_size(),
    "expert_model_parallel_size": lambda _: parallel_state.get_expert_model_parallel_world_size(),
    "expert_tensor_parallel_size": lambda _: parallel_state.get_expert_tensor_parallel_world_size(),
    "virtual_pipeline_model_parallel_size": _virtual_pipeline,
    "micro_batch_size": lambda run: _all_equal(list(run.micro_batch_sizes), "micro-batches"),
    "moe_token_dispatcher_type": _dispatcher,
    "moe_grouped_gemm": _grouped_gemm,
    "moe_shared_expert_overlap": _shared_expert_overlap,
    "recompute_modules": _recompute_modules,
}
ALWAYS = (
    *(name for name in READERS if name not in ("moe_grouped_gemm", "moe_shared_expert_overlap", "recompute_modules")),
    "sequence_parallel",
    "recompute_granularity",
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "batch_p2p_comm",
)
