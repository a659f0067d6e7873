"""Rules of CUDA graphs: who captures and what. What must stay outside of them is in `graph_clashes`."""

from search_spaces.partial import PartialModel, PartialTraining
from search_spaces.rules import graph_clashes
from search_spaces.rules.graph_clashes import (
    CAPACITY,
    CAPTURED,
    DISPATCHER,
    GRAPHS,
    IMPL,
    LAYERED,
    OFFLOAD,
    OLD_PADDING,
    OLD_WORDS,
    PADDED,
    PADDING,
    REMAT,
    SCOPE,
    SHARDS,
    SWITCHES,
    TP,
    WARMUP,
    captured,
    implementation,
    layered,
    padded,
    weight_shards,
    words,
)
from search_spaces.rules.recompute import FREQUENCY, has_dense_layers
from search_spaces.rules.rule import Case, Launcher, Rule

KNOWN = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
ALLOCATOR, REGISTER, PRIORITY = "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER", "CUDA_GRAPHS_USE_NODE_PRIORITY"
TRACKER, MLM_TRACKER, TRANSFORMER = "use_te_rng_tracker", "te_rng_tracker", "transformer_impl"
NAN_CHECK, BRIDGE_NAN_CHECK = "check_for_nan_in_loss_and_grad", "check_for_nan_in_loss"


def _unknown(case: Case) -> str | None:
    if case.text(IMPL, "none") not in ("none", "full_iteration", *LAYERED):
        return f"no cuda_graph_impl {case.text(IMPL)!r}"
    unknown = [name for name in words(case) if name not in (*KNOWN, *OLD_WORDS)]
    if unknown:
        return f"no CUDA graph module {', '.join(unknown)}"
    wrong = "full" in words(case) and len(words(case)) > 1
    return "full captured beside other modules" if wrong else None


def _young_implementation(case: Case) -> str | None:
    wrong = case.text(IMPL) == "full_iteration"
    return "cuda_graph_impl full_iteration, which is a scope of local graphs in this release" if wrong else None


def _young_module(case: Case) -> str | None:
    wrong = implementation(case) in LAYERED and captured(case) not in ((), ("attn",))
    return "CUDA graphs of parts of a layer other than attn in this release" if wrong else None


def _modules_of_iteration(case: Case) -> str | None:
    wrong = implementation(case) == "full_iteration" and captured(case)
    return "cuda_graph_modules with full_iteration graphs" if wrong else None


def _old_names(case: Case) -> str | None:
    if case.knobs.get(SCOPE) is not None and case.parts(CAPTURED) not in ((), ("full",)):
        return f"{SCOPE} and {CAPTURED} at once"
    switches = [name for name in SWITCHES if case.on(name)]
    if switches and case.text(IMPL, "none") != "none":
        return f"{' and '.join(switches)} with {IMPL}"
    if len(switches) == 2:
        return f"{' and '.join(switches)} at once"
    wrong = "full_iteration" in words(case) and implementation(case) == "transformer_engine"
    return "the scope full_iteration with graphs by transformer_engine" if wrong else None


def _offloaded(case: Case) -> str | None:
    return f"CUDA graphs of layers with {OFFLOAD}" if implementation(case) in LAYERED and case.on(OFFLOAD) else None


def _moe_and_router(case: Case) -> str | None:
    wrong = {"moe", "moe_router"} <= set(layered(case))
    return "moe and moe_router both captured" if wrong else None


def _preprocess_alone(case: Case) -> str | None:
    # Local graphs add the missing one by themselves: see `layered`.
    wrong = "moe_preprocess" in layered(case) and "moe_router" not in layered(case)
    return "moe_preprocess captured without moe_router" if wrong else None


def _no_experts(case: Case) -> bool:
    return case.dense or case.model.num_moe_experts <= 1


def _no_moe_layer(case: Case) -> str | None:
    found = [name for name in ("moe", "moe_router") if name in layered(case)]
    return f"{' and '.join(found)} captured in a model without experts" if found and _no_experts(case) else None


def _no_dense_layer(case: Case) -> str | None:
    wrong = "mlp" in layered(case) and not _no_experts(case) and not has_dense_layers(case)
    return "mlp captured in a model without dense layers" if wrong else None


def _dropless_moe(case: Case) -> str | None:
    wrong = "moe" in layered(case) and not padded(case) and not _no_experts(case)
    return "moe captured without a padded capacity" if wrong else None


def _drops(case: Case) -> bool:
    return case.number(CAPACITY, -1.0) >= 0  # below zero is none


def _alltoall(case: Case) -> bool:
    return case.text(DISPATCHER, "allgather") == "alltoall" and not padded(case) and not _no_experts(case)


def _waiting_preprocess(case: Case) -> str | None:
    wrong = "moe_preprocess" in layered(case) and _alltoall(case) and (_drops(case) or case.on(OLD_PADDING))
    return "moe_preprocess captured while it waits for the host to know the token counts" if wrong else None


