"""Rules of activation recompute."""

from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import older

GRANULARITY, MODULES = "recompute_granularity", "recompute_modules"
METHOD, LAYERS = "recompute_method", "recompute_num_layers"
PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FP8, RECIPE, GROUPED = "fp8", "fp8_recipe", "moe_grouped_gemm"
KNOWN = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out",
)  # fmt: skip
# These two throw their output away and compute it again: FP8's delayed scales would be updated twice.
OUTPUT_DISCARDING = frozenset({"moe_act", "layernorm"})


def _selected(case: Case) -> tuple[str, ...]:
    """Modules recomputed; Megatron's own default is core_attn (transformer_config.py:1763)."""
    if case.text(GRANULARITY) != "selective":
        return ()
    return ("core_attn",) if case.knobs.get(MODULES) is None else case.parts(MODULES)


def _layers_a_chunk(case: Case) -> int:
    layout = case.layout
    return case.model.num_layers // (layout.pipeline * (layout.virtual_pipeline or 1))


def _unknown_word(case: Case) -> str | None:
    granularity, method = case.text(GRANULARITY), case.text(METHOD)
    if granularity not in ("", "selective", "full"):
        return f"no recompute_granularity {granularity!r}"
    return f"no recompute_method {method!r}" if method not in ("", "uniform", "block") else None


def _full_without_method(case: Case) -> str | None:
    wrong = case.text(GRANULARITY) == "full" and not case.text(METHOD)
    return "full recompute without a recompute_method" if wrong else None


def _full_layers(case: Case) -> str | None:
    if case.text(GRANULARITY) != "full":
        return None
    count, a_stage = case.knobs.get(LAYERS), case.model.num_layers // case.layout.pipeline
    if count is None:
        return "full recompute without recompute_num_layers"
    wrong = not 1 <= int(count) <= max(a_stage, 1)
    return f"recompute_num_layers {count} is not between 1 and the {a_stage} layers of a stage" if wrong else None


def _selective_layers(case: Case) -> str | None:
    if case.text(GRANULARITY) != "selective":
        return None
    wrong = [name for name in (METHOD, LAYERS) if case.knobs.get(name) is not None]
    return f"selective recompute with {' and '.join(wrong)}" if wrong else None


def _unknown_module(case: Case) -> str | None:
    unknown = [name for name in _selected(case) if name not in KNOWN]
    return f"no recompute module {', '.join(unknown)}" if unknown else None


def _sequential_experts(case: Case) -> str | None:
    wrong = "moe_act" in _selected(case) and not case.on(GROUPED)
    return "moe_act recompute without moe_grouped_gemm" if wrong else None


def _up_projection(case: Case) -> str | None:
    wrong = "mla_up_proj" in _selected(case) and not case.model.multi_latent_attention
    return "mla_up_proj recompute without multi-latent attention" if wrong else None


def _gated_norm(case: Case) -> str | None:
    return "gdn_norm_out recompute without gated delta net" if "gdn_norm_out" in _selected(case) else None


def _shared_experts(case: Case) -> str | None:
    wrong = "shared_experts" in _selected(case) and case.model.moe_shared_expert_intermediate_size is None
    return "shared_experts recompute in a model without shared experts changes nothing" if wrong else None


def _dense_mlp(case: Case) -> str | None:
    wrong = "mlp" in _selected(case) and case.model.first_dense_layers == 0
    return "mlp recompute in a model without dense layers changes nothing" if wrong else None


def _discarding_with_fp8(case: Case) -> str | None:
    names = sorted(OUTPUT_DISCARDING & set(_selected(case)))
    if not names or not case.text(FP8):
        return None
    engine = case.stack.transformer_engine if case.stack else None
    if case.text(RECIPE, "delayed") == "delayed":
        return f"{' and '.join(names)} recompute with delayed FP8 scaling"
    old = engine is not None and older(engine, "2.6")
    return f"{' and '.join(names)} recompute for FP8 with transformer-engine {engine}" if old else None


def _inert_modules(case: Case) -> str | None:
    wrong = case.parts(MODULES) and case.text(GRANULARITY) != "selective"
    return "recompute_modules without selective recompute are ignored" if wrong else None


def _inert_method(case: Case) -> str | None:
    wrong = [name for name in (METHOD, LAYERS) if case.knobs.get(name) is not None]
    return f"{' and '.join(wrong)} without recompute is ignored" if wrong and not case.text(GRANULARITY) else None


def _block_of_all(case: Case) -> str | None:
    full = case.text(GRANULARITY) == "full" and case.text(METHOD) == "block"
    wrong = full and case.integer(LAYERS, 1) >= _layers_a_chunk(case) >= 1
    return "block recompute of every layer of a chunk is uniform recompute of 1 layer" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
_SELECTION = frozenset({GRANULARITY, MODULES})
RULES = (
    Rule(
        "RCP-01", frozenset({GRANULARITY, METHOD}), _unknown_word, f"{_CONFIG}:1726",
        "use selective or full, and uniform or block",
    ),
    Rule("RCP-02", frozenset({GRANULARITY, METHOD}), _full_without_method, f"{_CONFIG}:1737", "use uniform or block"),
    Rule(
        "RCP-03", frozenset({GRANULARITY, LAYERS, PP}), _full_layers, f"{_CONFIG}:1743",
        "set recompute_num_layers within a stage",
    ),
    Rule(
        "RCP-04", frozenset({GRANULARITY, METHOD, LAYERS}), _selective_layers, f"{_CONFIG}:1752; MLM arguments.py:1386",
        "leave them out",
    ),
    Rule("RCP-07", _SELECTION, _unknown_module, f"{_CONFIG}:1779", f"known: {', '.join(KNOWN)}"),
    Rule(
        "RCP-08", _SELECTION | {GROUPED}, _sequential_experts, f"{_CONFIG}:1785",
        "set moe_grouped_gemm to true or recompute other modules",
    ),
    Rule("RCP-09", _SELECTION, _up_projection, f"{_CONFIG}:1790", "leave mla_up_proj out"),
    Rule("RCP-10", _SELECTION, _gated_norm, f"{_CONFIG}:1799", "leave gdn_norm_out out"),
    Rule(
        "RCP-13", _SELECTION | {FP8, RECIPE}, _discarding_with_fp8, f"{_CONFIG}:1824",
        "use another fp8_recipe or recompute other modules",
    ),
    Rule("DUP-04", _SELECTION, _shared_experts, "core/transformer/moe/moe_layer.py", "leave shared_experts out"),
    Rule("DUP-05", _SELECTION, _dense_mlp, "core/transformer/transformer_layer.py", "leave mlp out"),
    Rule("DUP-06", _SELECTION, _inert_modules, "TRAP-08", "set recompute_granularity to selective"),
    Rule("DUP-07", frozenset({GRANULARITY, METHOD, LAYERS}), _inert_method, f"{_CONFIG}:1724", "leave them out"),
    Rule(
        "DUP-08", frozenset({GRANULARITY, METHOD, LAYERS, PP, VPP}), _block_of_all,
        "core/transformer/transformer_block.py, _checkpointed_forward", "use uniform",
    ),
)  # fmt: skip
