"""Rules of overlap: the expert all-to-all behind compute (EP overlap). What follows backward is in `late_gradients`.

`core/` paths are megatron-core 0.19.2; MLM is Megatron-LM core_r0.19.0; Bridge is Megatron Bridge 0.6.2.
"""

from search_spaces.rules import late_gradients
from search_spaces.rules.hybridep import BACKEND_KNOBS, backend
from search_spaces.rules.pipeline import LAYOUT, virtual_stages
from search_spaces.rules.rule import WORLD, Case, Launcher, Rule
from search_spaces.rules.versions import older

EP_OVERLAP, TP_OVERLAP = "overlap_moe_expert_parallel_comm", "tp_comm_overlap"
TP, SP = "tensor_model_parallel_size", "sequence_parallel"
PP, VPP, EP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
DISPATCHER, MBS, MTP = "moe_token_dispatcher_type", "micro_batch_size", "mtp_num_layers"
GRANULARITY, METHOD, LAYERS = "recompute_granularity", "recompute_method", "recompute_num_layers"
RECOMPUTED, GRAPHS, CAPTURED = "recompute_modules", "cuda_graph_impl", "cuda_graph_modules"
SHARED_OVERLAP, EARLY_RELEASE = "moe_shared_expert_overlap", "ep_overlap_early_attn_memory_release"
OFFLOAD, OFFLOADED, STATIC = "fine_grained_activation_offloading", "offload_modules", "moe_ncclep_static_shape"
FSDP, DOUBLE_BUFFER, CONNECTIONS = "use_megatron_fsdp", "fsdp_double_buffer", "CUDA_DEVICE_MAX_CONNECTIONS"
PARTIAL = "num_microbatches_with_partial_activation_checkpoints"
MLM: frozenset[Launcher] = frozenset({"megatron-lm"})


