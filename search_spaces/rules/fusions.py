"""Rules of fused kernels: permute, router, grouped GEMM, activation, rope, cross entropy, the op fuser."""

from search_spaces.rules import activations
from search_spaces.rules.activations import ACTIVATION, GATED, LINEAR_BIAS, LM, activation, gated, missing
from search_spaces.rules.capacity import (
    BALANCING,
    COEFFICIENT,
    FUSER,
    SCORE,
    TOPK,
    balancing,
    coefficients,
    score,
    topk,
)
from search_spaces.rules.rule import Case, Rule

PERMUTE, ROUTER, GROUPED = "moe_permute_fusion", "moe_router_fusion", "moe_grouped_gemm"
WEIGHT, BIAS, FUSED_DROPOUT = "moe_single_grouped_weight", "moe_single_grouped_bias", "bias_dropout_fusion"
FP8, FP8_RECIPE, FP4, FP4_RECIPE = "fp8", "fp8_recipe", "fp4", "fp4_recipe"
TP, ETP = "tensor_model_parallel_size", "expert_tensor_parallel_size"
FINE, OFFLOADED = "fine_grained_activation_offloading", "offload_modules"
ON_INPUT, CUTEDSL, INTERLEAVE = (
    "moe_apply_probs_on_input", "NVTE_CUTEDSL_FUSED_GROUPED_MLP", "moe_mlp_glu_interleave_size",
)  # fmt: skip
SHARED, SHARED_SIZE, SHARED_INTERLEAVE = (
    "use_grouped_gemm_for_shared_expert", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_glu_interleave_size",
)  # fmt: skip
SQUARED, IMPLEMENTATION = "use_fused_weighted_squared_relu", "transformer_impl"
ACCUMULATE = "gradient_accumulation_fusion"


def _grouped(case: Case) -> bool:
    """Experts in grouped GEMMs, as MoE recipes set it; off where a configuration says so."""
    return case.knobs.get(GROUPED) is None or case.on(GROUPED)


def _permute(case: Case) -> str | None:
    why = missing(case, "2.1.0") if case.on(PERMUTE) else None
    return f"{PERMUTE} {why}" if why else None


def _router(case: Case) -> str | None:
    if not case.on(ROUTER):
        return None
    if why := missing(case, "2.6.0"):
        return f"{ROUTER} {why}"
    losses = {"aux_loss", "seq_aux_loss", "global_aux_loss"} & set(balancing(case))
    if losses and any(coefficients(case)) and (why := missing(case, "2.7.0")):
        return f"{ROUTER} of an auxiliary loss {why}"
    why = missing(case, "2.13.0") if score(case) == "sqrtsoftplus" else None
    return f"{ROUTER} of sqrtsoftplus {why}" if why else None


def _one_parameter(case: Case) -> str | None:
    """What every release asks of grouped parameters."""
    if not (case.on(WEIGHT) or case.on(BIAS)):
        return None
    if not _grouped(case):
        return f"{WEIGHT} and {BIAS} without {GROUPED}"
    if why := missing(case, "2.14.0"):
        return f"{WEIGHT} and {BIAS} {why}"
    return f"{BIAS} without {LINEAR_BIAS}" if case.on(BIAS) and not case.on(LINEAR_BIAS) else None


def _grouped_parameters(case: Case) -> str | None:
    if what := _one_parameter(case):
        return what
    if not case.on(WEIGHT):
        return None
    fp8 = case.text(FP8_RECIPE, "delayed") if case.text(FP8) else "mxfp8"
    fp4 = case.text(FP4_RECIPE, "nvfp4") if case.text(FP4) else "nvfp4"
    if fp8 != "mxfp8" or fp4 != "nvfp4":
        return f"{WEIGHT} with {fp8 if fp8 != 'mxfp8' else fp4}"
    return None if case.on(FUSER) else f"{WEIGHT} without {FUSER}"


def _grouped_parameters_018(case: Case) -> str | None:
    if what := _one_parameter(case):
        return what
    mxfp8 = case.text(FP8) and case.text(FP8_RECIPE, "delayed") == "mxfp8" and not case.text(FP4)
    return f"{WEIGHT} without mxfp8" if case.on(WEIGHT) and not mxfp8 else None


