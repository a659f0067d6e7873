"""Rules of what is stored in few bits: parameters, gradients, optimizer state."""

from search_spaces.rules.rule import Case, Launcher, Rule

FP8, RECIPE, FP4, FP16, BF16 = "fp8", "fp8_recipe", "fp4", "fp16", "bf16"
# TransformerConfig's names, and those of the data-parallel configuration: launchers copy one to the other.
FP8_PARAM, FP4_PARAM = ("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")
REUSE = "reuse_grad_buf_for_mxfp8_param_ag"
SHARDED, FSDP, TORCH_FSDP = "use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2"
AWARE, OFFLOAD, OPTIMIZER = "use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer"
GRADS, ACCUMULATE = "main_grads_dtype", "accumulate_allreduce_grads_in_fp32"
DTYPES = (GRADS, "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
LM, BRIDGE = frozenset[Launcher]({"megatron-lm"}), "megatron-bridge"


def _any(case: Case, names: tuple[str, ...]) -> bool:
    return any(case.on(name) for name in names)


def _is_fp32(case: Case, name: str) -> bool:
    return case.text(name, "fp32").removeprefix("torch.") in ("fp32", "float32", "float")


def _two_types(case: Case) -> str | None:
    bf16 = case.training.params_dtype == "bf16" if case.knobs.get(BF16) is None else case.on(BF16)
    return "fp16 and bf16 at once" if case.on(FP16) and bf16 else None


def _params(case: Case) -> str | None:
    if _any(case, FP8_PARAM) and not case.text(FP8):
        return "parameters in FP8 without fp8"
    return "parameters in FP4 without fp4" if _any(case, FP4_PARAM) and not case.text(FP4) else None


def _reuse(case: Case) -> str | None:
    wrong = case.on(REUSE) and not _any(case, FP8_PARAM)
    return f"{REUSE} without parameters in FP8" if wrong else None


def _unsharded_params(case: Case) -> str | None:
    sharded = any(case.on(name) for name in (SHARDED, FSDP, TORCH_FSDP))
    wrong = _any(case, FP8_PARAM) and not sharded
    return "parameters in FP8 without distributed optimizer or FSDP" if wrong else None


def _aware(case: Case) -> str | None:
    if not case.on(AWARE):
        low = [name for name in DTYPES if not _is_fp32(case, name)]
        return f"{' and '.join(low)} other than fp32 without {AWARE}" if low else None
    if case.text(OPTIMIZER, case.training.optimizer) != "adam":
        return f"{AWARE} with another optimizer than adam"
    # Megatron Bridge's recipes shard the optimizer unless told not to.
    given = case.knobs.get(SHARDED)
    if given is False or (given is None and BRIDGE not in case.launchers):
        return f"{AWARE} without {SHARDED}"
    missing = case.stack is not None and case.stack.transformer_engine is None and not case.on(OFFLOAD)
    return f"{AWARE} needs transformer-engine, which the workers lack" if missing else None


def _offload(case: Case) -> str | None:
    if not case.on(OFFLOAD):
        return None
    if not case.on(AWARE):
        return f"{OFFLOAD} without {AWARE}"
    wrong = _any(case, FP8_PARAM) and case.text(RECIPE, "delayed") != "delayed"
    return f"{OFFLOAD} with parameters in FP8 of another recipe than delayed" if wrong else None


def _gradients(case: Case) -> str | None:
    wrong = case.on(ACCUMULATE) and not _is_fp32(case, GRADS)
    return f"{ACCUMULATE} with {GRADS} {case.text(GRADS)}" if wrong else None


_CONFIG, _OPTIMIZER = "core/transformer/transformer_config.py", "core/optimizer/optimizer_config.py"
RULES = (
    Rule("PRC-01", frozenset({FP16, BF16}), _two_types, f"{_CONFIG}:1315", f"set {BF16} to false, or leave fp16 out"),
    Rule(
        "PRC-05", frozenset({FP8, FP4, *FP8_PARAM, *FP4_PARAM}), _params,
        f"{_CONFIG}:1440, 1452; MLM arguments.py:1069", "train in that precision, or leave it out",
    ),
    Rule(
        "PRC-11", frozenset({REUSE, *FP8_PARAM}), _reuse, "core/distributed/distributed_data_parallel_config.py:254",
        "keep the parameters in FP8 too, or leave it out",
    ),
    Rule(
        "PRC-11b", frozenset({SHARDED, FSDP, TORCH_FSDP, *FP8_PARAM}), _unsharded_params, "MLM arguments.py:1060",
        f"set {SHARDED} to true", launchers=LM,
    ),
    Rule(
        "PRC-14", frozenset({AWARE, OPTIMIZER, SHARDED, OFFLOAD, *DTYPES}), _aware, f"{_OPTIMIZER}:431",
        f"use adam, {SHARDED} and {AWARE} together, or none of them and fp32 state",
    ),
    Rule(
        "PRC-15", frozenset({OFFLOAD, AWARE, RECIPE, *FP8_PARAM}), _offload, "MLM arguments.py:1803",
        f"set {AWARE} to true and use delayed FP8 scaling", launchers=LM,
    ),
    Rule(
        "PRC-18", frozenset({ACCUMULATE, GRADS}), _gradients, "MLM arguments.py:1186", f"set {GRADS} to fp32",
        launchers=LM,
    ),
)  # fmt: skip
