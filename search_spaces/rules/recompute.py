"""Rules of activation recompute."""

import re

from search_spaces.rules.rule import Case, Launcher, Rule
from search_spaces.rules.versions import older

GRANULARITY, MODULES = "recompute_granularity", "recompute_modules"
METHOD, LAYERS = "recompute_method", "recompute_num_layers"
DISTRIBUTED, OLD_MOE, OFFLOAD = "distribute_saved_activations", "moe_layer_recompute", "cpu_offloading"
PP, VPP, TP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "tensor_model_parallel_size"
SP, MTP, FREQUENCY = "sequence_parallel", "mtp_num_layers", "moe_layer_freq"
FP8, RECIPE, GROUPED = "fp8", "fp8_recipe", "moe_grouped_gemm"
VARIANT, SHARED_OVERLAP = "experimental_attention_variant", "moe_shared_expert_overlap"
KNOWN = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out",
)  # fmt: skip
# These two throw their output away and compute it again: FP8's delayed scales would be updated twice.
OUTPUT_DISCARDING = frozenset({"moe_act", "layernorm"})


def selected(case: Case) -> tuple[str, ...]:
    """Modules recomputed; Megatron's own default is core_attn (transformer_config.py:1763)."""
    if case.text(GRANULARITY) != "selective":
        return ()
    return ("core_attn",) if case.knobs.get(MODULES) is None else case.parts(MODULES)


def has_dense_layers(case: Case) -> bool:
    """Whether some layer has a dense MLP. The knob moe_layer_freq, where given, says it before the model does."""
    if case.dense:
        return True
    frequency = case.knobs.get(FREQUENCY)
    if frequency is None:
        return case.model.first_dense_layers > 0
    if isinstance(frequency, str) and not frequency.isdecimal():  # "[0, 1, 1]", or Megatron-LM's "([0]*3+[1]*58)"
        return re.search(r"\[[^]]*\b0\b", frequency) is not None
    return float(frequency) > 1


def _layers_a_chunk(case: Case) -> int:
    layout = case.layout
    return case.model.num_layers // (layout.pipeline * (layout.virtual_pipeline or 1))


def _unknown_word(case: Case) -> str | None:
    granularity, method = case.text(GRANULARITY), case.text(METHOD)
    if granularity not in ("", "selective", "full"):
        return f"no recompute_granularity {granularity!r}"
    wrong = granularity and method not in ("", "uniform", "block")
    return f"no recompute_method {method!r}" if wrong else None


