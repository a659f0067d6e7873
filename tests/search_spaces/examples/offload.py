"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import H8

FINE: dict[str, KnobValue] = {"fine_grained_activation_offloading": True}
LAYERWISE: dict[str, KnobValue] = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
EXPERTS: dict[str, KnobValue] = FINE | {"offload_modules": "moe_act"}
ATTENTION: dict[str, KnobValue] = FINE | {"offload_modules": "core_attn"}
V1 = {"NVTE_CPU_OFFLOAD_V1": "1"}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "OFF-01": (case(H8, **LAYERWISE, pp=2), case(H8, **LAYERWISE, pp=1)),
    "OFF-02": (case(H8, **FINE, offload_modules="moe"), case(H8, **FINE, offload_modules="moe_act")),
    "OFF-02b": (
        case(H8, **FINE, offload_modules="fused_group_mlp", stack={"megatron_core": "0.18.0"}),
        case(H8, **FINE, offload_modules="expert_fc1", stack={"megatron_core": "0.18.0"}),
    ),
    "OFF-03": (
        case(H8, **FINE, offload_modules="attn_proj"),
        case(H8, **FINE, offload_modules="core_attn+attn_proj"),
    ),
    "OFF-04": (
        case(H8, **EXPERTS, recompute="selective", modules="moe"),
        case(H8, **EXPERTS, recompute="selective", modules="layernorm"),
    ),
    "OFF-05": (
        case(H8, **EXPERTS, activation_offload_fraction=1.5),
        case(H8, **EXPERTS, activation_offload_fraction=1.0),
    ),
    "OFF-06": (
        case(H8, **FINE, offload_modules="fused_group_mlp"),
        case(H8, **FINE, offload_modules="fused_group_mlp", use_transformer_engine_op_fuser=True),
    ),
    "OFF-07": (
        case(H8, **ATTENTION, stack={}, launchers=("megatron-lm",)),
        case(H8, **ATTENTION, stack={}, launchers=("megatron-lm",), env=V1),
    ),
    "OFF-07b": (
        case(H8, **ATTENTION, stack={}, launchers=("megatron-bridge",)),
        case(H8, **ATTENTION, stack={}, launchers=("megatron-bridge",), env=V1),
    ),
}