def _old_torch(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.stack is not None and older(case.stack.torch, "2.6")
    return "EP overlap hangs with torch older than 2.6.0" if wrong else None


def _no_chunks(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.layout.pipeline > 1 and virtual_stages(case) is None
    return "EP overlap with pipeline stages but no virtual stages" if wrong else None


def _no_expert_parallelism(case: Case) -> str | None:
    if not case.on(EP_OVERLAP):
        return None
    if case.layout.expert == 1:
        return "EP overlap with EP 1 has nothing to overlap"
    return "EP overlap with one expert" if not case.dense and case.model.num_moe_experts <= 1 else None


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


def _full_precision(case: Case) -> bool:
    if case.on("bf16") or case.on("fp16"):
        return False
    return case.knobs.get("bf16") is not None or case.training.params_dtype == "fp32"


def _numbers_and_shared(case: Case) -> str | None:
    if not case.on(EP_OVERLAP):
        return None
    if case.on(SHARED_OVERLAP):
        return f"EP overlap with {SHARED_OVERLAP}"
    return "EP overlap with an fp32 model" if _full_precision(case) else None


def _many_mtp_layers(case: Case) -> str | None:
    count = case.integer(MTP, 0)
    return f"EP overlap with {count} MTP layers" if case.on(EP_OVERLAP) and count not in (0, 1) else None


def _said_no_mtp(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.knobs.get(MTP) is not None and case.integer(MTP, 0) == 0
    return f"EP overlap with {MTP} 0, which releases before 0.19 take for a number of layers" if wrong else None


def _mtp_on_one_stage(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.integer(MTP, 0) == 1 and case.layout.pipeline == 1
    return "EP overlap with an MTP layer on a single pipeline stage" if wrong else None


def _whole_mlp_captured(case: Case) -> str | None:
    captured = set(case.parts(CAPTURED)) & {"moe", "mlp"}
    wrong = case.on(EP_OVERLAP) and case.text(GRAPHS) == "transformer_engine" and captured
    return f"EP overlap with {' and '.join(sorted(captured))} inside CUDA graphs" if wrong else None


def _other_graphs(case: Case) -> str | None:
    kind = case.text(GRAPHS, "none")
    wrong = case.on(EP_OVERLAP) and kind not in ("none", "transformer_engine")
    return f"EP overlap with {kind} CUDA graphs before megatron-core 0.18" if wrong else None


def _whole_layer_captured(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.text(GRAPHS) == "transformer_engine" and not case.parts(CAPTURED)
    return "EP overlap with whole layers inside CUDA graphs fails at replay" if wrong else None


def _release_without_overlap(case: Case) -> str | None:
    wrong = case.on(EARLY_RELEASE) and not case.on(EP_OVERLAP)
    return f"{EARLY_RELEASE} without {EP_OVERLAP}" if wrong else None


def _offloaded_input(case: Case) -> str | None:
    offloaded = case.on(OFFLOAD) and "expert_fc1" in case.parts(OFFLOADED)
    wrong = case.on(EP_OVERLAP) and backend(case) == "ncclep" and offloaded
    return "EP overlap with ncclep frees the input that expert_fc1 would offload" if wrong else None


def _overlap_lost(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and backend(case) == "ncclep" and not case.on(STATIC)
    return f"EP overlap with ncclep but without {STATIC} waits for the host and overlaps little" if wrong else None


def _sharded_model(case: Case) -> str | None:
    if not case.on(EP_OVERLAP) or not case.on(FSDP):
        return None
    if (virtual_stages(case) or 1) > 1:
        return "EP overlap with Megatron-FSDP and virtual stages"
    if case.on(DOUBLE_BUFFER):
        return f"EP overlap with {DOUBLE_BUFFER}"
    kind = case.text(GRAPHS, "none")
    return f"EP overlap with Megatron-FSDP and {kind} graphs" if kind not in ("none", "full_iteration") else None


def _partial_checkpoints(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.knobs.get(PARTIAL) is not None and case.layout.pipeline > 1
    return f"EP overlap ignores {PARTIAL}" if wrong else None


def _one_microbatch(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.microbatches == 1
    return "EP overlap with one micro-batch a step has nothing to hide behind" if wrong else None


def _one_queue(case: Case) -> str | None:
    wrong = case.on(EP_OVERLAP) and case.env.get(CONNECTIONS) == "1"
    return f"EP overlap with {CONNECTIONS}=1 loses most of the overlap (191.1 for 198.5 TFLOP/s)" if wrong else None


def _unsplit(case: Case) -> bool:
    return case.layout.tensor == 1 or not case.layout.sequence_parallel


def _tensor_overlap_unsplit(case: Case) -> str | None:
    return f"{TP_OVERLAP} without sequence parallelism" if case.on(TP_OVERLAP) and _unsplit(case) else None


def _tensor_overlap_dropped(case: Case) -> str | None:
    if not case.on(TP_OVERLAP):
        return None
    if _unsplit(case):
        return f"{TP_OVERLAP} with TP 1 or without sequence_parallel is switched off with a warning"
    if case.stack is not None and case.stack.transformer_engine is None:
        return f"{TP_OVERLAP} without Transformer Engine is switched off with a warning"
    latent = case.model.multi_latent_attention
    return f"{TP_OVERLAP} is switched off for all layers by latent attention's projections" if latent else None


_CONFIG = "core/transformer/transformer_config.py"
RULES = (
    Rule("OVL-01", frozenset({EP_OVERLAP}), _old_torch, f"{_CONFIG}:2671", "upgrade torch or switch it off"),
    Rule(
        "OVL-02", frozenset({EP_OVERLAP, PP, VPP, LAYOUT}), _no_chunks, f"{_CONFIG}:2675",
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
    Rule(
        "OVL-08", frozenset({EP_OVERLAP, RECOMPUTED}), _moe_recompute, f"{_CONFIG}:2697", "recompute other modules",
        since="0.17",
    ),
    Rule(
        "OVL-09", frozenset({EP_OVERLAP, SHARED_OVERLAP, "bf16", "fp16"}), _numbers_and_shared, f"{_CONFIG}:2702,2706",
        "train in bf16, without the overlap of shared experts",
    ),
    Rule(
        "OVL-10", frozenset({EP_OVERLAP, MTP}), _many_mtp_layers, f"{_CONFIG}:2709", "keep one MTP layer or none",
    ),
    Rule(
        "OVL-10b", frozenset({EP_OVERLAP, MTP}), _said_no_mtp,
        "megatron-core 0.18.0 core/transformer/transformer_config.py:2440", f"leave {MTP} out", until="0.19",
    ),
    Rule(
        "OVL-10c", frozenset({EP_OVERLAP, MTP, PP}), _mtp_on_one_stage,
        "megatron-core 0.17.0 core/transformer/transformer_config.py:2125", "set PP above 1",
        since="0.16", until="0.18",
    ),
    Rule(
        "OVL-11", frozenset({EP_OVERLAP, GRAPHS, CAPTURED}), _whole_mlp_captured, f"{_CONFIG}:2740",
        "capture attn, moe_router and moe_preprocess only", since="0.16",
    ),
    Rule(
        "OVL-11b", frozenset({EP_OVERLAP, GRAPHS}), _other_graphs,
        "megatron-core 0.17.0 core/transformer/transformer_config.py:2131", "use transformer_engine graphs",
        since="0.16", until="0.18",
    ),
    Rule(
        "OVL-12", frozenset({EP_OVERLAP, GRAPHS, CAPTURED}), _whole_layer_captured,
        "core/transformer/transformer_layer.py:1263 (the config accepts it)", "name the cuda_graph_modules",
        level="first step",
    ),
    Rule(
        "OVL-20", frozenset({EP_OVERLAP, EARLY_RELEASE}), _release_without_overlap, f"{_CONFIG}:2773",
        "switch the overlap on or the early release off",
    ),
    Rule(
        "OVL-21", BACKEND_KNOBS | {EP_OVERLAP, OFFLOAD, OFFLOADED}, _offloaded_input, f"{_CONFIG}:2729",
        "offload other modules", since="0.19",
    ),
    Rule(
        "OVL-21b", BACKEND_KNOBS | {EP_OVERLAP, STATIC}, _overlap_lost, "transformer_config.py:2717 of 0.19.2 warns",
        f"switch {STATIC} on", level="runtime risk", since="0.19",
    ),
    Rule(
        "OVL-22", frozenset({EP_OVERLAP, FSDP, DOUBLE_BUFFER, GRAPHS, PP, VPP, LAYOUT}), _sharded_model,
        "core/distributed/fsdp/mcore_fsdp_adapter.py:169; core/pipeline_parallel/combined_1f1b.py:210",
        "use one pipeline stage, no double buffer, full_iteration graphs or none", level="build", since="0.18",
    ),
    Rule(
        "OVL-23", frozenset({EP_OVERLAP, PARTIAL, PP}), _partial_checkpoints,
        "read in core/pipeline_parallel/schedules.py:1459: dropped there, so combined_1f1b.py:343 never sees it",
        "leave it out",
    ),
    Rule(
        "OVL-24", frozenset({TP_OVERLAP, TP, SP}), _tensor_overlap_unsplit, "MLM arguments.py:1402",
        "set sequence_parallel with TP above 1, or switch it off", launchers=MLM,
    ),
    *late_gradients.RULES,
    Rule(
        "TRAP-05", frozenset({TP_OVERLAP, TP, SP}), _tensor_overlap_dropped,
        "Bridge training/comm_overlap.py:441-451; extensions/transformer_engine.py:927 of megatron-core 0.19.2",
        "leave it out",
    ),
    Rule(
        "TRAP-29", WORLD | {EP_OVERLAP, MBS, "num_microbatches"}, _one_microbatch,
        "read in core/pipeline_parallel/combined_1f1b.py, which accepts it", "lower the micro-batch or switch it off",
    ),
    Rule(
        "TRAP-30", frozenset({EP_OVERLAP, CONNECTIONS}), _one_queue, "Megatron-LM#6311",
        f"set {CONNECTIONS} to 8 or 32", level="runtime risk",
    ),
)  # fmt: skip
