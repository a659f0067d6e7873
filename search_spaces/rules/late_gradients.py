"""Rules of what follows the backward pass: late weight gradients, and their reduction.

`fused` below: gradient_accumulation_fusion, off in megatron-core, on where a launcher is not told otherwise.
"""

from search_spaces.rules.rule import EXPERT_GRID, WORLD, Case, Launcher, Rule
from search_spaces.rules.versions import older

EP_OVERLAP, DELAY_WGRAD = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"
DISPATCH_BACKWARD, LEGACY = "overlap_dispatch_backward_with_experts_wgrad", "moe_use_legacy_grouped_gemm"
FUSED, BIAS, SHARED_OVERLAP = "gradient_accumulation_fusion", "add_bias_linear", "moe_shared_expert_overlap"
GRAPHS, CAPTURED, IMPLEMENTATION = "cuda_graph_impl", "cuda_graph_modules", "transformer_impl"
GRAD_REDUCE, SHARDED = "overlap_grad_reduce", "use_distributed_optimizer"
COMES_WITH_SHARDS = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "fp8_param", "fp4_param")
DEFER, LIMIT, BUCKET = "defer_embedding_wgrad_compute", "wgrad_deferral_limit", "bucket_size"
PP = "pipeline_model_parallel_size"
MLM: frozenset[Launcher] = frozenset({"megatron-lm"})
BOTH_LAUNCHERS: frozenset[Launcher] = frozenset({"megatron-lm", "megatron-bridge"})


def _engine(case: Case) -> str | None:
    """The target's Transformer Engine; None: unknown or not installed."""
    return case.stack.transformer_engine if case.stack else None


def _engine_before(case: Case, release: str) -> bool:
    engine = _engine(case)
    return engine is not None and older(engine, release)


def _fused(case: Case) -> bool:
    if case.knobs.get(FUSED) is None:
        return bool(case.launchers & BOTH_LAUNCHERS)
    return case.on(FUSED)


def _late_without_overlap(case: Case) -> str | None:
    wrong = case.on(DELAY_WGRAD) and not case.on(EP_OVERLAP)
    return "delay_wgrad_compute without overlap_moe_expert_parallel_comm" if wrong else None


def _late_legacy(case: Case) -> str | None:
    return f"delay_wgrad_compute with {LEGACY}" if case.on(DELAY_WGRAD) and case.on(LEGACY) else None


def _late_in_old_graphs(case: Case) -> str | None:
    wrong = case.on(DELAY_WGRAD) and case.text(GRAPHS) == "transformer_engine" and _engine_before(case, "2.10")
    return f"delay_wgrad_compute inside CUDA graphs with transformer-engine {_engine(case)}" if wrong else None


def _late_and_reduced(case: Case) -> str | None:
    least = "2.8" if "megatron-lm" in case.launchers else "2.7"
    if not (case.on(DELAY_WGRAD) and case.on(GRAD_REDUCE) and _engine_before(case, least)):
        return None
    return f"delay_wgrad_compute with {GRAD_REDUCE} needs transformer-engine {least}, not {_engine(case)}"


def late_and_captured(case: Case) -> bool:
    """Whether weights whose gradients come late are inside captured modules."""
    captured, shared = case.parts(CAPTURED), case.model.moe_shared_expert_intermediate_size is not None
    inside = "attn" in captured or ("moe_router" in captured and shared and not case.on(SHARED_OVERLAP))
    return case.on(DELAY_WGRAD) and inside


def _late_in_graphs(case: Case) -> str | None:
    if not late_and_captured(case):
        return None
    if "megatron-bridge" not in case.launchers and not case.on(GRAD_REDUCE):
        return None  # Megatron-LM looks only then
    if _engine_before(case, "2.12"):
        return f"delay_wgrad_compute with captured weights needs transformer-engine 2.12, not {_engine(case)}"
    if not _fused(case):
        return f"delay_wgrad_compute with captured weights but without {FUSED}"
    biased = "attn" in case.parts(CAPTURED) and (case.on(BIAS) or case.model.add_qkv_bias or case.on("add_qkv_bias"))
    return "delay_wgrad_compute with captured attention that has biases" if biased else None


def _late_and_fused(case: Case) -> str | None:
    if not case.on(DELAY_WGRAD) or not _engine_before(case, "2.7"):
        return None
    if "megatron-lm" in case.launchers and not _fused(case):
        return f"delay_wgrad_compute without {FUSED} needs transformer-engine 2.7, not {_engine(case)}"
    wrong = "megatron-bridge" in case.launchers and _fused(case)
    return f"delay_wgrad_compute with {FUSED} needs transformer-engine 2.7, not {_engine(case)}" if wrong else None


def _late_local(case: Case) -> str | None:
    kind = case.text(IMPLEMENTATION, "transformer_engine")
    wrong = case.on(DELAY_WGRAD) and kind != "transformer_engine"
    return f"delay_wgrad_compute with {IMPLEMENTATION} {kind}" if wrong else None


def _dispatch_backward(case: Case) -> str | None:
    if not case.on(DISPATCH_BACKWARD):
        return None
    others = [name for name in (EP_OVERLAP, DELAY_WGRAD) if case.on(name)]
    if others:
        return f"{DISPATCH_BACKWARD} with {' and '.join(others)}"
    wrong = _engine_before(case, "2.3")
    return f"{DISPATCH_BACKWARD} needs transformer-engine 2.3, not {_engine(case)}" if wrong else None


