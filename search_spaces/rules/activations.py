"""Rules of fused activations, rotary embedding, norm and loss."""

from search_spaces.rules.rule import Case, Launcher, Rule
from search_spaces.rules.versions import older

LINEAR_BIAS, GATED, ACTIVATION = "add_bias_linear", "gated_linear_unit", "activation_func"
FUSED_ACTIVATION, ENGINE_ACTIVATION, OFFSET = (
    "bias_activation_fusion", "use_te_activation_func", "glu_linear_offset",
)  # fmt: skip
ROPE, ROPE_TYPE, INTERLEAVED, SINGLE_ROPE, OUTPUT_GATE, LATENT = (
    "apply_rope_fusion", "rope_type", "rotary_interleaved", "fused_single_qkv_rope", "attention_output_gate",
    "multi_latent_attention",
)  # fmt: skip
RESIDUAL_NORM, NORM, LOSS, LOSS_IMPL = (
    "fused_residual_rmsnorm", "normalization", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
)  # fmt: skip
LM = frozenset[Launcher]({"megatron-lm"})


def missing(case: Case, least: str) -> str | None:
    """Words for the target's transformer-engine where it is absent or older than `least`; None where it will do."""
    if case.on_cpu:
        return "on a CPU, where transformer-engine does not run"
    if case.stack is None:
        return None
    engine = case.stack.transformer_engine
    if engine is None:
        return "without transformer-engine"
    return f"with transformer-engine {engine}" if older(engine, least) else None


def gated(case: Case) -> bool:
    """A gated linear unit, as MoE recipes set it; off where a configuration says so."""
    return case.knobs.get(GATED) is None or case.on(GATED)


def activation(case: Case) -> str:
    """The bare name: silu for "torch.nn.functional.silu" and "swiglu", and where absent, as MoE recipes set it."""
    name = case.text(ACTIVATION, "silu").rpartition(".")[2]
    return {"swiglu": "silu", "swish": "silu", "geglu": "gelu", "quick_geglu": "quick_gelu"}.get(name, name)


def _latent(case: Case) -> bool:
    return case.model.multi_latent_attention if case.knobs.get(LATENT) is None else case.on(LATENT)


def _fused_activation(case: Case) -> str | None:
    if not case.on(FUSED_ACTIVATION):
        return None
    name, glu = activation(case), gated(case)
    if name not in ("gelu", "silu", "quick_gelu"):
        return f"{FUSED_ACTIVATION} of {name}"
    if not glu and (name == "quick_gelu" or (name == "gelu" and not case.on(LINEAR_BIAS))):
        return f"{FUSED_ACTIVATION} of {name} that is not gated"
    if case.number(OFFSET, 0.0) and name != "quick_gelu":
        return f"{FUSED_ACTIVATION} of {name} with {OFFSET}"
    return f"{FUSED_ACTIVATION} with {ENGINE_ACTIVATION}" if case.on(ENGINE_ACTIVATION) else None


def _engine_activation(case: Case) -> str | None:
    name = activation(case)
    if case.on(ENGINE_ACTIVATION) and name not in ("gelu", "silu", "relu"):
        return f"{ENGINE_ACTIVATION} has no {name}"
    wrong = case.on(RESIDUAL_NORM) and case.text(NORM, "RMSNorm") != "RMSNorm"
    return f"{RESIDUAL_NORM} with {case.text(NORM)}" if wrong else None


def _rope(case: Case) -> str | None:
    if case.on(SINGLE_ROPE) and case.on(OUTPUT_GATE):
        return f"{SINGLE_ROPE} with {OUTPUT_GATE}"
    if _latent(case):
        if case.on(INTERLEAVED):
            return f"{INTERLEAVED} with latent attention"
        wrong = case.on(ROPE) and case.text(ROPE_TYPE, "yarn") != "yarn"
        return f"{ROPE} for latent attention with rope_type {case.text(ROPE_TYPE)}" if wrong else None
    why = missing(case, "2.3.0" if case.on(INTERLEAVED) else "1.4.0") if case.on(ROPE) else None
    return f"{ROPE} {why}" if why else None


def _engine_loss(case: Case) -> str | None:
    wrong = case.on(LOSS) and case.text(LOSS_IMPL, "native") == "te"
    return f"Megatron-LM refuses {LOSS} by te, which was unstable" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
_ACTIVATION = frozenset({ACTIVATION, GATED})
RULES: tuple[Rule, ...] = (
    Rule(
        "FUS-07", _ACTIVATION | {FUSED_ACTIVATION, LINEAR_BIAS, OFFSET, ENGINE_ACTIVATION}, _fused_activation,
        f"{_CONFIG}:2114", f"switch {FUSED_ACTIVATION} off",
    ),
    Rule(
        "FUS-07b", frozenset({ACTIVATION, ENGINE_ACTIVATION, RESIDUAL_NORM, NORM}), _engine_activation,
        f"{_CONFIG}:2147", "leave it out for this model",
    ),
    Rule(
        "FUS-08", frozenset({ROPE, ROPE_TYPE, INTERLEAVED, SINGLE_ROPE, OUTPUT_GATE, LATENT}), _rope,
        f"{_CONFIG}:2165,2966", f"set {ROPE_TYPE} to yarn for latent attention, or switch the fusion off",
    ),
    Rule(
        "FUS-09", frozenset({LOSS, LOSS_IMPL}), _engine_loss, "MLM arguments.py:1642", f"set {LOSS_IMPL} to native",
        launchers=LM,
    ),
)  # fmt: skip
