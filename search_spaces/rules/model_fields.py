"""Rules of fields that describe the model and must fit each other: what no layout, precision or graph has to do with.

`core/` paths are megatron-core 0.19.2.
"""

import json

from search_spaces.rules.rule import Case, Rule

NO_ROPE, FLASH_DECODE, OUTPUT_GATE = "no_rope_freq", "flash_decode", "attention_output_gate"
EXPERTS, GROUPS = "num_moe_experts", "num_query_groups"
GRAPHS, INFERENCE = "cuda_graph_impl", "inference_cuda_graph_scope"
_SCOPES = {"none": ("none",), "local": ("layer", "block"), "transformer_engine": ("none",), "full_iteration": ("none",)}


def _experts_width_of_a_dense_model(case: Case) -> str | None:
    """Mixed models (some layers dense) are let off with a warning, and a width that is not known refuses nothing."""
    if not case.dense or case.model.first_dense_layers:
        return None
    return f"moe_ffn_hidden_size {case.model.moe_ffn_hidden_size} without {EXPERTS}"


def _without_rope(case: Case) -> str | None:
    given = case.knobs.get(NO_ROPE)
    pattern = json.loads(given) if isinstance(given, str) and given.startswith("[") else given
    if not pattern or not isinstance(pattern, int | list):
        return None
    if case.on(FLASH_DECODE):
        return f"{FLASH_DECODE} with {NO_ROPE}"
    layers = case.model.num_layers
    if isinstance(pattern, list):
        return f"{NO_ROPE} names {len(pattern)} layers, the model has {layers}" if len(pattern) != layers else None
    return f"{layers} layers are not divisible by {NO_ROPE} {pattern}" if layers % pattern else None


def _gated_latent_attention(case: Case) -> str | None:
    wrong = case.model.multi_latent_attention and case.on(OUTPUT_GATE)
    return f"{OUTPUT_GATE} with multi_latent_attention" if wrong else None


def _inference_scope(case: Case) -> str | None:
    kind, scope = case.text(GRAPHS, "none"), case.text(INFERENCE)
    wrong = scope and scope not in _SCOPES.get(kind, (scope,))
    return f"{INFERENCE} {scope} with {kind} CUDA graphs" if wrong else None


def _uneven_groups(case: Case) -> str | None:
    heads, groups = case.model.num_attention_heads, case.model.num_query_groups
    wrong = heads % groups and not case.model.multi_latent_attention
    return f"{heads} attention heads are not divisible by {groups} query groups" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
RULES = (
    Rule(
        "SHP-05", frozenset({EXPERTS}), _experts_width_of_a_dense_model, f"{_CONFIG}:1538",
        "give the experts or leave it out", since="0.18",
    ),
    Rule(
        "SHP-06", frozenset({NO_ROPE, FLASH_DECODE}), _without_rope, f"{_CONFIG}:2813",
        "name every layer, or a divisor of their number; without flash_decode",
    ),
    Rule(
        "SHP-07", frozenset({OUTPUT_GATE}), _gated_latent_attention, f"{_CONFIG}:2969", f"set {OUTPUT_GATE} to false",
        since="0.16",
    ),
    Rule(
        "SHP-08", frozenset({GRAPHS, INFERENCE}), _inference_scope, f"{_CONFIG}:2456",
        "leave it out: layer and block belong to local graphs", since="0.18",
    ),
    Rule(
        "SHP-09", frozenset({GROUPS}), _uneven_groups,
        "TE 2.20.2 pytorch/attention/dot_product_attention/dot_product_attention.py:928", "choose a divisor",
        level="build",
    ),
)  # fmt: skip