def _glu(case: Case) -> bool:
    """A gated activation that the op fuser knows."""
    return gated(case) and activation(case) in ("silu", "quick_gelu")


def _fuser(case: Case) -> str | None:
    if not case.on(FUSER) or not _grouped(case) or case.dense:
        return None
    if why := missing(case, "2.14.0"):
        return f"{FUSER} {why}"
    if case.layout.expert_tensor > 1:
        return f"{FUSER} with experts split over {case.layout.expert_tensor} ranks"
    parts = {"expert_fc1", "moe_act"} & set(case.parts(OFFLOADED)) if case.on(FINE) else None
    if parts:
        return f"{FUSER} with offload of {', '.join(sorted(parts))}"
    if case.on(ON_INPUT):
        return f"{FUSER} with {ON_INPUT}"
    squared = activation(case) == "squared_relu" and case.on(SQUARED) and not gated(case)
    return None if _glu(case) or squared else f"{FUSER} with the activation {activation(case)}"


def gated_fuser(case: Case) -> bool:
    """The op fuser on experts whose fused kernel the environment must allow."""
    return case.on(FUSER) and _grouped(case) and _glu(case) and not case.dense


def _kernel_off(case: Case) -> str | None:
    said = case.env.get(CUTEDSL)
    wrong = gated_fuser(case) and said is not None and not (said.isdecimal() and int(said))
    return f"{FUSER} for gated experts with {CUTEDSL} {said}" if wrong else None


def _kernel_unsaid(case: Case) -> str | None:
    wrong = gated_fuser(case) and CUTEDSL not in case.env
    return f"{FUSER} for gated experts needs {CUTEDSL} in the environment" if wrong else None


def _accumulation(case: Case) -> str | None:
    """Megatron-LM asks for it where it is not told otherwise (`--no-gradient-accumulation-fusion`)."""
    asked = case.on(ACCUMULATE) or (case.knobs.get(ACCUMULATE) is None and bool(case.launchers & LM))
    wrong = asked and case.stack is not None and case.stack.apex is None
    return f"{ACCUMULATE} needs Apex's fused_weight_gradient_mlp_cuda, which the stack lacks" if wrong else None


def _dropout(case: Case) -> str | None:
    wrong = case.on(FUSED_DROPOUT) and case.on(LINEAR_BIAS) and _grouped(case) and not case.dense
    return f"{FUSED_DROPOUT} with {LINEAR_BIAS} in grouped experts" if wrong else None


def _probabilities(case: Case) -> str | None:
    wrong = case.on(ON_INPUT) and topk(case) != 1
    return f"{ON_INPUT} with {topk(case)} experts a token" if wrong else None


def _shared(case: Case) -> str | None:
    if not case.on(SHARED):
        return None
    size = case.knobs.get(SHARED_SIZE)
    if not (case.model.moe_shared_expert_intermediate_size if size is None else size):
        return None
    if why := missing(case, "2.14.0"):
        return f"{SHARED} {why}"
    if case.on(LINEAR_BIAS):
        return f"{SHARED} with {LINEAR_BIAS}"
    if activation(case) != "silu" or not gated(case):
        return f"{SHARED} without SwiGLU"
    if case.knobs.get(SHARED_INTERLEAVE) is None:
        return f"{SHARED} without {SHARED_INTERLEAVE}"
    mxfp8 = case.text(FP8) and case.text(FP8_RECIPE, "delayed") == "mxfp8"
    nvfp4 = case.text(FP4) and case.text(FP4_RECIPE, "nvfp4") == "nvfp4"
    return None if mxfp8 or nvfp4 else f"{SHARED} without mxfp8 and nvfp4"


