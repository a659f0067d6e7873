"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import BLACKWELL, EXPANDABLE, H1, H8, KEPT_NORM
from tests.search_spaces.oracle import Oracle
from tests.search_spaces.oracle_graphs import (
    dropped_norm,
    dropped_norm_offload,
    helper_refusal,
    layer_refusal,
    nothing_graphable,
    preprocess_refusal,
)

TE: dict[str, KnobValue] = {"graphs": "transformer_engine"}
LOCAL: dict[str, KnobValue] = {"graphs": "local"}
ITERATION: dict[str, KnobValue] = {"graphs": "full_iteration"}
ROUTED: dict[str, KnobValue] = TE | {"captured": "attn+moe_router+moe_preprocess"}
SELECTED: dict[str, KnobValue] = {"recompute": "selective"}
ALLTOALL: dict[str, KnobValue] = {"dispatcher": "alltoall", "moe_expert_capacity_factor": 1.0}
PADS: dict[str, KnobValue] = {"moe_pad_expert_input_to_capacity": True}
QUANTIZED: dict[str, KnobValue] = {
    "dispatcher": "alltoall", "fp8": "hybrid", "moe_router_padding_for_quantization": True,
}  # fmt: skip
OFFLOAD: dict[str, KnobValue] = {"fine_grained_activation_offloading": True, "offload_modules": "expert_fc1"}
OFFLOAD_ATTENTION: dict[str, KnobValue] = OFFLOAD | {"offload_modules": "core_attn+attn_proj"}
SHARDED: dict[str, KnobValue] = LOCAL | SELECTED | {
    "fp8": "hybrid", "modules": "shared_experts", "tensor_parallel_num_weight_shards": 2,
}  # fmt: skip
SHARED = {"moe_shared_expert_intermediate_size": 128}
UNREGISTERED = EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}
NO_EXPERTS = {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "CGR-01": (case(H8, graphs="te"), case(H8, graphs="full_iteration")),
    "CGR-01b": (case(H8, **ITERATION), case(H8, **LOCAL)),
    "CGR-01c": (case(H8, **TE, captured="attn+moe_router"), case(H8, **TE, captured="attn")),
    "CGR-02": (case(H8, **ITERATION, captured="attn"), case(H8, **LOCAL, captured="attn")),
    "CGR-03": (
        case(H8, **TE, captured="attn", cuda_graph_scope="attn"),
        case(H8, **TE, cuda_graph_scope="attn"),
    ),
    "CGR-04": (
        case(H8, **TE, captured="attn", cpu_offloading=True, cpu_offloading_num_layers=1),
        case(H8, **ITERATION, cpu_offloading=True, cpu_offloading_num_layers=1),
    ),
    "CGR-06": (
        case(H8, **TE, **ALLTOALL, **PADS, captured="moe+moe_router"),
        case(H8, **TE, **ALLTOALL, **PADS, captured="moe"),
    ),
    "CGR-07": (
        case(H8, **TE, captured="moe_preprocess"),
        case(H8, **TE, captured="moe_router+moe_preprocess"),
    ),
    "CGR-08": (
        case(H8, **TE, captured="moe_router", model=NO_EXPERTS),
        case(H8, **TE, captured="mlp", model=NO_EXPERTS),
    ),
    "CGR-09": (
        case(H8, **TE, captured="attn+mlp"),
        case(H8, **TE, captured="attn+mlp", moe_layer_freq="[0, 1, 1, 1]"),
    ),
    "CGR-10": (
        case(H8, **LOCAL, **ALLTOALL, captured="moe"),
        case(H8, **LOCAL, **ALLTOALL, **PADS, captured="moe"),
    ),
    "CGR-11": (case(H8, **ROUTED, **ALLTOALL), case(H8, **ROUTED, **ALLTOALL, **PADS)),
    "CGR-12": (case(H8, **ROUTED, **QUANTIZED), case(H8, **TE, **QUANTIZED, captured="attn+moe_router")),
    "CGR-13": (
        case(H8, recompute="full", method="uniform", layers=1, captured="attn", **TE),
        case(H8, recompute="full", method="uniform", layers=1, **ITERATION),
    ),
    "CGR-13b": (
        case(H8, **TE, **SELECTED, captured="attn"),
        case(H8, **TE, **SELECTED, captured="attn", modules="moe"),
    ),
    "CGR-14": (
        case(H8, **TE, **SELECTED, modules="moe", captured="attn+moe_router"),
        case(H8, **TE, **SELECTED, modules="moe", captured="attn"),
    ),
    "CGR-15": (
        case(H8, **TE, **SELECTED, captured="attn", modules="core_attn", attention_dropout=0.1),
        case(H8, **TE, **SELECTED, captured="moe_router", modules="core_attn", attention_dropout=0.1),
    ),
    "CGR-16": (
        case(H8, **LOCAL, **OFFLOAD_ATTENTION, captured="moe_router"),
        case(H8, **LOCAL, **OFFLOAD, captured="moe_router"),
    ),
    "CGR-16b": (case(H8, **LOCAL, **OFFLOAD, captured="attn"), case(H8, **TE, **OFFLOAD, captured="attn")),
    "CGR-17": (
        case(H8, **SHARDED, captured="moe_router", model=SHARED),
        case(H8, **SHARDED, captured="attn", model=SHARED),
    ),
    "CGR-19": (
        case(H8, **TE, **OFFLOAD_ATTENTION, captured="attn", stack={"transformer_engine": "2.13.0"}),
        case(H8, **TE, **OFFLOAD_ATTENTION, captured="attn", stack={"transformer_engine": "2.14.0"}),
    ),
    "CGR-20": (case(H8, **TE, env=EXPANDABLE), case(H8, **TE, env=UNREGISTERED)),
    "CGR-20b": (case(H8, **LOCAL, env=EXPANDABLE), case(BLACKWELL, **LOCAL, env=EXPANDABLE)),
    "CGR-20c": (case(H8, **LOCAL, env=UNREGISTERED), case(H8, **LOCAL)),
    "CGR-21": (
        case(H8, **LOCAL, transformer_impl="local"),
        case(H8, **LOCAL, transformer_impl="local", te_rng_tracker=True),
    ),
    "CGR-23": (
        case(H8, **ITERATION, check_for_nan_in_loss_and_grad=True),
        case(H8, **ITERATION, check_for_nan_in_loss_and_grad=False),
    ),
    "CGR-23c": (case(H8, **ITERATION), case(H8, **ITERATION, check_for_nan_in_loss_and_grad=False)),
    "CGR-21b": (case(H8, **TE, use_te_rng_tracker=False), case(H8, **TE, use_te_rng_tracker=True)),
    "CGR-23b": (
        case(H8, **ITERATION, check_for_nan_in_loss=True),
        case(H8, **ITERATION, check_for_nan_in_loss=False),
    ),
    "CGR-26": (
        case(BLACKWELL, **LOCAL, tensor_parallel_num_weight_shards=2),
        case(
            BLACKWELL, **LOCAL, tensor_parallel_num_weight_shards=2, env={"CUDA_GRAPHS_USE_NODE_PRIORITY": "1"}
        ),
    ),
    "RUN-01": (
        case(H1, **LOCAL, captured="attn"),
        case(H1, **LOCAL, captured="attn+moe_router+moe_preprocess"),
    ),
    "RUN-03": (case(H8, **TE, **ALLTOALL), case(H8, **TE, **ALLTOALL, **PADS)),
    "STK-01": (
        case(H1, **TE, stack={"transformer_engine": None}),
        case(H1, **LOCAL, stack={"transformer_engine": None}),
    ),
    "TRAP-13": (
        case(H8, **KEPT_NORM, captured="attn+moe_router+moe_preprocess", dispatcher="allgather"),
        case(H8, **KEPT_NORM, captured="attn+moe_router+moe_preprocess", dispatcher="alltoall"),
    ),
    "DUP-09": (
        case(H8, **TE, **SELECTED, modules="layernorm+core_attn", captured="moe_router"),
        case(H8, **ROUTED, **SELECTED, modules="layernorm+core_attn", dispatcher="alltoall"),
    ),
    "TRAP-13c": (
        case(H8, **TE, **OFFLOAD | {"offload_modules": "mlp_norm"}, captured="moe_router"),
        case(H8, **OFFLOAD | {"offload_modules": "mlp_norm"}),
    ),
    "TRAP-16": (case(H8, **TE, captured="mamba"), case(H8, **TE, captured="attn+mamba")),
    "TRAP-28": (
        case(H8, **ITERATION, training={"warmup_steps": 3}),
        case(H8, **ITERATION, training={"warmup_steps": 4}),
    ),
}  # fmt: skip
ORACLE: dict[str, Oracle] = {
    "CGR-12": preprocess_refusal,
    "CGR-19": layer_refusal,
    "CGR-20": helper_refusal,
    "STK-01": helper_refusal,
    "TRAP-13": dropped_norm,
    "DUP-09": dropped_norm,
    "TRAP-13c": dropped_norm_offload,
    "TRAP-16": nothing_graphable,
}