def _full_without_method(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "full" and not case.text(METHOD)
    return "full recompute without a recompute_method" if wrong else None


def _full_layers(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "full" and case.knobs.get(LAYERS) is None
    return "full recompute without recompute_num_layers" if wrong else None


def _uniform(case: Case) -> bool:
    return case.text(GRANULARITY) == "full" and case.text(METHOD) == "uniform"


def _uniform_of_none(case: Case) -> str | None:
    count = case.integer(LAYERS, 1)
    return f"uniform recompute of {count} layers at a time never ends" if _uniform(case) and count < 1 else None


def _uniform_with_mtp(case: Case) -> str | None:
    count = case.integer(LAYERS, 1)
    wrong = _uniform(case) and case.integer(MTP, 0) > 0 and count > 1
    return f"recompute_num_layers {count} in a model with multi-token prediction" if wrong else None


def _selective_layers(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "selective" and case.knobs.get(LAYERS) is not None
    return f"selective recompute with {LAYERS}" if wrong else None


def _selective_method(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "selective" and case.text(METHOD)
    return f"selective recompute with {METHOD}" if wrong else None


def _distributed(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) and case.on(DISTRIBUTED) and case.on(SP)
    return f"{DISTRIBUTED} with sequence parallelism" if wrong else None


def _distributed_in_full(case: Case) -> str | None:
    whole = case.text(GRANULARITY) == "full" and case.text(METHOD) and case.integer(TP, 1) > 1
    return (
        f"{DISTRIBUTED} without tensor parallelism and full recompute" if case.on(DISTRIBUTED) and not whole else None
    )


def _unknown_module(case: Case) -> str | None:
    unknown = [name for name in selected(case) if name not in KNOWN]
    return f"no recompute module {', '.join(unknown)}" if unknown else None


def _new_module(case: Case) -> str | None:
    return "no recompute module gdn_norm_out in this release" if "gdn_norm_out" in selected(case) else None


def _sequential_experts(case: Case) -> str | None:
    wrong = "moe_act" in selected(case) and not case.on(GROUPED)
    return "moe_act recompute without moe_grouped_gemm" if wrong else None


def _up_projection(case: Case) -> str | None:
    wrong = "mla_up_proj" in selected(case) and not case.model.multi_latent_attention
    return "mla_up_proj recompute without multi-latent attention" if wrong else None


def _gated_norm(case: Case) -> str | None:
    wrong = "gdn_norm_out" in selected(case) and case.text(VARIANT) != "gated_delta_net"
    return "gdn_norm_out recompute without gated delta net" if wrong else None


def _overlapped_shared_experts(case: Case) -> str | None:
    wrong = "shared_experts" in selected(case) and case.on(SHARED_OVERLAP)
    wrong = wrong and case.model.moe_shared_expert_intermediate_size is not None
    return f"shared_experts recompute with {SHARED_OVERLAP}" if wrong else None


def _old_name_and_full(case: Case) -> str | None:
    wrong = case.on(OLD_MOE) and case.text(GRANULARITY) == "full"
    return f"{OLD_MOE} with full recompute" if wrong else None


def _discarding_with_fp8(case: Case) -> str | None:
    names = sorted(OUTPUT_DISCARDING.intersection(selected(case)))
    if not names or not case.text(FP8):
        return None
    engine = case.stack.transformer_engine if case.stack else None
    if case.text(RECIPE, "delayed") == "delayed":
        return f"{' and '.join(names)} recompute with delayed FP8 scaling"
    old = engine is not None and older(engine, "2.6")
    return f"{' and '.join(names)} recompute for FP8 with transformer-engine {engine}" if old else None


def _offloaded(case: Case) -> str | None:
    return f"{OFFLOAD} with recompute" if case.on(OFFLOAD) and case.text(GRANULARITY) else None


def _shared_experts(case: Case) -> str | None:
    wrong = "shared_experts" in selected(case) and case.model.moe_shared_expert_intermediate_size is None
    return "shared_experts recompute in a model without shared experts changes nothing" if wrong else None


def _dense_mlp(case: Case) -> str | None:
    wrong = "mlp" in selected(case) and not has_dense_layers(case)
    return "mlp recompute in a model without dense layers changes nothing" if wrong else None


def _block_of_all(case: Case) -> str | None:
    full = case.text(GRANULARITY) == "full" and case.text(METHOD) == "block"
    wrong = full and case.integer(LAYERS, 1) >= _layers_a_chunk(case) >= 1
    return "block recompute of every layer of a chunk is uniform recompute of 1 layer" if wrong else None


_CONFIG, _OLD = "core/transformer/transformer_config.py", "megatron-core 0.18.0, transformer_config.py"
_MLM = frozenset[Launcher]({"megatron-lm"})
_SELECTION, _FULL = frozenset({GRANULARITY, MODULES}), frozenset({GRANULARITY, METHOD, LAYERS})
RULES = (
    Rule(
        "RCP-01", frozenset({GRANULARITY, METHOD}), _unknown_word, f"{_CONFIG}:1726",
        "use selective or full, and uniform or block",
    ),
    Rule("RCP-02", frozenset({GRANULARITY, METHOD}), _full_without_method, f"{_CONFIG}:1737", "use uniform or block"),
    Rule("RCP-03", frozenset({GRANULARITY, LAYERS}), _full_layers, f"{_CONFIG}:1743", f"set {LAYERS}"),
    Rule(
        "RCP-03b", _FULL | {MTP}, _uniform_with_mtp, "core/transformer/multi_token_prediction.py:1420",
        f"set {LAYERS} to 1", "first step",
    ),
    Rule(
        "RCP-03c", _FULL, _uniform_of_none, "megatron-core 0.19.2, recompute.py:161: the loop's step is this number",
        f"set {LAYERS} to 1 or more", "first step",
    ),
    Rule("RCP-04", frozenset({GRANULARITY, LAYERS}), _selective_layers, f"{_CONFIG}:1752", "leave it out"),
    Rule(
        "RCP-04b", frozenset({GRANULARITY, METHOD}), _selective_method, "MLM arguments.py:1386", "leave it out",
        launchers=_MLM,
    ),
    Rule(
        "RCP-05", frozenset({GRANULARITY, DISTRIBUTED, SP}), _distributed, f"{_CONFIG}:1758",
        f"set {DISTRIBUTED} to false",
    ),
    Rule(
        "RCP-05b", frozenset({GRANULARITY, METHOD, DISTRIBUTED, TP}), _distributed_in_full, "MLM arguments.py:1371",
        f"set {DISTRIBUTED} to false", launchers=_MLM,
    ),
    Rule("RCP-07", _SELECTION, _unknown_module, f"{_CONFIG}:1779", f"known: {', '.join(KNOWN)}"),
    Rule("RCP-07b", _SELECTION, _new_module, f"{_OLD}:1590", "leave it out, or use megatron-core 0.19", until="0.19"),
    Rule(
        "RCP-08", _SELECTION | {GROUPED}, _sequential_experts, f"{_CONFIG}:1785",
        "set moe_grouped_gemm to true or recompute other modules",
    ),
    Rule("RCP-09", _SELECTION, _up_projection, f"{_CONFIG}:1790", "leave mla_up_proj out"),
    Rule("RCP-10", _SELECTION | {VARIANT}, _gated_norm, f"{_CONFIG}:1799", "leave gdn_norm_out out", since="0.19"),
    Rule(
        "RCP-11", _SELECTION | {SHARED_OVERLAP}, _overlapped_shared_experts, f"{_CONFIG}:1817",
        "leave shared_experts out or switch the overlap off",
    ),
    Rule("RCP-12", frozenset({GRANULARITY, OLD_MOE}), _old_name_and_full, f"{_CONFIG}:1840", f"leave {OLD_MOE} out"),
    Rule(
        "RCP-13", _SELECTION | {FP8, RECIPE}, _discarding_with_fp8, f"{_CONFIG}:1824",
        "use another fp8_recipe or recompute other modules",
    ),
    Rule("RCP-14", frozenset({GRANULARITY, OFFLOAD}), _offloaded, f"{_CONFIG}:1720", "choose one"),
    Rule(
        "DUP-04", _SELECTION, _shared_experts, "megatron-core 0.19.2, moe_layer.py:253", "leave shared_experts out",
        "runtime risk",
    ),
    Rule(
        "DUP-05", _SELECTION | {FREQUENCY}, _dense_mlp, "megatron-core 0.19.2, transformer_layer.py:517",
        "leave mlp out", "runtime risk",
    ),
    Rule(
        "DUP-08", _FULL | {PP, VPP}, _block_of_all, "megatron-core 0.19.2, recompute.py:167", "use uniform",
        "runtime risk",
    ),
)  # fmt: skip
