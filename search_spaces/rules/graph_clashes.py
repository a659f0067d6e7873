"""Rules of CUDA graphs beside recompute and offload: what a graph cannot hold, or Megatron then leaves out."""

from search_spaces.rules.recompute import GRANULARITY, MODULES, SHARED_OVERLAP, VARIANT
from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import older

IMPL, CAPTURED, SCOPE = "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"
SWITCHES = ("enable_cuda_graph", "external_cuda_graph")  # the old names of local and of transformer_engine
OLD_WORDS = ("full", "full_iteration", "full_iteration_inference")
LAYERED = ("transformer_engine", "local")
GRAPHS = frozenset({IMPL, CAPTURED, SCOPE, *SWITCHES})
CAPACITY, PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
PADDING, OLD_PADDING = "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"
DISPATCHER, LATENT, TRANSFORMER = "moe_token_dispatcher_type", "moe_latent_size", "transformer_impl"
OFFLOAD, FINE, OFFLOADED = "cpu_offloading", "fine_grained_activation_offloading", "offload_modules"
INFLIGHT, WARMUP = "fine_grained_offloading_max_inflight_offloads", "cuda_graph_warmup_steps"
ATTENTION_DROPOUT, HIDDEN_DROPOUT, JITTER = "attention_dropout", "hidden_dropout", "moe_input_jitter_eps"
OLD_MOE, FP8, FP4, FUSED_DOWN = "moe_layer_recompute", "fp8", "fp4", "mla_down_proj_fusion"
SHARDS, REMAT, TP = "tensor_parallel_num_weight_shards", "gtp_weight_remat_size", "tensor_model_parallel_size"
INSIDE_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})


def words(case: Case) -> tuple[str, ...]:
    """The modules as they are asked for, under the new name or the old one."""
    return case.parts(SCOPE) if case.knobs.get(SCOPE) is not None else case.parts(CAPTURED)


def captured(case: Case) -> tuple[str, ...]:
    """Modules in the graph; () for the whole layer. Old words for other things are left out."""
    return tuple(name for name in words(case) if name not in OLD_WORDS)


def implementation(case: Case) -> str:
    """Who captures, old names translated (transformer_config.py:2366-2440)."""
    found = case.text(IMPL, "none")
    if found == "none" and (case.on(SWITCHES[0]) or case.on(SWITCHES[1])):
        found = "local" if case.on(SWITCHES[0]) else "transformer_engine"
    return "full_iteration" if found in ("none", "local") and "full_iteration" in words(case) else found


def layered(case: Case) -> tuple[str, ...]:
    """Modules captured layer by layer; () without graphs, with whole layers or whole iterations.

    Local graphs capture the router and its preprocessing together (transformer_config.py:2472).
    """
    if implementation(case) not in LAYERED:
        return ()
    found, pair = captured(case), ("moe_router", "moe_preprocess")
    both = implementation(case) == "local" and any(name in found for name in pair)
    return tuple(dict.fromkeys((*found, *pair))) if both else found


def padded(case: Case) -> bool:
    """Each expert gets the same number of tokens: nothing waits for the host. A capacity below zero is none."""
    return case.number(CAPACITY, -1.0) >= 0 and case.on(PADDED)


def weight_shards(case: Case) -> int:
    """Ranks a dense weight is spread over beyond TP, gathered when used (model_parallel_config.py:512)."""
    return case.integer(SHARDS, 0) // max(case.integer(TP, 1), 1) or case.integer(REMAT, 1)


def _recomputed(case: Case) -> tuple[str, ...]:
    """Modules recomputed selectively, the old switch for the MoE layer included (transformer_config.py:1835)."""
    old = ("moe",) if case.on(OLD_MOE) else ()
    if case.text(GRANULARITY) != "selective" and not old:
        return ()
    return (*(("core_attn",) if case.knobs.get(MODULES) is None else case.parts(MODULES)), *old)


