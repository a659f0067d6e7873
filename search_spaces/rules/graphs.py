"""Rules of CUDA graphs: who captures, what, and what must stay outside."""

from search_spaces.rules.rule import Case, Rule

IMPL, CAPTURED = "cuda_graph_impl", "cuda_graph_modules"
GRANULARITY, RECOMPUTED = "recompute_granularity", "recompute_modules"
DISPATCHER, CAPACITY, PADDED = (
    "moe_token_dispatcher_type", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
)  # fmt: skip
SHARED_OVERLAP = "moe_shared_expert_overlap"
ALLOCATOR, REGISTER = "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"
KNOWN = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")


def _impl(case: Case) -> str:
    return case.text(IMPL, "none")


def _by_layer(case: Case) -> tuple[str, ...]:
    """Modules captured layer by layer; () without graphs or with whole-iteration ones."""
    return case.parts(CAPTURED) if _impl(case) in ("transformer_engine", "local") else ()


def _unknown(case: Case) -> str | None:
    if _impl(case) not in ("none", "transformer_engine", "local", "full_iteration"):
        return f"no cuda_graph_impl {_impl(case)!r}"
    unknown = [name for name in case.parts(CAPTURED) if name not in KNOWN]
    return f"no CUDA graph module {', '.join(unknown)}" if unknown else None


def _modules_of_iteration(case: Case) -> str | None:
    wrong = _impl(case) == "full_iteration" and case.parts(CAPTURED)
    return "cuda_graph_modules with full_iteration graphs" if wrong else None


def _moe_and_router(case: Case) -> str | None:
    wrong = {"moe", "moe_router"} <= set(_by_layer(case))
    return "moe and moe_router both captured" if wrong else None


def _preprocess_alone(case: Case) -> str | None:
    # local graphs add the missing one by themselves: rule DUP-12.
    captured = case.parts(CAPTURED) if _impl(case) == "transformer_engine" else ()
    wrong = "moe_preprocess" in captured and "moe_router" not in captured
    return "moe_preprocess captured without moe_router" if wrong else None


def _no_dense_layer(case: Case) -> str | None:
    wrong = "mlp" in _by_layer(case) and case.model.first_dense_layers == 0
    return "mlp captured in a model without dense layers" if wrong else None


def _dropless_moe(case: Case) -> str | None:
    padded = case.knobs.get(CAPACITY) is not None and case.on(PADDED)
    return "moe captured without a padded capacity" if "moe" in _by_layer(case) and not padded else None


