"""Lists of parts of a layer (recompute_modules, offload_modules): which of the asked ones have code in the layers."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from train_worker.megatron.seen import Run

Flags = dict[str, Callable[[TransformerLayer], Any]]
RECOMPUTED: Flags = {
    "core_attn": lambda layer: layer.self_attention.checkpoint_core_attention,
    "mla_up_proj": lambda layer: layer.self_attention.recompute_up_proj,
    "layernorm": lambda layer: layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm,
    "mlp": lambda layer: layer.recompute_mlp,
    "moe": lambda layer: layer.mlp.moe_layer_recompute,
    "shared_experts": lambda layer: layer.mlp.shared_experts_recompute and layer.mlp.use_shared_expert,
    "moe_act": lambda layer: layer.mlp.experts.activation_recompute,
}
# core/transformer/transformer_layer.py:1442-1487 (it switches the norms off again under graphs), moe/experts.py:260.
OFFLOADED: Flags = {
    "attn_norm": lambda layer: layer.offload_attn_norm,
    "qkv_linear": lambda layer: layer.offload_qkv_linear,
    "core_attn": lambda layer: layer.offload_core_attn,
    "attn_proj": lambda layer: layer.offload_attn_proj,
    "mlp_norm": lambda layer: layer.offload_mlp_norm,
    "expert_fc1": lambda layer: layer.mlp.experts.offload_expert_fc1,
    "moe_act": lambda layer: layer.mlp.experts.offload_moe_act,
}
OF_EXPERTS = ("moe", "moe_act", "shared_experts", "expert_fc1")


def recompute_modules(run: Run) -> list[str]:
    """The asked modules without those that this rank has layers for and that none of them recomputes."""
    config = run.config
    asked = config.recompute_modules if config.recompute_granularity == "selective" else []
    return [name for name in asked if _has(name, RECOMPUTED, run)]


def offload_modules(run: Run) -> list[str]:
    config = run.config
    asked = config.offload_modules if config.fine_grained_activation_offloading else []
    return [name for name in asked or [] if _has(name, OFFLOADED, run)]


def _has(name: str, flags: Flags, run: Run) -> bool:
    """True also where the layers it is about are on other stages; a dense MLP may be nowhere."""
    layers = run.layers()
    if name in OF_EXPERTS:
        layers = [layer for layer in layers if isinstance(layer.mlp, MoELayer)]
    elif name == "mlp":
        layers = [layer for layer in layers if not isinstance(layer.mlp, MoELayer)]
        if not layers:
            return 0 in run.config.moe_layer_freq
    return name not in flags or not layers or any(_flag(flags[name], layer) for layer in layers)


def _flag(read: Callable[[TransformerLayer], Any], layer: TransformerLayer) -> bool:
    try:
        return bool(read(layer))
    except AttributeError:  # the class in that place (a dense MLP, SequentialMLP) has no code for it
        return False
