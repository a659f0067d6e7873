"""What each knob is read back from: a class, a flag of a layer, a process group, a recipe that the last step used.

Where no reader exists the built config object is read, which proves only that Megatron has not overwritten the field.
Issue 5 adds evidence of what ran (kernels, graphs replayed).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    _DeepepManager,
    _HybridEPManager,
    _NCCLEPManager,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from search_spaces.candidate import MODULE_SEPARATOR, KnobValue
from train_worker.megatron.config import field_names
from train_worker.megatron.model import Built
from train_worker.megatron.precision import fp8_recipes

DISPATCHERS = {
    MoEAllGatherTokenDispatcher: "allgather",
    MoEAlltoAllTokenDispatcher: "alltoall",
    MoEFlexTokenDispatcher: "flex",
}
BACKENDS = {_DeepepManager: "deepep", _HybridEPManager: "hybridep", _NCCLEPManager: "ncclep"}
GROUPED = {SequentialMLP: False, TEGroupedMLP: True}
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

    @property
    def config(self) -> Any:
        """The TransformerConfig that the model holds, as Megatron left it."""
        return self.built.models[0].config

    def layers(self) -> list[TransformerLayer]:
        inside = (module for model in self.built.models for module in model.modules())
        return [module for module in inside if isinstance(module, TransformerLayer)]

    def moe_layers(self) -> list[MoELayer]:
        return [layer.mlp for layer in self.layers() if isinstance(layer.mlp, MoELayer)]


def read(name: str, run: Run) -> KnobValue:
    """One knob as it is in the built objects of this rank. Raises ValueError where nothing holds it."""
    if name in READERS:
        return _plain(READERS[name](run))
    for holder in (run.built.chunks[0].ddp_config, run.built.optimizer.config, run.config):
        if name in field_names(type(holder)):
            return _plain(getattr(holder, name))
    raise ValueError(f"knob {name!r} is in no built object")


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


def _named(table: dict[type, Any], found: Any) -> Any:
    """The word for the class of `found`; the name of a class that is not in the table, which equals no request."""
    return table.get(type(found), type(found).__name__)


def _dispatcher(run: Run) -> Any:
    """From the classes of the built dispatchers; a stage without MoE layers can only tell what its config says."""
    layers = run.moe_layers()
    if not layers:
        return run.config.moe_token_dispatcher_type
    return _all_equal([_named(DISPATCHERS, layer.token_dispatcher) for layer in layers], "dispatchers")


def _flex_backend(run: Run) -> Any:
    """From the class that flex dispatchers send with; None where no dispatcher is flex."""
    layers = run.moe_layers()
    if not layers:
        return run.config.moe_flex_dispatcher_backend
    flex = [layer.token_dispatcher for layer in layers if isinstance(layer.token_dispatcher, MoEFlexTokenDispatcher)]
    return _all_equal([_named(BACKENDS, dispatcher._comm_manager) for dispatcher in flex], "backends")


def _grouped_gemm(run: Run) -> Any:
    layers = run.moe_layers()
    if not layers:
        return run.config.moe_grouped_gemm
    return _all_equal([_named(GROUPED, layer.experts) for layer in layers], "experts")


def _shared_expert_overlap(run: Run) -> Any:
    layers = run.moe_layers()
    if not layers:
        return run.config.moe_shared_expert_overlap
    return _all_equal([bool(layer.use_shared_expert and layer.shared_expert_overlap) for layer in layers], "layers")


def _recompute_modules(run: Run) -> Any:
    """The asked modules without those that this rank has layers for and that none of them recomputes."""
    config = run.config
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
            return 0 in run.config.moe_layer_freq
    return not layers or any(_flag(name, layer) for layer in layers)


def _flag(name: str, layer: TransformerLayer) -> bool:
    try:
        return bool(RECOMPUTE_FLAGS[name](layer))
    except AttributeError:  # the class in that place (a dense MLP, SequentialMLP) has no code for it
        return False


def _fp8(run: Run) -> Any:
    """The FP8 format, None where no GEMM of this rank's layers ran in FP8; a stage without layers: the config's."""
    layers = run.layers()
    if not layers:
        return run.config.fp8
    found = fp8_recipes(module for layer in layers for module in layer.modules())
    return _all_equal([each for each, _ in found], "formats")


def _fp8_recipe(run: Run) -> Any:
    layers = run.layers()
    if not layers:
        return run.config.fp8_recipe
    found = fp8_recipes(module for layer in layers for module in layer.modules())
    return _all_equal([recipe for _, recipe in found], "recipes")


def _sharded_optimizer(run: Run) -> Any:
    """From the classes of the optimizers, one for the dense and one for the expert parameters."""
    parts = getattr(run.built.optimizer, "chained_optimizers", [run.built.optimizer])
    return _all_equal([isinstance(part, DistributedOptimizer) for part in parts], "optimizers")


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
    "moe_flex_dispatcher_backend": _flex_backend,
    "moe_grouped_gemm": _grouped_gemm,
    "moe_shared_expert_overlap": _shared_expert_overlap,
    "recompute_modules": _recompute_modules,
    "fp8": _fp8,
    "fp8_recipe": _fp8_recipe,
    "use_distributed_optimizer": _sharded_optimizer,
}
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