def _waiting_at_run_time(case: Case) -> str | None:
    """The configuration looks at the old name of the padding only, and at no whole layer."""
    whole = implementation(case) != "none" and not captured(case)
    inside = whole or "moe_preprocess" in layered(case)
    waits = _drops(case) or case.on(PADDING) or case.on(OLD_PADDING)
    wrong = inside and waits and _alltoall(case)
    return "the token counts that alltoall waits for are made inside the CUDA graph" if wrong else None


def _local_attention(case: Case) -> str | None:
    wrong = implementation(case) == "local" and captured(case) == ("attn",)
    return "local CUDA graphs of attn hold a whole GPT layer and fail inside its token dispatcher" if wrong else None


def _expandable(case: Case) -> bool:
    return "expandable_segments:True" in case.env.get(ALLOCATOR, "")


def _segments(case: Case) -> str | None:
    wrong = implementation(case) == "transformer_engine" and _expandable(case) and case.env.get(REGISTER) != "0"
    return "CUDA graphs with expandable segments and NCCL graph registration" if wrong else None


def _local_segments(case: Case) -> str | None:
    old = case.compute_capability is None or case.compute_capability < (10, 0)
    wrong = implementation(case) == "local" and old and _expandable(case) and case.env.get(REGISTER) != "0"
    return "local CUDA graphs with expandable segments and NCCL graph registration" if wrong else None


def _any_segments(case: Case) -> str | None:
    wrong = implementation(case) in LAYERED and _expandable(case)
    return "CUDA graphs with expandable segments in this release" if wrong else None


def _random_numbers(case: Case) -> str | None:
    own = case.on(TRACKER) or case.on(MLM_TRACKER) or case.text(TRANSFORMER, "transformer_engine") != "local"
    wrong = implementation(case) == "local" and not own
    return "local CUDA graphs with random numbers that a graph cannot replay" if wrong else None


def _bridge_random_numbers(case: Case) -> str | None:
    # Bridge's own recipes set it; a configuration that does not say it may build on one.
    wrong = implementation(case) != "none" and case.knobs.get(TRACKER) is False
    return f"CUDA graphs with {TRACKER} false" if wrong else None


def _bridge_nan_check(case: Case) -> str | None:
    wrong = implementation(case) == "full_iteration" and case.on(BRIDGE_NAN_CHECK)
    return f"full_iteration graphs with {BRIDGE_NAN_CHECK}" if wrong else None


def _nan_check(case: Case) -> str | None:
    wrong = implementation(case) == "full_iteration" and case.on(NAN_CHECK)
    return f"full_iteration graphs with {NAN_CHECK}" if wrong else None


def _nan_check_not_said(case: Case) -> str | None:
    wrong = implementation(case) == "full_iteration" and case.knobs.get(NAN_CHECK) is None
    return f"full_iteration graphs, and {NAN_CHECK}, which is on by default, is not said" if wrong else None


def _weight_shards(case: Case) -> str | None:
    capability = case.compute_capability
    new = capability is not None and capability >= (10, 0)
    wrong = new and weight_shards(case) > 1 and implementation(case) != "none" and case.env.get(PRIORITY) != "1"
    return f"CUDA graphs with generalized tensor parallelism without {PRIORITY}=1" if wrong else None


def _engine(case: Case) -> str | None:
    missing = case.stack is not None and case.stack.transformer_engine is None
    wrong = implementation(case) == "transformer_engine" and missing
    return "CUDA graphs by transformer_engine, which the workers lack" if wrong else None


def _whole_layer(case: Case) -> str | None:
    wrong = implementation(case) in LAYERED and not captured(case) and not padded(case) and not _no_experts(case)
    return "CUDA graphs without modules capture the whole layer, dropless dispatch included" if wrong else None


def _nothing_to_capture(case: Case) -> str | None:
    # A shape that is known in full is a transformer: it has no other layers.
    known = not isinstance(case.model, PartialModel)
    wrong = known and implementation(case) in LAYERED and captured(case) == ("mamba",)
    return "mamba layers captured in a model that has none: the run would be without graphs" if wrong else None


def _eager_steps(case: Case) -> str | None:
    # Of a configuration without a training job nothing is measured.
    if implementation(case) == "none" or isinstance(case.training, PartialTraining):
        return None
    eager, unmeasured = case.integer(WARMUP, 3), case.training.warmup_steps
    wrong = unmeasured <= eager
    return f"{eager} eager steps and a capture before CUDA graphs replay, {unmeasured} unmeasured" if wrong else None


