"""Rules of fully sharded data parallelism, of gradient buckets and of parameters gathered late."""

from search_spaces.rules.activations import missing
from search_spaces.rules.rule import Case, Launcher, Rule
from search_spaces.rules.versions import older

FSDP, TORCH_FSDP, STRATEGY = "use_megatron_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy"
SHARDED, LAYERWISE = "use_distributed_optimizer", "use_layer_wise_distributed_optimizer"
GATHER, GATHER_WITH_STEP, REDUCE = (
    "overlap_param_gather", "overlap_param_gather_with_optimizer_step", "overlap_grad_reduce",
)  # fmt: skip
OPTIMIZER, FUSED_GRADIENTS = "optimizer", "gradient_accumulation_fusion"
CHECKPOINT, META = "ckpt_format", "init_model_with_meta_device"
REGISTERED, MANUAL, INSTANCES = "nccl_ub", "fsdp_manual_registration", "num_distributed_optimizer_instances"
AVERAGE, PER_TOKEN, REUSE = (
    "average_in_collective", "calculate_per_token_loss", "reuse_grad_buf_for_mxfp8_param_ag",
)  # fmt: skip
BUCKETS, BUCKET_SIZE = "num_buckets", "bucket_size"
PATTERNS, FP32_REDUCE = "param_name_patterns_for_fp32_local_accumulation", "grad_reduce_in_fp32"
GROUPED_WEIGHT, GROUPED_BIAS = "moe_single_grouped_weight", "moe_single_grouped_bias"
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
WEIGHT_SHARDS, EXPERT_SHARDS = "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"
CONNECTIONS, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"
LM, BRIDGE = frozenset[Launcher]({"megatron-lm"}), frozenset[Launcher]({"megatron-bridge"})


def _optimizer(case: Case) -> str:
    return case.text(OPTIMIZER) or case.training.optimizer


def _sharded(case: Case) -> bool:
    """Megatron-FSDP brings the distributed optimizer; Megatron Bridge's recipes have it unless told otherwise."""
    unsaid = case.knobs.get(SHARDED) is None and "megatron-bridge" in case.launchers
    return unsaid or case.on(SHARDED) or case.on(FSDP)


def _gather_unsharded(case: Case) -> str | None:
    if not case.on(GATHER) or case.on(LAYERWISE) or _sharded(case):
        return None
    wrong = not _optimizer(case).startswith("dist_")
    return f"{GATHER} without {SHARDED} has no parameters to gather" if wrong else None


def _gather_alone(case: Case) -> str | None:
    return f"{GATHER} without {REDUCE}" if case.on(GATHER) and not case.on(REDUCE) else None


def _gather_with_step(case: Case) -> str | None:
    if not case.on(GATHER_WITH_STEP):
        return None
    if absent := [name for name in (SHARDED, GATHER) if not case.on(name)]:
        return f"{GATHER_WITH_STEP} without {' and '.join(absent)}"
    if (case.layout.virtual_pipeline or 1) == 1:
        return f"{GATHER_WITH_STEP} without virtual pipeline stages"
    wrong = case.text(CHECKPOINT, "torch") != "torch"
    return f"{GATHER_WITH_STEP} with distributed checkpoints ({case.text(CHECKPOINT)})" if wrong else None


def _gather_with_reuse(case: Case) -> str | None:
    return f"{GATHER_WITH_STEP} with {REUSE}" if case.on(GATHER_WITH_STEP) and case.on(REUSE) else None


def _average(case: Case) -> str | None:
    if not case.on(AVERAGE):
        return None
    if case.on(PER_TOKEN):
        return f"{AVERAGE} with {PER_TOKEN}"
    layout = case.layout
    sharded = case.integer(WEIGHT_SHARDS, 0) > layout.tensor or case.integer(EXPERT_SHARDS, 0) > layout.expert_tensor
    return f"{AVERAGE} with weights sharded beyond tensor parallelism" if sharded else None


def _buckets(case: Case) -> str | None:
    if case.knobs.get(BUCKETS) is None:
        return None
    if case.knobs.get(BUCKET_SIZE) is not None:
        return f"{BUCKETS} and {BUCKET_SIZE} at once"
    return f"{BUCKETS} {case.integer(BUCKETS, 0)}" if case.integer(BUCKETS, 0) <= 0 else None