def _deferred_embedding(case: Case) -> str | None:
    if not case.on(DEFER):
        return None
    if case.layout.pipeline == 1:
        return f"{DEFER} with a single pipeline stage"
    if not _fused(case):
        return f"{DEFER} without {FUSED}"
    return f"{LIMIT} {case.knobs[LIMIT]} is below 0" if case.integer(LIMIT, 0) < 0 else None


def _unused_buckets(case: Case) -> str | None:
    wrong = case.knobs.get(BUCKET) is not None and case.knobs.get(GRAD_REDUCE) is False
    return f"{BUCKET} without {GRAD_REDUCE} changes nothing: there is one bucket" if wrong else None


def _nothing_to_reduce(case: Case) -> str | None:
    alone = case.data_parallel == 1 and case.expert_data_parallel == 1
    return "overlap_grad_reduce with one data-parallel rank changes nothing" if case.on(GRAD_REDUCE) and alone else None


def _nothing_to_shard(case: Case) -> str | None:
    """What only comes with it (state in fewer bits, on the host, FP8 weights) is another run on one rank too."""
    alone = case.data_parallel == 1 and case.expert_data_parallel == 1
    wrong = case.on(SHARDED) and alone and not any(case.on(name) for name in COMES_WITH_SHARDS)
    return "use_distributed_optimizer with one data-parallel rank shards nothing" if wrong else None


def _sharded_sgd(case: Case) -> str | None:
    wrong = case.on(SHARDED) and case.training.optimizer == "sgd"
    return "use_distributed_optimizer does not take sgd" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
_IN_GRAPHS = frozenset({DELAY_WGRAD, CAPTURED, SHARED_OVERLAP, GRAD_REDUCE, FUSED, BIAS, "add_qkv_bias"})
RULES = (
    Rule(
        "OVL-13", frozenset({EP_OVERLAP, DELAY_WGRAD}), _late_without_overlap, f"{_CONFIG}:2750",
        "switch the overlap on or delay_wgrad_compute off",
    ),
    Rule(
        "OVL-13b", frozenset({DELAY_WGRAD, LEGACY}), _late_legacy,
        "megatron-core 0.16.0 core/transformer/transformer_config.py:1914", f"switch {LEGACY} off", until="0.17",
    ),
    Rule(
        "OVL-14", frozenset({DELAY_WGRAD, GRAPHS}), _late_in_old_graphs, f"{_CONFIG}:2754",
        "use transformer-engine 2.10 or newer", since="0.16",
    ),
    Rule(
        "OVL-15", frozenset({DELAY_WGRAD, GRAD_REDUCE}), _late_and_reduced,
        "MLM arguments.py:1826; Bridge training/comm_overlap.py:522", "upgrade it or switch one off",
        launchers=BOTH_LAUNCHERS,
    ),
    Rule(
        "OVL-16", _IN_GRAPHS, _late_in_graphs, "MLM arguments.py:1829-1846; Bridge training/comm_overlap.py:537-557",
        "capture other modules, or change what is lacking", launchers=BOTH_LAUNCHERS,
    ),
    Rule(
        "OVL-17", frozenset({DELAY_WGRAD, FUSED}), _late_and_fused,
        "MLM arguments.py:1849; Bridge training/comm_overlap.py:527 (the opposite)", "upgrade it",
        launchers=BOTH_LAUNCHERS,
    ),
    Rule(
        "OVL-18", frozenset({DELAY_WGRAD, IMPLEMENTATION}), _late_local, "MLM arguments.py:1823",
        f"set {IMPLEMENTATION} to transformer_engine", launchers=MLM,
    ),
    Rule(
        "OVL-19", frozenset({DISPATCH_BACKWARD, EP_OVERLAP, DELAY_WGRAD}), _dispatch_backward, f"{_CONFIG}:2760",
        "keep one way to overlap, with transformer-engine 2.3 or newer", since="0.18",
    ),
    Rule(
        "OVL-27", frozenset({DEFER, PP, FUSED, LIMIT}), _deferred_embedding, "core/model_parallel_config.py:545",
        "switch it off",
    ),
    Rule(
        "TRAP-26", frozenset({BUCKET, GRAD_REDUCE}), _unused_buckets,
        "read in core/distributed/distributed_data_parallel.py, which accepts it", f"leave {BUCKET} out",
        level="runtime risk",
    ),
    Rule(
        "DUP-02", WORLD | EXPERT_GRID | {GRAD_REDUCE}, _nothing_to_reduce,
        "read in core/distributed/param_and_grad_buffer.py: a group of one rank", "set it to false",
    ),
    Rule(
        "DUP-03", WORLD | EXPERT_GRID | {SHARDED, *COMES_WITH_SHARDS}, _nothing_to_shard,
        "read in core/optimizer/distrib_optimizer.py: a shard is the whole", "set it to false",
    ),
    Rule(
        "OPT-01", frozenset({SHARDED}), _sharded_sgd, "core/optimizer/distrib_optimizer.py:689; seen on gloo",
        "set training.optimizer to adam or use_distributed_optimizer to false", level="build",
    ),
)  # fmt: skip
