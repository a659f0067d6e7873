"""Which norms a real TransformerLayer recomputes beside what a CUDA graph holds: the rules say the same of each mix."""

from collections.abc import Iterator
from itertools import product

from search_spaces.candidate import KnobValue
from search_spaces.rules import ALL_RULES, Case
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.oracle import config_refusal
from tests.search_spaces.oracle_graphs import dropped_norm

NORMS = [rule for rule in ALL_RULES if rule.id in ("TRAP-13", "DUP-09")]
SHARED = {"moe_shared_expert_intermediate_size": 64}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 32}
MODELS: tuple[tuple[dict[str, object], dict[str, KnobValue]], ...] = (
    ({}, {}),
    ({}, {"moe_latent_size": 32}),
    (SHARED, {}),
    (SHARED, {"moe_shared_expert_overlap": True}),
    (LATENT, {}),
    (LATENT, {"mla_down_proj_fusion": True}),
)
DISPATCHERS: tuple[dict[str, KnobValue], ...] = (
    {"dispatcher": "allgather"}, {"dispatcher": "alltoall"}, {"dispatcher": "flex", "ep": 2},
)  # fmt: skip
RECOMPUTED = ("layernorm", "layernorm+moe_act", "core_attn+layernorm", "layernorm+moe", "layernorm+shared_experts")
CAPTURED = ("attn", "moe_router", "attn+moe_router", "moe_router+moe_preprocess", "attn+moe_router+moe_preprocess")
GRAPHS = (("none", None), *product(("transformer_engine", "local"), CAPTURED))


def mixes() -> Iterator[Case]:
    """Those that the real configuration accepts."""
    for (model, own), sent, recomputed, (graphs, captured) in product(MODELS, DISPATCHERS, RECOMPUTED, GRAPHS):
        knobs: dict[str, KnobValue] = {"recompute": "selective", "modules": recomputed, "graphs": graphs}
        knobs |= {"captured": captured, "moe_grouped_gemm": True} | own | sent
        made = case(gpus(2), model=model, **{name: value for name, value in knobs.items() if value is not None})
        if config_refusal(made) is None:
            yield made


def test_the_rules_know_every_mix_in_which_a_layer_recomputes_no_norm() -> None:
    dropped = kept = 0
    for mix in mixes():
        ruled = [rule.id for rule in NORMS if rule.refusal(mix)]
        real = dropped_norm(mix)
        assert bool(ruled) == (real is not None), f"{dict(mix.knobs)} {mix.model.name}: rules {ruled}, real {real}"
        dropped, kept = dropped + (real is not None), kept + (real is None)
    assert dropped > 100
    assert kept > 300
