"""Rules of offload: activations and optimizer state kept in host memory."""

from search_spaces.rules.rule import Case, Launcher, Rule
from search_spaces.rules.versions import older

FINE, OFFLOADED, LAYERWISE = "fine_grained_activation_offloading", "offload_modules", "cpu_offloading"
LAYERS, PP, IMPLEMENTATION = "cpu_offloading_num_layers", "pipeline_model_parallel_size", "transformer_impl"
GRANULARITY, RECOMPUTED, MOE_RECOMPUTE = "recompute_granularity", "recompute_modules", "moe_layer_recompute"
FUSER, OLD_OFFLOAD = "use_transformer_engine_op_fuser", "NVTE_CPU_OFFLOAD_V1"
FRACTION, SMALLEST, DELTA = (
    "activation_offload_fraction", "min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks",
)  # fmt: skip
INSIDE_EXPERTS = frozenset({"expert_fc1", "fused_group_mlp", "moe_act"})
MODULES = INSIDE_EXPERTS | {"core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear"}
LM, BRIDGE = frozenset[Launcher]({"megatron-lm"}), frozenset[Launcher]({"megatron-bridge"})


def _modules(case: Case) -> frozenset[str]:
    """What fine-grained offload moves; empty without it."""
    return frozenset(case.parts(OFFLOADED)) if case.on(FINE) else frozenset()


def _layerwise(case: Case) -> str | None:
    layers = case.integer(LAYERS, 0)
    implied = "megatron-lm" in case.launchers and layers > 0  # MLM arguments.py:1869
    if not (case.on(LAYERWISE) or implied):
        return None
    if case.layout.pipeline > 1:
        return "cpu_offloading with pipeline stages"
    if case.text(GRANULARITY):
        return "cpu_offloading with recompute"
    wrong = not 0 <= layers < case.model.num_layers
    return f"cpu_offloading of {layers} of {case.model.num_layers} layers" if wrong else None


def _unknown_module(case: Case) -> str | None:
    if not case.on(FINE):
        return None
    if case.on(LAYERWISE):
        return "fine_grained_activation_offloading with cpu_offloading"
    if unknown := _modules(case) - MODULES:
        return f"no offload module {', '.join(sorted(unknown))}"
    return None if _modules(case) else "fine_grained_activation_offloading without offload_modules"


def _young_module(case: Case) -> str | None:
    return "no offload module fused_group_mlp in this release" if "fused_group_mlp" in _modules(case) else None


def _projection_alone(case: Case) -> str | None:
    chosen = _modules(case)
    wrong = "attn_proj" in chosen and "core_attn" not in chosen
    return "offload of attn_proj without core_attn, whose backward needs the same tensor" if wrong else None


def _recomputed_experts(case: Case) -> str | None:
    selective = case.text(GRANULARITY) == "selective" and "moe" in case.parts(RECOMPUTED)
    inside = _modules(case) & INSIDE_EXPERTS
    wrong = inside and (selective or case.on(MOE_RECOMPUTE))
    return f"offload of {', '.join(sorted(inside))} inside a recomputed MoE layer" if wrong else None


def _sizes(case: Case) -> str | None:
    if not case.on(FINE):
        return None
    if not 0 <= (fraction := case.number(FRACTION, 1.0)) <= 1:
        return f"{FRACTION} {fraction:g} is not in [0, 1]"
    below = [name for name in (SMALLEST, DELTA) if case.integer(name, 0) < 0]
    return f"{' and '.join(below)} below zero" if below else None


def _fused_experts(case: Case) -> str | None:
    if "fused_group_mlp" not in _modules(case):
        return None
    if not case.on(FUSER):
        return "offload of fused_group_mlp without use_transformer_engine_op_fuser"
    parts = _modules(case) & {"expert_fc1", "moe_act"}
    return f"offload of fused_group_mlp and of its part {', '.join(sorted(parts))}" if parts else None


def _recent_engine(case: Case) -> bool:
    engine = case.stack.transformer_engine if case.stack else None
    return engine is not None and not older(engine, "2.10.0")


def _weights_too(case: Case) -> str | None:
    if not case.on(FINE):
        return None
    if case.text(IMPLEMENTATION, "transformer_engine") != "transformer_engine":
        return f"fine_grained_activation_offloading with transformer_impl {case.text(IMPLEMENTATION)}"
    said = case.env.get(OLD_OFFLOAD)
    if said is None and "megatron-lm" not in case.launchers:  # a Bridge recipe brings its own: OFF-07b
        return None
    wrong = _recent_engine(case) and said != "1"
    return (
        f"with transformer-engine 2.10 or newer weights are offloaded too unless {OLD_OFFLOAD} is 1" if wrong else None
    )


def _weights_perhaps(case: Case) -> str | None:
    unsaid = case.on(FINE) and _recent_engine(case) and OLD_OFFLOAD not in case.env
    return f"refused by the launcher unless the recipe's env_vars set {OLD_OFFLOAD} to 1" if unsaid else None


_CONFIG = "core/transformer/transformer_config.py"
_FINE = frozenset({FINE, OFFLOADED})
RULES: tuple[Rule, ...] = (
    Rule(
        "OFF-01", frozenset({LAYERWISE, LAYERS, PP, GRANULARITY}), _layerwise, f"{_CONFIG}:1707",
        "offload fewer layers, with PP 1 and no recompute",
    ),
    Rule(
        "OFF-02", _FINE | {LAYERWISE}, _unknown_module, f"{_CONFIG}:1848",
        f"offload_modules are among {', '.join(sorted(MODULES))}; cpu_offloading off", since="0.16.0",
    ),
    Rule(
        "OFF-02b", _FINE, _young_module, "megatron-core 0.18.0 core/transformer/transformer_config.py:1663",
        "upgrade megatron-core to 0.19 or offload expert_fc1 and moe_act", since="0.16.0", until="0.19.0",
    ),
    Rule("OFF-03", _FINE, _projection_alone, f"{_CONFIG}:1868", "add core_attn", since="0.16.0"),
    Rule(
        "OFF-04", _FINE | {GRANULARITY, RECOMPUTED, MOE_RECOMPUTE}, _recomputed_experts, f"{_CONFIG}:1874",
        "take moe out of recompute_modules or these out of offload_modules", since="0.19.0",
    ),
    Rule(
        "OFF-05", frozenset({FINE, FRACTION, SMALLEST, DELTA}), _sizes, f"{_CONFIG}:1885",
        "give a fraction in [0, 1] and sizes of 0 or more", since="0.19.0",
    ),
    Rule(
        "OFF-06", _FINE | {FUSER}, _fused_experts, f"{_CONFIG}:1895",
        "switch use_transformer_engine_op_fuser on and name fused_group_mlp alone", since="0.19.0",
    ),
    Rule(
        "OFF-07", frozenset({FINE, IMPLEMENTATION, OLD_OFFLOAD}), _weights_too,
        "MLM arguments.py:1853, Bridge training/config.py:2042",
        f"set transformer_impl to transformer_engine and the environment's {OLD_OFFLOAD} to 1", launchers=LM | BRIDGE,
    ),
    Rule(
        "OFF-07b", frozenset({FINE, OLD_OFFLOAD}), _weights_perhaps, "Bridge training/config.py:2051",
        f"set {OLD_OFFLOAD} to 1", level="runtime risk", launchers=BRIDGE,
    ),
)  # fmt: skip