def _old_gpu(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = case.on(GROUPED) and capability is not None and capability[0] < 8
    return f"{GROUPED} on {case.cluster.gpu_arch}" if wrong else None


def _one_by_one(case: Case) -> str | None:
    wrong = case.on(GROUPED) and case.text(IMPLEMENTATION) == "local" and not case.on_cpu
    return f"{GROUPED} with transformer_impl local runs the experts one by one" if wrong else None


def _slow_interleave(case: Case) -> str | None:
    wrong = case.knobs.get(INTERLEAVE) is not None and gated(case) and not case.on(FUSER)
    return f"{INTERLEAVE} without {FUSER} reorders the tensors in each forward" if wrong else None


_CONFIG, _MOE = "core/transformer/transformer_config.py", "core/transformer/moe"
_ACTIVATION = frozenset({ACTIVATION, GATED})
_PARAMETERS = frozenset({WEIGHT, BIAS, GROUPED, LINEAR_BIAS, FP8, FP8_RECIPE, FP4, FP4_RECIPE})
KERNEL = _ACTIVATION | {FUSER, GROUPED, CUTEDSL}
RULES: tuple[Rule, ...] = (
    Rule("FUS-01", frozenset({PERMUTE}), _permute, f"{_CONFIG}:2651", "install transformer-engine 2.1 or newer"),
    Rule(
        "FUS-02", frozenset({ROUTER, BALANCING, COEFFICIENT, SCORE}), _router, f"{_MOE}/moe_utils.py:129,774,923",
        "install transformer-engine 2.13 or switch it off", level="first step",
    ),
    Rule(
        "FUS-03", _PARAMETERS | {FUSER}, _grouped_parameters, f"{_CONFIG}:1556",
        "leave them out, or use mxfp8, nvfp4 or bf16 with the op fuser", since="0.19.0",
    ),
    Rule(
        "FUS-03b", _PARAMETERS, _grouped_parameters_018,
        "megatron-core 0.18.0 core/transformer/transformer_config.py:1414", "leave them out or use mxfp8",
        since="0.18.0", until="0.19.0",
    ),
    Rule(
        "FUS-04", _ACTIVATION | {FUSER, GROUPED, TP, ETP, FINE, OFFLOADED, ON_INPUT, SQUARED}, _fuser,
        f"{_MOE}/experts.py:285,332",
        f"switch {FUSER} off, or use ETP 1, a gated silu and transformer-engine 2.14", level="build", since="0.18.0",
    ),
    Rule(
        "FUS-04b", KERNEL, _kernel_unsaid, "megatron-core core/transformer/moe/experts.py:395", f"set {CUTEDSL} to 1",
        level="runtime risk", since="0.18.0",
    ),
    Rule(
        "FUS-04c", KERNEL, _kernel_off, f"{_MOE}/experts.py:395", f"set {CUTEDSL} to 1", level="build",
        since="0.19.0",
    ),
    Rule(
        "TRAP-20", KERNEL, _kernel_off, "TE pytorch/ops grouped_mlp.py:1080, no fused kernel is registered",
        f"set {CUTEDSL} to 1", since="0.18.0", until="0.19.0",
    ),
    Rule(
        "FUS-05", frozenset({FUSED_DROPOUT, LINEAR_BIAS, GROUPED}), _dropout, f"{_MOE}/experts.py:202",
        f"switch {FUSED_DROPOUT} off", level="build",
    ),
    Rule(
        "FUS-06", frozenset({ON_INPUT, TOPK}), _probabilities, f"{_MOE}/experts.py:783,1341", f"switch {ON_INPUT} off",
        level="first step",
    ),
    Rule(
        "FUS-10",
        _ACTIVATION | {SHARED, SHARED_SIZE, SHARED_INTERLEAVE, LINEAR_BIAS, FP8, FP8_RECIPE, FP4, FP4_RECIPE}, _shared,
        f"{_MOE}/shared_experts.py:389,431", f"switch {SHARED} off", level="build", since="0.19.0",
    ),
    Rule(
        "FUS-11", frozenset({GROUPED}), _old_gpu, "MLM arguments.py:1338", f"switch {GROUPED} off", launchers=LM,
    ),
    Rule(
        "FUS-12", frozenset({ACCUMULATE}), _accumulation, "core/tensor_parallel/layers.py:1070: the output layer",
        f"set {ACCUMULATE} to false, or install Apex and name it in the stack", level="build",
    ),
    Rule(
        "TRAP-18", frozenset({GROUPED, IMPLEMENTATION}), _one_by_one, "core/models/backends.py:129",
        f"set transformer_impl to transformer_engine or {GROUPED} to false", level="build", since="0.17.0",
    ),
    Rule(
        "TRAP-19", frozenset({INTERLEAVE, FUSER, GATED}), _slow_interleave, f"{_MOE}/experts.py:292",
        f"switch {FUSER} on or leave {INTERLEAVE} out", level="build", since="0.18.0",
    ),
    *activations.RULES,
)  # fmt: skip
