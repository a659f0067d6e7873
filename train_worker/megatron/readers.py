"""What each knob is read back from: a class, a flag of a layer, a process group, a recipe that the last step used.

Where no reader exists the built config object is read, which proves only that Megatron has not overwritten the field.
Issue 5 adds evidence of what ran (kernels, graphs replayed).
"""

import json
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp4_utils import is_nvfp4tensor
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    _DeepepManager,
    _HybridEPManager,
    _NCCLEPManager,
)
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from search_spaces.candidate import MODULE_SEPARATOR, KnobValue
from train_worker.host import HOST_KNOBS
from train_worker.megatron.config import LAYOUT, OWNERS, TORCH_WORDS, field_names
from train_worker.megatron.parts import offload_modules, recompute_modules
from train_worker.megatron.precision import fp4_recipes, fp8_recipes
from train_worker.megatron.seen import Run, all_equal, from_layers, word

DISPATCHERS = {
    MoEAllGatherTokenDispatcher: "allgather",
    MoEAlltoAllTokenDispatcher: "alltoall",
    MoEFlexTokenDispatcher: "flex",
}
BACKENDS = {_DeepepManager: "deepep", _HybridEPManager: "hybridep", _NCCLEPManager: "ncclep"}
GROUPED = {SequentialMLP: False, TEGroupedMLP: True}


def readable(name: str) -> bool:
    """Whether `read` can answer for a knob."""
    return name in READERS or any(name in field_names(owner) for owner in OWNERS)


def read(name: str, run: Run) -> KnobValue:
    """One knob as it is in the built objects of this rank. Raises ValueError where nothing holds it."""
    if name in READERS:
        return plain(READERS[name](run))
    for holder in (run.built.chunks[0].ddp_config, run.built.optimizer.config, run.config):
        if name in field_names(type(holder)):
            return plain(getattr(holder, name))
    raise ValueError(f"knob {name!r} is in no built object")


def plain(value: Any) -> KnobValue:
    """A Megatron value as a knob value: enums by name, types by word, lists joined with "+", layouts as nested JSON."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        word_of_torch = str(value).removeprefix("torch.")
        return TORCH_WORDS.get(word_of_torch, word_of_torch)
    if isinstance(value, PipelineParallelLayerLayout):
        ranks = value.layout
        stages = [ranks[rank][chunk] for chunk in range(len(ranks[0])) for rank in range(len(ranks))]
        return json.dumps([[kind.name for kind in stage] for stage in stages])
    if isinstance(value, (list, tuple)):
        return MODULE_SEPARATOR.join(str(plain(part)) for part in value) or None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _flex_backends(layer: Any) -> list[Any]:
    """The class that a flex dispatcher sends with; nothing where it is no flex dispatcher."""
    dispatcher = layer.token_dispatcher
    return [word(BACKENDS, dispatcher._comm_manager)] if isinstance(dispatcher, MoEFlexTokenDispatcher) else []


def _captured_by(run: Run) -> Any:
    """Who captured the graphs that the last step replayed; "none" where it replayed none."""
    return run.config.cuda_graph_impl if run.replayed else "none"


def _captured(run: Run) -> Any:
    return run.config.cuda_graph_modules if run.replayed else None


def _virtual_pipeline(run: Run) -> Any:
    return len(run.built.chunks) if len(run.built.chunks) > 1 else None


def _end_stage(field: str, here: Callable[[], bool]) -> Callable[[Run], Any]:
    """Layers of the first or last stage, counted where this rank is that stage."""

    def count(run: Run) -> Any:
        asked = getattr(run.config, field)
        return len(run.layers()) if asked is not None and here() else asked

    return count


def _optimizers(run: Run) -> list[Any]:
    """One for the dense and one for the expert parameters."""
    return list(getattr(run.built.optimizer, "chained_optimizers", [run.built.optimizer]))


def _host(name: str) -> Callable[[Run], Any]:
    return lambda run: run.host[name]


def _sharded_optimizer(run: Run) -> Any:
    return all_equal((isinstance(part, DistributedOptimizer) for part in _optimizers(run)), "optimizers")


def _optimizer_on_host(run: Run) -> Any:
    inner = [part.optimizer for part in _optimizers(run) if part.optimizer is not None]
    return all_equal((isinstance(each, HybridDeviceOptimizer) for each in inner), "optimizers")


def _state_type(field: str) -> Callable[[Run], Any]:
    """The type of a moment as it is stored. An optimizer on the host keeps fp32 whatever its configuration says."""
    moment = field.removesuffix("_dtype")

    def found(run: Run) -> Any:
        inner = (part.optimizer for part in _optimizers(run) if part.optimizer is not None)
        kept = [state[moment] for each in inner for state in each.state.values() if moment in state]
        words = ("fp8" if is_float8tensor(tensor) else plain(tensor.dtype) for tensor in kept)
        return all_equal(words, "moments") if kept else plain(getattr(run.built.optimizer.config, field))

    return found


def _quantized_parameters(layer: torch.nn.Module, four_bits: bool) -> list[bool]:
    """[True] where some weight of the layer is kept in FP8 (in FP4)."""
    kept = [parameter for parameter in layer.parameters() if is_float8tensor(parameter) or is_nvfp4tensor(parameter)]
    return [any(is_nvfp4tensor(parameter) is four_bits for parameter in kept)]


def _accumulates(layer: torch.nn.Module) -> list[bool]:
    """What Transformer Engine's linears were built with (`fuse_wgrad_accumulation`)."""
    modules = (module for module in layer.modules() if hasattr(module, "fuse_wgrad_accumulation"))
    return [bool(module.fuse_wgrad_accumulation) for module in modules]