def _full_recompute(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "full" and _impl(case) in ("transformer_engine", "local")
    return "full recompute with CUDA graphs of layers" if wrong else None


def _recomputed_router(case: Case) -> str | None:
    selected = case.text(GRANULARITY) == "selective" and "moe" in case.parts(RECOMPUTED)
    wrong = selected and _impl(case) == "transformer_engine" and "moe_router" in case.parts(CAPTURED)
    return "moe recompute around a captured moe_router" if wrong else None


def _kept_norm(case: Case) -> str | None:
    """With Transformer Engine's layers the norm before the experts is the only one that is a module of its own, except
    under latent attention; and its output must leave the graph of a captured router."""
    selected = case.text(GRANULARITY) == "selective" and "layernorm" in case.parts(RECOMPUTED)
    captured = case.parts(CAPTURED) if _impl(case) == "transformer_engine" else ()
    if not selected or "moe_router" not in captured or case.model.multi_latent_attention:
        return None
    shared = case.model.moe_shared_expert_intermediate_size is not None and case.on(SHARED_OVERLAP)
    inside = "moe_preprocess" in captured and case.text(DISPATCHER, "allgather") == "alltoall" and not shared
    return None if inside else "layernorm recompute beside a captured moe_router is dropped by Megatron"


def _local_attention(case: Case) -> str | None:
    wrong = _impl(case) == "local" and case.parts(CAPTURED) == ("attn",)
    return "local CUDA graphs of attn alone fail inside the token dispatcher" if wrong else None


def _segments(case: Case) -> str | None:
    expandable = "expandable_segments:True" in case.env.get(ALLOCATOR, "")
    wrong = _impl(case) == "transformer_engine" and expandable and case.env.get(REGISTER) != "0"
    return "CUDA graphs with expandable segments and NCCL graph registration" if wrong else None


def _engine(case: Case) -> str | None:
    missing = case.stack is not None and case.stack.transformer_engine is None
    wrong = _impl(case) == "transformer_engine" and missing
    return "CUDA graphs by transformer_engine, which the workers lack" if wrong else None


def _inert_modules(case: Case) -> str | None:
    wrong = _impl(case) == "none" and case.parts(CAPTURED)
    return "cuda_graph_modules without CUDA graphs are ignored" if wrong else None


def _whole_layer(case: Case) -> str | None:
    wrong = _impl(case) in ("transformer_engine", "local") and not case.parts(CAPTURED)
    return "CUDA graphs without modules capture the whole layer, dropless dispatch included" if wrong else None


def _local_half(case: Case) -> str | None:
    found = {"moe_router", "moe_preprocess"} & set(case.parts(CAPTURED))
    wrong = _impl(case) == "local" and len(found) == 1
    return "local CUDA graphs capture moe_router and moe_preprocess together" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
_GRAPHS = frozenset({IMPL, CAPTURED})
RULES = (
    Rule("CGR-01", _GRAPHS, _unknown, f"{_CONFIG}:2445", f"modules: {', '.join(KNOWN)}"),
    Rule("CGR-02", _GRAPHS, _modules_of_iteration, f"{_CONFIG}:2461", "leave cuda_graph_modules out"),
    Rule("CGR-06", _GRAPHS, _moe_and_router, f"{_CONFIG}:2484", "capture one of them"),
    Rule("CGR-07", _GRAPHS, _preprocess_alone, f"{_CONFIG}:2489", "add moe_router"),
    Rule("CGR-09", _GRAPHS, _no_dense_layer, f"{_CONFIG}:2501", "leave mlp out"),
    Rule("CGR-10", _GRAPHS | {CAPACITY, PADDED}, _dropless_moe, f"{_CONFIG}:2509", "capture moe_router instead"),
    Rule("CGR-13", frozenset({IMPL, GRANULARITY}), _full_recompute, f"{_CONFIG}:2523", "use selective recompute"),
    Rule(
        "CGR-14", _GRAPHS | {GRANULARITY, RECOMPUTED}, _recomputed_router, f"{_CONFIG}:2533",
        "recompute other modules or capture attn only",
    ),
    Rule(
        "CGR-20", frozenset({IMPL, ALLOCATOR, REGISTER}), _segments, "core/transformer/cuda_graphs.py:2102",
        "set NCCL_GRAPH_REGISTER to 0",
    ),
    Rule("RUN-01", _GRAPHS, _local_attention, "seen on one H200 (0.19.2)", "use transformer_engine"),
    Rule("STK-01", frozenset({IMPL}), _engine, "core/transformer/cuda_graphs.py", "install it or use local graphs"),
    Rule(
        "DUP-16", _GRAPHS | {GRANULARITY, RECOMPUTED, DISPATCHER, SHARED_OVERLAP}, _kept_norm,
        "core/transformer/transformer_layer.py:458, core/models/gpt/gpt_layer_specs.py:318; seen on an H200",
        "leave layernorm out, or capture moe_preprocess too and use alltoall",
    ),
    Rule("DUP-10", _GRAPHS, _inert_modules, "TRAP-14", "leave cuda_graph_modules out"),
    Rule("DUP-11", _GRAPHS, _whole_layer, "TRAP-15; core/transformer/transformer_config.py", "name the modules"),
    Rule("DUP-12", _GRAPHS, _local_half, f"{_CONFIG}:2472, TRAP-17", "name both"),
)  # fmt: skip