def _fp32_twice(case: Case) -> str | None:
    wrong = case.on(FP32_REDUCE) and case.text(PATTERNS) not in ("", "[]")
    return f"{PATTERNS} with {FP32_REDUCE}, where all gradients are fp32" if wrong else None


def _megatron_fsdp(case: Case) -> str | None:
    if not case.on(FSDP):
        return None
    if case.env.get(CONNECTIONS) == "1":
        return f"Megatron-FSDP with {CONNECTIONS} 1"
    if "megatron-lm" not in case.launchers:
        return None
    if grouped := [name for name in (GROUPED_WEIGHT, GROUPED_BIAS) if case.on(name)]:
        return f"Megatron-FSDP with {' and '.join(grouped)}"
    if _optimizer(case) not in ("sgd", "adam"):
        return f"Megatron-FSDP with the optimizer {_optimizer(case)}"
    if case.text(CHECKPOINT, "fsdp_dtensor") != "fsdp_dtensor":
        return f"Megatron-FSDP with {CHECKPOINT} {case.text(CHECKPOINT)}"
    wrong = case.on(META) and case.text(STRATEGY, "no_shard") == "no_shard"
    return f"{META} with {STRATEGY} no_shard" if wrong else None


def _foreign_checkpoint(case: Case) -> str | None:
    needs = {"fsdp_dtensor": FSDP, "torch_dcp": TORCH_FSDP}.get(case.text(CHECKPOINT))
    return f"{CHECKPOINT} {case.text(CHECKPOINT)} without {needs}" if needs and not case.on(needs) else None


def _fused_gradients(case: Case) -> str | None:
    why = missing(case, "2.10") if case.on(FSDP) and case.on(FUSED_GRADIENTS) else None
    return f"Megatron-FSDP and {FUSED_GRADIENTS} {why}" if why else None


def _torch_fsdp(case: Case) -> str | None:
    if not case.on(TORCH_FSDP):
        return None
    layout = case.layout
    named = {"pipeline stages": layout.pipeline > 1, "expert parallelism": layout.expert > 1}
    named |= {name: case.on(name) for name in (SHARDED, FUSED_GRADIENTS, "fp16")}
    named[f"{CONNECTIONS} 1"] = case.env.get(CONNECTIONS) == "1"
    named[f"{CHECKPOINT} {case.text(CHECKPOINT)}"] = case.text(CHECKPOINT, "torch_dcp") not in (
        "torch_dist",
        "torch_dcp",
    )
    if wrong := [name for name, found in named.items() if found]:
        return f"{TORCH_FSDP} with {' and '.join(wrong)}"
    if case.stack is not None and older(case.stack.torch, "2.4"):
        return f"{TORCH_FSDP} with torch {case.stack.torch}"
    tied = not case.model.untie_embeddings_and_output_weights
    return f"{TORCH_FSDP} with tied embeddings" if tied else None


def _two_fsdp(case: Case) -> str | None:
    return f"{FSDP} and {TORCH_FSDP} at once" if case.on(FSDP) and case.on(TORCH_FSDP) else None


def _expandable(case: Case) -> bool:
    return "expandable_segments:True" in case.env.get(ALLOCATOR, "").split(",")


def _registered(case: Case) -> str | None:
    wrong = case.on(REGISTERED) and _expandable(case) and case.stack is not None and older(case.stack.torch, "2.11")
    return f"{REGISTERED} with expandable segments on torch older than 2.11" if wrong else None


def _registered_017(case: Case) -> str | None:
    return f"{REGISTERED} with expandable segments" if case.on(REGISTERED) and _expandable(case) else None


def _manual(case: Case) -> str | None:
    if not case.on(MANUAL):
        return None
    if not case.on(FSDP):
        return f"{MANUAL} without {FSDP}" if "megatron-lm" in case.launchers else None
    return None if case.on(REGISTERED) else f"{MANUAL} without {REGISTERED}"


def _instances(case: Case) -> str | None:
    wrong = case.integer(INSTANCES, 1) > 1 and not _sharded(case)
    return f"{case.integer(INSTANCES, 1)} optimizer instances without {SHARDED}" if wrong else None