_CONFIG, _HELPER = "core/transformer/transformer_config.py", "core/transformer/cuda_graphs.py"
_LAYER = "core/transformer/transformer_layer.py"
_MLM, _BRIDGE = frozenset[Launcher]({"megatron-lm"}), frozenset[Launcher]({"megatron-bridge"})
_SEGMENTS = GRAPHS | {ALLOCATOR, REGISTER}
_COUNTS = GRAPHS | {CAPACITY, PADDED, DISPATCHER, OLD_PADDING}
RULES = (
    Rule("CGR-01", GRAPHS, _unknown, f"{_CONFIG}:2445", f"modules: {', '.join(KNOWN)}"),
    Rule(
        "CGR-01b", frozenset({IMPL}), _young_implementation, "megatron-core 0.17.0, transformer_config.py",
        "use local, or megatron-core 0.18", until="0.18",
    ),
    Rule(
        "CGR-01c", GRAPHS, _young_module, "megatron-core 0.15.0, transformer_config.py:646",
        "capture attn only, or use megatron-core 0.16", until="0.16",
    ),
    Rule(
        "CGR-02", GRAPHS, _modules_of_iteration, f"{_CONFIG}:2461; MLM arguments.py:1888",
        "leave cuda_graph_modules out", since="0.18",
    ),
    Rule("CGR-03", GRAPHS, _old_names, f"{_CONFIG}:2366", f"use {IMPL} and {CAPTURED} only"),
    Rule("CGR-04", GRAPHS | {OFFLOAD}, _offloaded, f"{_CONFIG}:2468", "choose one"),
    Rule("CGR-06", GRAPHS, _moe_and_router, f"{_CONFIG}:2484", "capture one of them"),
    Rule("CGR-07", GRAPHS, _preprocess_alone, f"{_CONFIG}:2489", "add moe_router"),
    Rule("CGR-08", GRAPHS, _no_moe_layer, f"{_CONFIG}:2493", "capture attn or mlp"),
    Rule("CGR-09", GRAPHS | {FREQUENCY}, _no_dense_layer, f"{_CONFIG}:2501", "leave mlp out"),
    Rule("CGR-10", GRAPHS | {CAPACITY, PADDED}, _dropless_moe, f"{_CONFIG}:2509", "capture moe_router instead"),
    Rule("CGR-11", _COUNTS, _waiting_preprocess, f"{_CONFIG}:2516", "leave moe_preprocess out"),
    Rule(
        "CGR-12", _COUNTS | {PADDING}, _waiting_at_run_time, "core/transformer/moe/token_dispatcher.py:612",
        "capture attn and moe_router only, or use another dispatcher", "first step",
    ),
    Rule("CGR-20", _SEGMENTS, _segments, f"{_HELPER}:2102; MLM arguments.py:1881", f"set {REGISTER} to 0", "build"),
    Rule(
        "CGR-20b", _SEGMENTS, _local_segments, "megatron-core 0.18.0, cuda_graphs.py:1503",
        f"set {REGISTER} to 0", "build", until="0.19",
    ),
    Rule(
        "CGR-20c", _SEGMENTS, _any_segments, "megatron-core 0.15.0, cuda_graphs.py:1062, 1349",
        f"leave expandable_segments out of {ALLOCATOR}", "build", until="0.16",
    ),
    Rule(
        "CGR-21", GRAPHS | {TRACKER, MLM_TRACKER, TRANSFORMER}, _random_numbers,
        "MLM arguments.py:1873; core/transformer/cuda_graphs.py:1822", f"set {MLM_TRACKER} to true", "build",
        launchers=_MLM,
    ),
    Rule(
        "CGR-23", GRAPHS | {NAN_CHECK}, _nan_check, "MLM arguments.py:1196", f"set {NAN_CHECK} to false",
        launchers=_MLM,
    ),
    Rule(
        "CGR-23c", GRAPHS | {NAN_CHECK}, _nan_check_not_said, "MLM arguments.py:1196", f"set {NAN_CHECK} to false",
        "runtime risk", launchers=_MLM,
    ),
    Rule(
        "CGR-21b", GRAPHS | {TRACKER}, _bridge_random_numbers, "Bridge models/gpt_provider.py:234",
        f"set {TRACKER} to true", "build", launchers=_BRIDGE,
    ),
    Rule(
        "CGR-23b", GRAPHS | {BRIDGE_NAN_CHECK}, _bridge_nan_check, "Bridge training/config.py:1371",
        f"set {BRIDGE_NAN_CHECK} to false", launchers=_BRIDGE,
    ),
    Rule(
        "CGR-26", GRAPHS | {SHARDS, REMAT, TP, PRIORITY}, _weight_shards, "MLM arguments.py:1501",
        f"set {PRIORITY} to 1", launchers=_MLM, since="0.19",
    ),
    Rule(
        "RUN-01", GRAPHS, _local_attention, f"seen on one H200 (0.19.2); {_LAYER}:557", "use transformer_engine",
        "first step",
    ),
    Rule(
        "RUN-03", GRAPHS | {CAPACITY, PADDED}, _whole_layer, "TRAP-15: accepted at first, never seen to run",
        "name the modules", "runtime risk",
    ),
    Rule("STK-01", GRAPHS, _engine, f"{_HELPER}:2096", "install it or use local graphs", "build"),
    Rule("TRAP-16", GRAPHS, _nothing_to_capture, f"{_HELPER}:2043", "capture attn", "first step"),
    Rule(
        "TRAP-28", GRAPHS | {WARMUP}, _eager_steps, f"TRAP-28; {_HELPER}", "set training.warmup_steps to more",
        "runtime risk",
    ),
    *graph_clashes.RULES,
)  # fmt: skip