def _full_recompute(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "full" and implementation(case) in LAYERED
    return "full recompute with CUDA graphs of layers" if wrong else None


def _any_recompute(case: Case) -> str | None:
    if implementation(case) == "none" or not (case.text(GRANULARITY) or case.on(OLD_MOE)):
        return None
    if implementation(case) != "transformer_engine" or captured(case) != ("attn",) or not _recomputed(case):
        return "recompute with other CUDA graphs than of attn by transformer_engine"
    inside = [name for name in _recomputed(case) if name in ("core_attn", "mla_up_proj")]
    return f"{' and '.join(inside)} recompute inside a captured attn" if inside else None


def _recomputed_router(case: Case) -> str | None:
    captures = implementation(case) == "transformer_engine" and "moe_router" in layered(case)
    return "moe recompute around a captured moe_router" if captures and "moe" in _recomputed(case) else None


def _random_numbers(case: Case) -> str | None:
    recomputed = _recomputed(case)
    if implementation(case) == "none" or case.text(GRANULARITY) == "full" or not recomputed:
        return None
    inside = captured(case) if implementation(case) in LAYERED and captured(case) else ("attn", "mlp", "moe")
    if case.number(ATTENTION_DROPOUT, 0.0) and "attn" in inside and "core_attn" in recomputed:
        return "attention dropout in an attention that is recomputed inside a CUDA graph"
    if case.number(HIDDEN_DROPOUT, 0.0) and any(name in inside and name in recomputed for name in ("mlp", "moe")):
        return "hidden dropout in an MLP or MoE layer that is recomputed inside a CUDA graph"
    wrong = case.knobs.get(JITTER) is not None and "moe" in inside and "moe" in recomputed
    return f"{JITTER} in a MoE layer that is recomputed inside a CUDA graph" if wrong else None


def _local_offload(case: Case) -> str | None:
    outside = sorted(set(case.parts(OFFLOADED)) - INSIDE_EXPERTS)
    if outside:
        return f"offload of {', '.join(outside)} with local CUDA graphs"
    return None if captured(case) else "offload of activations with local CUDA graphs of whole layers"


def _offload(case: Case) -> str | None:
    if not case.on(FINE) or implementation(case) == "none":
        return None
    if implementation(case) == "local" and (wrong := _local_offload(case)):
        return wrong
    if "moe" in layered(case):
        return "offload of activations with a captured moe"
    if case.integer(WARMUP, 3) < 1:
        return f"offload of activations with {WARMUP} 0"
    missing = implementation(case) == "full_iteration" and case.integer(INFLIGHT, -1) < 0
    return f"offload of activations with full_iteration graphs without {INFLIGHT}" if missing else None


def _old_local_offload(case: Case) -> str | None:
    wrong = case.on(FINE) and implementation(case) == "local"
    return "offload of activations with local CUDA graphs in this release" if wrong else None


def _sharded_weights(case: Case) -> str | None:
    if weight_shards(case) < 2 or implementation(case) != "local" or not (case.text(FP8) or case.text(FP4)):
        return None
    inside = not captured(case) or {"moe", "moe_router"} & set(layered(case))
    if not inside or case.on(SHARED_OVERLAP) or "shared_experts" not in _recomputed(case):
        return None
    wrong = case.model.moe_shared_expert_intermediate_size is not None
    return "shared_experts recompute inside local CUDA graphs, with sharded quantized weights" if wrong else None


def _captured_offload(case: Case) -> str | None:
    inside = sorted({"core_attn", "attn_proj", "qkv_linear"} & set(case.parts(OFFLOADED)))
    if case.stack is None or not inside or not case.on(FINE) or "attn" not in layered(case):
        return None
    if older(case.stack.torch, "2.9"):
        return f"offload of {', '.join(inside)} inside a captured attn with torch {case.stack.torch}"
    engine = case.stack.transformer_engine
    wrong = engine is not None and older(engine, "2.14")
    return f"offload of {', '.join(inside)} inside a captured attn with transformer-engine {engine}" if wrong else None


def _norm_is_dropped(case: Case) -> bool:
    """With Transformer Engine's layers the norm before the experts is the only one that is a module of its own, except
    under latent attention with its down projections apart (gpt_layer_specs.py:259, :296); and its output must leave the
    graph of a captured router."""
    captures = implementation(case) == "transformer_engine" and "moe_router" in layered(case)
    if not captures or "layernorm" not in _recomputed(case):
        return False
    if case.model.multi_latent_attention and not case.on(FUSED_DOWN):
        return False
    if case.text(VARIANT) or case.text(TRANSFORMER, "transformer_engine") != "transformer_engine":
        return False
    shared = case.model.moe_shared_expert_intermediate_size is not None and case.on(SHARED_OVERLAP)
    kept_inside = case.text(DISPATCHER, "allgather") == "alltoall" or case.integer(LATENT, 0) > 0
    return shared or not ("moe_preprocess" in layered(case) and kept_inside)


def _kept_norm(case: Case) -> str | None:
    alone = set(_recomputed(case)) == {"layernorm"}
    dropped = alone and _norm_is_dropped(case)
    return "layernorm recompute beside a captured moe_router is dropped by Megatron" if dropped else None


def _kept_norm_of_several(case: Case) -> str | None:
    """The recipes that do it run as they would without: a double, which a search leaves out."""
    several = len(set(_recomputed(case))) > 1
    dropped = several and _norm_is_dropped(case)
    return "of what is recomputed, layernorm beside a captured moe_router is dropped by Megatron" if dropped else None


def _norm_offload(case: Case) -> str | None:
    if not case.on(FINE) or case.dense:
        return None
    inside = set(layered(case))
    lost = [
        name
        for name, blockers in (("attn_norm", {"attn"}), ("mlp_norm", {"attn", "moe_router"}))
        if name in case.parts(OFFLOADED) and inside & blockers
    ]
    return f"offload of {' and '.join(lost)} beside what is captured is dropped by Megatron" if lost else None


_CONFIG, _LAYER = "core/transformer/transformer_config.py", "core/transformer/transformer_layer.py"
_RECOMPUTED = frozenset({GRANULARITY, MODULES, OLD_MOE})
_OFFLOAD = GRAPHS | {FINE, OFFLOADED}
_NORM = GRAPHS | _RECOMPUTED | {DISPATCHER, SHARED_OVERLAP, LATENT, VARIANT, TRANSFORMER, FUSED_DOWN}
RULES = (
    Rule("CGR-13", GRAPHS | {GRANULARITY}, _full_recompute, f"{_CONFIG}:2523", "use selective recompute"),
    Rule(
        "CGR-13b", GRAPHS | _RECOMPUTED, _any_recompute, "megatron-core 0.15.0, transformer_config.py:1398",
        "capture attn only and recompute what is outside of it, or use megatron-core 0.16", until="0.16",
    ),
    Rule(
        "CGR-14", GRAPHS | _RECOMPUTED, _recomputed_router, f"{_CONFIG}:2533",
        "recompute other modules or capture attn only",
    ),
    Rule(
        "CGR-15", GRAPHS | _RECOMPUTED | {ATTENTION_DROPOUT, HIDDEN_DROPOUT, JITTER}, _random_numbers,
        f"{_CONFIG}:2546", "recompute what is outside of the graph, or train without dropout and jitter",
    ),
    Rule(
        "CGR-16", _OFFLOAD | {WARMUP, INFLIGHT}, _offload, f"{_CONFIG}:2596",
        "offload other modules, or use other graphs", since="0.18",
    ),
    Rule(
        "CGR-16b", _OFFLOAD, _old_local_offload, "megatron-core 0.18.0, transformer_config.py:2351",
        "use graphs by transformer_engine, or megatron-core 0.19", since="0.18", until="0.19",
    ),
    Rule(
        "CGR-17", GRAPHS | _RECOMPUTED | {SHARED_OVERLAP, FP8, FP4, SHARDS, REMAT, TP}, _sharded_weights,
        f"{_CONFIG}:2587", "recompute other modules or use full_iteration graphs", since="0.19",
    ),
    Rule(
        "CGR-19", _OFFLOAD, _captured_offload, f"{_LAYER}:1504",
        "offload other modules, or install torch 2.9 and transformer-engine 2.14", "build",
    ),
    Rule(
        "TRAP-13", _NORM, _kept_norm, f"{_LAYER}:458, core/models/gpt/gpt_layer_specs.py:318; seen on an H200",
        "leave layernorm out, or capture moe_preprocess too and use alltoall", "build",
    ),
    Rule(
        "DUP-09", _NORM, _kept_norm_of_several,
        f"{_LAYER}:458, core/models/gpt/gpt_layer_specs.py:318; seen on an H200; recipes that NVIDIA ships do it",
        "leave layernorm out, or capture moe_preprocess too and use alltoall", "runtime risk",
    ),
    Rule("TRAP-13c", _OFFLOAD, _norm_offload, f"{_LAYER}:1458", "leave it out of offload_modules", "build"),
)  # fmt: skip