_DDP, _OPTIMIZER = "core/distributed/distributed_data_parallel", "core/optimizer/optimizer_config.py"
RULES: tuple[Rule, ...] = (
    Rule(
        "OVL-25", frozenset({GATHER, SHARDED, FSDP, LAYERWISE, OPTIMIZER}), _gather_unsharded,
        "core/distributed/param_and_grad_buffer.py:404, MLM arguments.py:991", f"switch {SHARDED} on",
        level="first step",
    ),
    Rule(
        "OVL-25b", frozenset({GATHER, REDUCE}), _gather_alone, "MLM arguments.py:994", f"switch {REDUCE} on",
        launchers=LM,
    ),
    Rule(
        "OVL-26", frozenset({GATHER_WITH_STEP, SHARDED, GATHER, VPP, CHECKPOINT}), _gather_with_step,
        "MLM arguments.py:1032", f"switch {GATHER_WITH_STEP} off", launchers=LM,
    ),
    Rule(
        "OVL-26b", frozenset({GATHER_WITH_STEP, REUSE}), _gather_with_reuse, f"{_OPTIMIZER}:425",
        f"switch {GATHER_WITH_STEP} off", since="0.19.0",
    ),
    Rule(
        "OVL-28", frozenset({AVERAGE, PER_TOKEN, WEIGHT_SHARDS, EXPERT_SHARDS, TP, ETP}), _average,
        f"{_DDP}.py:173,180", f"switch {AVERAGE} off", level="build",
    ),
    Rule(
        "OVL-29", frozenset({BUCKETS, BUCKET_SIZE}), _buckets, f"{_DDP}_config.py:270", "give one of them, above 0",
        since="0.18.0",
    ),
    Rule(
        "OVL-29b", frozenset({PATTERNS, FP32_REDUCE}), _fp32_twice, f"{_DDP}_config.py:264",
        f"leave {PATTERNS} out", since="0.17.0",
    ),
    Rule(
        "FSD-01", frozenset({FSDP, CONNECTIONS, GROUPED_WEIGHT, GROUPED_BIAS, OPTIMIZER, CHECKPOINT, META, STRATEGY}),
        _megatron_fsdp, "MLM arguments.py:1112-1164, Bridge training/config.py:1102",
        f"unset {CONNECTIONS}, save as fsdp_dtensor and train with adam", launchers=LM | BRIDGE,
    ),
    Rule(
        "FSD-01b", frozenset({CHECKPOINT, FSDP, TORCH_FSDP}), _foreign_checkpoint, "MLM arguments.py:1613,1621",
        "save as torch_dist", launchers=LM,
    ),
    Rule(
        "FSD-02", frozenset({FSDP, FUSED_GRADIENTS}), _fused_gradients,
        "core/distributed/fsdp/mcore_fsdp_adapter.py:147", f"switch {FUSED_GRADIENTS} off", level="build",
        since="0.17.0",
    ),
    Rule(
        "FSD-03", frozenset({TORCH_FSDP, PP, EP, SHARDED, FUSED_GRADIENTS, "fp16", CONNECTIONS, CHECKPOINT}),
        _torch_fsdp, "MLM arguments.py:997-1015", f"switch {TORCH_FSDP} off", launchers=LM,
    ),
    Rule(
        "FSD-03b", frozenset({FSDP, TORCH_FSDP}), _two_fsdp, "Bridge training/config.py:1342", "choose one",
        launchers=BRIDGE,
    ),
    Rule(
        "FSD-04", frozenset({REGISTERED, ALLOCATOR}), _registered, f"{_DDP}_config.py:256",
        f"upgrade torch or take expandable_segments:True out of {ALLOCATOR}", since="0.18.0",
    ),
    Rule(
        "FSD-04b", frozenset({REGISTERED, ALLOCATOR}), _registered_017,
        "megatron-core 0.17.0 core/distributed/distributed_data_parallel_config.py",
        f"take expandable_segments:True out of {ALLOCATOR}", until="0.18.0",
    ),
    Rule(
        "FSD-04c", frozenset({MANUAL, FSDP, REGISTERED}), _manual,
        "MLM arguments.py:1166, Bridge training/config.py:1110", f"switch {REGISTERED} on", launchers=LM | BRIDGE,
    ),
    Rule(
        "FSD-05", frozenset({INSTANCES, SHARDED, FSDP}), _instances, f"{_DDP}.py:292", f"switch {SHARDED} on",
        level="build",
    ),
)  # fmt: skip
