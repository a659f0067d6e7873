"""One form for all settings that mean the same, told by the silent traps of the catalogue."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.canonical import canonical
from search_spaces.legal import LegalSpace
from search_spaces.named_spaces import LAPTOP, NAMED_SPACES
from search_spaces.presets import load_model
from search_spaces.screen import screen
from search_spaces.shapes import TrainingShape
from tests.search_spaces.cases import LAPTOP_RANKS, STACK, TINY, TRAINING, gpus

TP, EP, ETP = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP, VPP, PP = "sequence_parallel", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"
DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
GRANULARITY, RECOMPUTED = "recompute_granularity", "recompute_modules"
IMPL, CAPTURED = "cuda_graph_impl", "cuda_graph_modules"
CAPACITY, DROPS = "moe_expert_capacity_factor", "moe_token_drop_policy"
Knobs = Mapping[str, KnobValue]
VALUES: Mapping[str, tuple[KnobValue, ...]] = {
    TP: (None, 1, 2), EP: (1, 4), ETP: (None, 1, 2), SP: (None, False, True), PP: (1, 2), VPP: (None, 1, 2),
    DISPATCHER: (None, "alltoall", "flex"), BACKEND: (None, "deepep", "hybridep", "ncclep"),
    "moe_deepep_num_sms": (None, 20), "moe_permute_fusion": (None, False, True),
    GRANULARITY: (None, "selective", "full"), RECOMPUTED: (None, "", "core_attn", "moe_act+layernorm"),
    "recompute_method": (None, "uniform"), "recompute_num_layers": (None, 1),
    IMPL: (None, "none", "local", "transformer_engine", "full_iteration"),
    CAPTURED: (None, "", "attn", "moe_router", "moe_preprocess+moe_router"), "cuda_graph_scope": (None, "attn"),
    "fp8": (None, "hybrid"), "fp8_recipe": (None, "delayed", "mxfp8"), "fp4": (None, "e2m1"),
    "fp4_recipe": (None, "nvfp4"), CAPACITY: (None, -1.0, 0.0, 1.5), DROPS: (None, "probs"),
    "fine_grained_activation_offloading": (None, True), "offload_modules": (None, "core_attn+attn_proj"),
    "overlap_grad_reduce": (None, False, True), "bucket_size": (None, 1000), "manual_gc": (None, True),
    "manual_gc_interval": (None, 10),
}  # fmt: skip
LAUNCHERS = (frozenset[str](), frozenset({"megatron-bridge"}), frozenset({"megatron-lm"}))
requests = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})


@settings(max_examples=1000, deadline=None)
@given(requests, st.sampled_from(LAUNCHERS))
def test_the_canonical_form_is_its_own(knobs: dict[str, KnobValue], launchers: frozenset[str]) -> None:
    form = canonical(knobs, launchers)
    again = canonical(form.knobs, launchers)
    assert again.knobs == form.knobs
    assert not again.notes


@settings(max_examples=300, deadline=None)
@given(requests, st.sampled_from(LAUNCHERS), st.randoms(use_true_random=False))
def test_order_and_null_mean_nothing(
    knobs: dict[str, KnobValue], launchers: frozenset[str], source: random.Random
) -> None:
    said = {name: value for name, value in knobs.items() if value is not None}
    shuffled = dict(source.sample(list(said.items()), len(said)))
    assert canonical(shuffled, launchers).knobs == canonical(knobs, launchers).knobs


CORE, BRIDGE, LM = LAUNCHERS
SELECTIVE: Knobs = {GRANULARITY: "selective"}
GRAPHS: Knobs = {IMPL: "transformer_engine"}
LOCAL: Knobs = {IMPL: "local"}
PLAIN: Knobs = {DISPATCHER: "alltoall"}


@pytest.mark.parametrize(
    ("trap", "one", "other", "launchers"),
    [
        ("TRAP-03", {**PLAIN, BACKEND: "deepep", "moe_deepep_num_sms": 20}, PLAIN, CORE),
        ("TRAP-06", {SP: True}, {}, BRIDGE),
        ("TRAP-06", {TP: 1, SP: True}, {TP: 1, SP: False}, LM),
        ("TRAP-07", {TP: 2, EP: 4}, {TP: 2, EP: 4, ETP: 2}, CORE),
        ("TRAP-07", {TP: 2, EP: 4}, {TP: 2, EP: 4, ETP: 2}, LM),
        ("TRAP-07", {TP: 2, EP: 4}, {TP: 2, EP: 4, ETP: 1}, BRIDGE),
        ("TRAP-07", {TP: 2, EP: 1}, {TP: 2, EP: 1, ETP: 2}, BRIDGE),
        ("TRAP-07", {TP: 1, EP: 4}, {TP: 1, EP: 4, ETP: 1}, CORE),
        ("TRAP-08", {RECOMPUTED: "moe_act"}, {}, CORE),
        ("TRAP-08", SELECTIVE, {**SELECTIVE, RECOMPUTED: "core_attn"}, CORE),
        ("TRAP-08", {**SELECTIVE, RECOMPUTED: ""}, {}, CORE),
        ("TRAP-08", {**SELECTIVE, RECOMPUTED: "moe_act+mlp"}, {**SELECTIVE, RECOMPUTED: "mlp+moe_act"}, CORE),
        ("TRAP-08", {**SELECTIVE, RECOMPUTED: "mlp+mlp"}, {**SELECTIVE, RECOMPUTED: "mlp"}, CORE),
        ("TRAP-14", {IMPL: "none", CAPTURED: "attn"}, {}, BRIDGE),
        ("TRAP-14", {CAPTURED: "attn"}, {IMPL: "none"}, CORE),
        ("TRAP-15", GRAPHS, {**GRAPHS, CAPTURED: ""}, CORE),
        ("TRAP-17", {**LOCAL, CAPTURED: "moe_router"}, {**LOCAL, CAPTURED: "moe_preprocess+moe_router"}, CORE),
        ("TRAP-24", {CAPACITY: -1.0, DROPS: "probs"}, {}, CORE),
    ],
)  # fmt: skip
def test_equal_effect_is_one_form(trap: str, one: Knobs, other: Knobs, launchers: frozenset[str]) -> None:
    assert canonical(one, launchers).knobs == canonical(other, launchers).knobs, trap


@pytest.mark.parametrize(
    ("one", "other", "launchers"),
    [
        ({TP: 2, EP: 4}, {TP: 2, EP: 4, ETP: 1}, CORE),
        ({TP: 2, EP: 4}, {TP: 2, EP: 4, ETP: 2}, BRIDGE),
        ({SP: True}, {}, CORE),
        ({**SELECTIVE, RECOMPUTED: "moe_act"}, SELECTIVE, CORE),
        ({CAPACITY: 0.0}, {}, CORE),
        ({**GRAPHS, CAPTURED: "attn"}, GRAPHS, CORE),
        ({DISPATCHER: "flex", BACKEND: "hybridep"}, {DISPATCHER: "flex", BACKEND: "deepep"}, CORE),
        ({DISPATCHER: "alltoall", BACKEND: "ncclep"}, {DISPATCHER: "alltoall"}, CORE),
    ],
)  # fmt: skip
def test_another_effect_is_another_form(one: Knobs, other: Knobs, launchers: frozenset[str]) -> None:
    assert canonical(one, launchers).knobs != canonical(other, launchers).knobs


def test_what_changes_and_what_is_ignored_is_said() -> None:
    form = canonical({TP: 2, EP: 4, RECOMPUTED: "moe_act", DISPATCHER: "alltoall", BACKEND: "deepep"}, BRIDGE)
    assert form.changed == {ETP: 1}
    assert any("TRAP-03" in note for note in form.notes)
    assert any("TRAP-08" in note for note in form.notes)
    assert form.resolved({TP: 2, EP: 4}) == {TP: 2, EP: 4, ETP: 1}


def _legal(name: str) -> LegalSpace:
    if name == LAPTOP.name:
        return screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING)
    training = TrainingShape(sequence_length=4096, global_batch_size=1024)
    return screen(NAMED_SPACES[name], load_model("qwen3-30b-a3b"), gpus(8), training, STACK)


@pytest.mark.parametrize(("name", "draws"), [("laptop", 5000), ("moe-full", 5000)])
def test_legal_draws_have_forms_of_their_own(name: str, draws: int) -> None:
    """So that no two candidates of a search are one run."""
    legal, source = _legal(name), random.Random(7)
    candidates = {candidate.id: candidate for candidate in (legal.draw(source) for _ in range(draws))}
    forms = {
        (tuple(sorted(canonical(each.knobs).knobs.items())), tuple(sorted(each.env.items())))
        for each in candidates.values()
    }
    assert len(candidates) > (700 if name == "laptop" else draws * 0.99)
    assert len(forms) == len(candidates)