def _fusion_of_gradients(run: Run) -> Any:
    found = [value for layer in run.layers() for value in _accumulates(layer)]
    return all_equal(found, "linears") if found else run.config.gradient_accumulation_fusion


_MOE, _ALL, _QUANTIZED = Run.moe_layers, Run.layers, Run.quantized_layers
READERS: dict[str, Callable[[Run], Any]] = {
    "tensor_model_parallel_size": lambda _: parallel_state.get_tensor_model_parallel_world_size(),
    "pipeline_model_parallel_size": lambda _: parallel_state.get_pipeline_model_parallel_world_size(),
    "context_parallel_size": lambda _: parallel_state.get_context_parallel_world_size(),
    "expert_model_parallel_size": lambda _: parallel_state.get_expert_model_parallel_world_size(),
    "expert_tensor_parallel_size": lambda _: parallel_state.get_expert_tensor_parallel_world_size(),
    "virtual_pipeline_model_parallel_size": _virtual_pipeline,
    "cuda_graph_impl": _captured_by,
    "cuda_graph_modules": _captured,
    "num_layers_in_first_pipeline_stage": _end_stage(
        "num_layers_in_first_pipeline_stage", lambda: parallel_state.get_pipeline_model_parallel_rank() == 0
    ),
    "num_layers_in_last_pipeline_stage": _end_stage(
        "num_layers_in_last_pipeline_stage", lambda: parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    ),
    LAYOUT: lambda run: run.config.pipeline_model_parallel_layout,
    "micro_batch_size": lambda run: all_equal(run.micro_batch_sizes, "micro-batches"),
    "moe_token_dispatcher_type": from_layers(
        "moe_token_dispatcher_type", "dispatchers", _MOE, lambda layer: [word(DISPATCHERS, layer.token_dispatcher)]
    ),
    "moe_flex_dispatcher_backend": from_layers("moe_flex_dispatcher_backend", "backends", _MOE, _flex_backends),
    "moe_grouped_gemm": from_layers(
        "moe_grouped_gemm", "experts", _MOE, lambda layer: [word(GROUPED, layer.experts)]
    ),
    "use_transformer_engine_op_fuser": from_layers(
        "use_transformer_engine_op_fuser", "experts", _MOE,
        lambda layer: [bool(getattr(layer.experts, "_with_fused_impl", False))],
    ),
    "moe_single_grouped_weight": from_layers(
        "moe_single_grouped_weight", "experts", _MOE,
        lambda layer: [bool(getattr(getattr(layer.experts, "linear_fc1", None), "single_grouped_weight", False))],
    ),
    "moe_shared_expert_overlap": from_layers(
        "moe_shared_expert_overlap", "layers", _MOE,
        lambda layer: [bool(layer.use_shared_expert and layer.shared_expert_overlap)],
    ),
    "mla_down_proj_fusion": from_layers(
        "mla_down_proj_fusion", "layers", _ALL, lambda layer: [hasattr(layer.self_attention, "linear_qkv_down_proj")]
    ),
    "overlap_moe_expert_parallel_comm": lambda run: run.planned,
    "recompute_modules": recompute_modules,
    "offload_modules": offload_modules,
    "fp8": from_layers("fp8", "formats", _QUANTIZED, lambda layer: [form for form, _ in fp8_recipes(layer.modules())]),
    "fp8_recipe": from_layers(
        "fp8_recipe", "recipes", _QUANTIZED, lambda layer: [recipe for _, recipe in fp8_recipes(layer.modules())]
    ),
    "fp8_param": from_layers("fp8_param", "layers", _QUANTIZED, lambda layer: _quantized_parameters(layer, False)),
    "fp4": from_layers("fp4", "formats", _QUANTIZED, lambda layer: [form for form, _ in fp4_recipes(layer.modules())]),
    "fp4_recipe": from_layers(
        "fp4_recipe", "recipes", _QUANTIZED, lambda layer: [recipe for _, recipe in fp4_recipes(layer.modules())]
    ),
    "fp4_param": from_layers("fp4_param", "layers", _QUANTIZED, lambda layer: _quantized_parameters(layer, True)),
    "gradient_accumulation_fusion": _fusion_of_gradients,
    "use_distributed_optimizer": _sharded_optimizer,
    "optimizer_cpu_offload": _optimizer_on_host,
    **{name: _state_type(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")},
    **{name: _host(name) for name in HOST_KNOBS},
}  # fmt: skip
# Read for every trial, whether the candidate names them or not.
ALWAYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "micro_batch_size",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "fp8",
    "sequence_parallel",
    "recompute_granularity",
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "batch_p2p_comm",
)
