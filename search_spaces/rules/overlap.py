"""Rules of overlap: expert all-to-all behind compute, late weight gradients, gradient reduction, sharded optimizer."""

from search_spaces.rules.rule import EXPERT_GRID, WORLD, Case, Rule
from search_spaces.rules.versions import older

EP_OVERLAP, DELAY_WGRAD = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"
GRAD_REDUCE, SHARDED = "overlap_grad_reduce", "use_distributed_optimizer"
PP, VPP, EP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
DISPATCHER, MBS = "moe_token_dispatcher_type", "micro_batch_size"
GRANULARITY, METHOD, LAYERS = "recompute_granularity", "recompute_method", "recompute_num_layers"
RECOMPUTED, GRAPHS, CAPTURED = "recompute_modules", "cuda_graph_impl", "cuda_graph_modules"


def _old_torch(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.stack is not None and older(case.stack.torch, "2.6")
    return "EP overlap hangs with torch older than 2.6.0" if wrong else None


def _no_chunks(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.layout.pipeline > 1 and case.layout.virtual_pipeline is None
    return "EP overlap with pipeline stages but no virtual stages" if wrong else None


def _no_expert_parallelism(case: Case) -> str | None:
    return "EP overlap with EP 1 has nothing to overlap" if case.on(EP_OVERLAP) and case.layout.expert == 1 else None


def _dispatcher(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.text(DISPATCHER, "allgather") not in ("alltoall", "flex")
    return "EP overlap with the allgather dispatcher" if wrong else None


def _full_recompute(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.text(GRANULARITY) == "full"
    return "EP overlap with full recompute" if wrong else None


def _recompute_method(case: Case) -> str | None:
    return "EP overlap with a recompute_method" if case.on(EP_OVERLAP) and case.text(METHOD) else None


def _recompute_layers(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.knobs.get(LAYERS) is not None
    return "EP overlap with recompute_num_layers" if wrong else None


def _moe_recompute(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and "moe" in case.parts(RECOMPUTED)
    return "EP overlap with moe among the recompute_modules" if wrong else None


def _full_precision(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.training.params_dtype == "fp32"
    return "EP overlap with an fp32 model" if wrong else None


def _whole_mlp_captured(case: Case) -> str | None:
    captured = set(case.parts(CAPTURED)) & {"moe", "mlp"}
    wrong = case.on(EP_OVERLAP) and case.text(GRAPHS) == "transformer_engine" and captured
    return f"EP overlap with {' and '.join(sorted(captured))} inside CUDA graphs" if wrong else None


def _whole_layer_captured(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.text(GRAPHS) == "transformer_engine" and not case.parts(CAPTURED)
    return "EP overlap with whole layers inside CUDA graphs fails at replay" if wrong else None


def _one_microbatch(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.microbatches == 1
    return "EP overlap with one micro-batch a step has nothing to hide behind" if wrong else None


def _late_without_overlap(case: Case) -> str | None:
    wrong = case.on(DELAY_WGRAD) and not case.on(EP_OVERLAP)
    return "delay_wgrad_compute without overlap_moe_expert_parallel_comm" if wrong else None


def _late_in_old_graphs(case: Case) -> str | None:
    engine = case.stack.transformer_engine if case.stack else None
    wrong = case.on(DELAY_WGRAD) and case.text(GRAPHS) == "transformer_engine" and engine and older(engine, "2.10")
    return f"delay_wgrad_compute inside CUDA graphs with transformer-engine {engine}" if wrong else None


def _nothing_to_reduce(case: Case) -> str | None:
    alone = case.data_parallel == 1 and case.expert_data_parallel == 1
    return "overlap_grad_reduce with one data-parallel rank changes nothing" if case.on(GRAD_REDUCE) and alone else None


def _nothing_to_shard(case: Case) -> str | None:
    alone = case.data_parallel == 1 and case.expert_data_parallel == 1
    wrong = case.on(SHARDED) and alone
    return "use_distributed_optimizer with one data-parallel rank shards nothing" if wrong else None


def _sharded_sgd(case: Case) -> str | None:
    wrong = case.on(SHARDED) and case.training.optimizer == "sgd"
    return "use_distributed_optimizer does not take sgd" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
RULES = (
    Rule("OVL-01", frozenset({EP_OVERLAP}), _old_torch, f"{_CONFIG}:2671", "upgrade torch or switch it off"),
    Rule(
        "OVL-02", frozenset({EP_OVERLAP, PP, VPP}), _no_chunks, f"{_CONFIG}:2675",
        "set virtual_pipeline_model_parallel_size or PP 1",
    ),
    Rule("OVL-03", frozenset({EP_OVERLAP, EP}), _no_expert_parallelism, f"{_CONFIG}:2680", "raise EP or switch it off"),
    Rule("OVL-04", frozenset({EP_OVERLAP, DISPATCHER}), _dispatcher, f"{_CONFIG}:2683", "use alltoall or flex"),
    Rule(
        "OVL-05", frozenset({EP_OVERLAP, GRANULARITY}), _full_recompute, f"{_CONFIG}:2688",
        "use selective recompute or switch the overlap off",
    ),
    Rule("OVL-06", frozenset({EP_OVERLAP, METHOD}), _recompute_method, f"{_CONFIG}:2691", "leave recompute_method out"),
    Rule("OVL-07", frozenset({EP_OVERLAP, LAYERS}), _recompute_layers, f"{_CONFIG}:2694", "leave it out"),
    Rule("OVL-08", frozenset({EP_OVERLAP, RECOMPUTED}), _moe_recompute, f"{_CONFIG}:2697", "recompute other modules"),
    Rule("OVL-09", frozenset({EP_OVERLAP}), _full_precision, f"{_CONFIG}:2702", "set training.params_dtype to bf16"),
    Rule(
        "OVL-11", frozenset({EP_OVERLAP, GRAPHS, CAPTURED}), _whole_mlp_captured, f"{_CONFIG}:2740",
        "capture attn, moe_router and moe_preprocess only",
    ),
    Rule(
        "OVL-12", frozenset({EP_OVERLAP, GRAPHS, CAPTURED}), _whole_layer_captured,
        "core/transformer/transformer_layer.py:1263 (the config accepts it)", "name the cuda_graph_modules",
    ),
    Rule(
        "OVL-13", frozenset({EP_OVERLAP, DELAY_WGRAD}), _late_without_overlap, f"{_CONFIG}:2750",
        "switch the overlap on or delay_wgrad_compute off",
    ),
    Rule(
        "OVL-14", frozenset({DELAY_WGRAD, GRAPHS}), _late_in_old_graphs, f"{_CONFIG}:2754",
        "use transformer-engine 2.10 or newer",
    ),
    Rule(
        "TRAP-29", WORLD | {EP_OVERLAP, MBS}, _one_microbatch, "core/pipeline_parallel/combined_1f1b.py",
        "lower the micro-batch or switch the overlap off",
    ),
    Rule(
        "DUP-02", WORLD | EXPERT_GRID | {GRAD_REDUCE}, _nothing_to_reduce,
        "core/distributed/param_and_grad_buffer.py: a group of one rank", "set it to false",
    ),
    Rule(
        "DUP-03", WORLD | EXPERT_GRID | {SHARDED}, _nothing_to_shard,
        "core/optimizer/distrib_optimizer.py: a shard is the whole", "set it to false",
    ),
    Rule(
        "OPT-01", frozenset({SHARDED}), _sharded_sgd, "core/optimizer/distrib_optimizer.py; seen on gloo",
        "set training.optimizer to adam or use_distributed_optimizer to false",
    ),
)  # fmt: skip
