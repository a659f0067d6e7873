"""Screening counts exactly what listing every point would count, and prunes as it goes."""

import random
from collections import Counter
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.errors import InputError
from search_spaces.legal import LegalSpace
from search_spaces.named_spaces import LAPTOP, MOE_CORE, MOE_FULL
from search_spaces.presets import load_model
from search_spaces.rules import ALL_RULES, Case, Rule, case_of, rules_for
from search_spaces.screen import screen, verdict
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from search_spaces.space import SearchSpace
from tests.search_spaces.cases import LAPTOP_RANKS, STACK, TINY, TRAINING, gpus
from tests.search_spaces.test_space import listed, spaces


def slow_screen(space: SearchSpace, rules: tuple[Rule, ...], facts: Case) -> tuple[list[str], Counter[str]]:
    """Ids of the legal points, and how many points each rule refuses, alone or not: by listing every point."""
    accepted, refused = [], Counter[str]()
    for point in listed(space):
        candidate = space.canonical(point)
        case = case_of(candidate, facts.model, facts.cluster, facts.training, facts.stack)
        if broken := [rule.id for rule in rules if rule.refusal(case)]:
            refused.update(broken)
        else:
            accepted.append(candidate.id)
    return accepted, refused


def same(screening: LegalSpace, space: SearchSpace, rules: tuple[Rule, ...], facts: Case) -> None:
    """The legal points are the same; each refused one is counted once, under a rule that refuses it."""
    accepted, refused = slow_screen(space, rules, facts)
    assert {candidate.id for candidate in screening} == set(accepted)
    assert screening.count == len(accepted)
    counted = {refusal.rule: refusal.count for refusal in screening.refusals}
    assert screening.total == len(accepted) + sum(counted.values())
    assert all(count <= refused[rule] for rule, count in counted.items())


@st.composite
def drawn_rules(draw: st.DrawFn, space: SearchSpace) -> tuple[Rule, ...]:
    """Rules that refuse one drawn combination of values of one to three knobs."""
    made = []
    for number in range(draw(st.integers(0, 4))):
        names = draw(st.lists(st.sampled_from([k.name for k in space.knobs]), min_size=1, max_size=3, unique=True))
        wanted = {name: draw(st.sampled_from(space.by_name[name].choices)) for name in names}

        def check(case: Case, wanted: dict[str, KnobValue] = wanted) -> str | None:
            found = {n: case.env.get(n) if n.isupper() else case.knobs.get(n) for n in wanted}
            hit = all(str(found[n]) == str(value) for n, value in wanted.items())
            return f"{wanted} is refused" if hit else None

        made.append(Rule(f"R-{number}", frozenset(names), check, "drawn", "change it"))
    return tuple(made)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_counts_are_those_of_brute_force_on_drawn_spaces(data: st.DataObject) -> None:
    space = data.draw(spaces())
    rules = data.draw(drawn_rules(space))
    facts = Case({}, TINY, LAPTOP_RANKS, TRAINING)
    same(screen(space, TINY, LAPTOP_RANKS, TRAINING, rules=rules), space, rules, facts)


@pytest.mark.parametrize(
    ("space", "cluster", "training"),
    [
        (
            LAPTOP.restrict({"micro_batch_size": [1, 8], "fp8_recipe": ["delayed"], "cuda_graph_modules": ["attn"],
                             "moe_flex_dispatcher_backend": ["deepep"], "recompute_modules": ["moe", "moe_act"],
                             "use_distributed_optimizer": [False], "cuda_graph_impl": ["none", "local"]}),
            LAPTOP_RANKS, TRAINING,
        ),
        (
            MOE_CORE.restrict({"micro_batch_size": [4], "fp8_recipe": ["delayed", "mxfp8"],
                               "recompute_modules": ["layernorm", "moe"], "recompute_method": ["uniform"],
                               "tensor_model_parallel_size": [1, 2], "pipeline_model_parallel_size": [1, 2],
                               "virtual_pipeline_model_parallel_size": [None, 2], "expert_tensor_parallel_size": [1],
                               "expert_model_parallel_size": [1, 4], "moe_token_dispatcher_type": ["alltoall", "flex"],
                               "overlap_grad_reduce": [False], "use_distributed_optimizer": [False],
                               "cuda_graph_modules": ["attn+moe_router"], "delay_wgrad_compute": [False]}),
            gpus(8), TrainingShape(sequence_length=128, global_batch_size=64),
        ),
    ],
    ids=["laptop", "moe-core"],
)  # fmt: skip
def test_counts_are_those_of_brute_force_on_the_real_rules(
    space: SearchSpace, cluster: ClusterShape, training: TrainingShape
) -> None:
    assert 2_000 < space.size() < 40_000, "large enough to mean something, small enough to list"
    screening = screen(space, TINY, cluster, training, STACK)
    assert screening.count
    same(screening, space, rules_for(frozenset(), STACK.megatron_core), Case({}, TINY, cluster, training, stack=STACK))


@pytest.fixture(scope="module")
def laptop() -> LegalSpace:
    return screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING)


def test_the_laptop_space_has_known_counts(laptop: LegalSpace) -> None:
    """888 = 2 dispatchers x 4 micro-batches x 111: layout and data parallelism (recompute counted with each).

    Layouts without DP (PP 2: plain 7 recomputes, VPP 6, and TP 2 with ETP 2 or EP 2: 7 each): 7 + 6 + 7 + 7 = 27;
    with DP (EP 1, EP 2, and TP 2 with ETP 1): 3 x 7 recomputes x 4 settings = 84.
    """
    assert laptop.total == 2_688_000
    assert laptop.count == 2 * 4 * (27 + 84) == 888
    assert laptop.total == 888 + sum(refusal.count for refusal in laptop.refusals)
    assert next(iter(laptop)).id == LAPTOP.default().id
    assert len({candidate.id for candidate in laptop}) == 888
    assert all(candidate in laptop for candidate in laptop)


def test_what_is_accepted_breaks_no_rule_and_each_example_breaks_its_own(laptop: LegalSpace) -> None:
    by_id = {rule.id: rule for rule in ALL_RULES}
    for candidate in laptop:
        assert verdict(case_of(candidate, TINY, LAPTOP_RANKS, TRAINING)) is None
        assert LAPTOP.canonical(LAPTOP.values(candidate)).id == candidate.id
    for refusal in laptop.refusals:
        case = case_of(refusal.example, TINY, LAPTOP_RANKS, TRAINING)
        assert by_id[refusal.rule].refusal(case) is not None
        assert refusal.count > 0


def test_what_this_machine_lacks_is_in_the_space_and_refused_with_its_reason(laptop: LegalSpace) -> None:
    reasons = {refusal.rule: refusal.reason for refusal in laptop.refusals}
    for rule, word in {
        "CPU-01": "flex", "CPU-02": "FP8", "CPU-03": "graphs", "CPU-04": "EP overlap", "CPU-06": "moe_act",
        "PAR-27": "trains wrong",
    }.items():  # fmt: skip
        assert word in reasons[rule]


def test_screening_lists_only_what_it_must() -> None:
    """The work is bounded by prefixes: 2.7 million points with fewer than 10,000 questions to rules."""
    asked = Counter[str]()

    def counted(rule: Rule) -> Rule:
        def check(case: Case) -> str | None:
            asked[rule.id] += 1
            return rule.check(case)

        return Rule(rule.id, rule.reads, check, rule.source, rule.fix)

    screening = screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING, rules=tuple(map(counted, ALL_RULES)))
    assert screening.count == 888
    assert asked.total() < 10_000


@pytest.mark.parametrize("limit", ["legal.EDGE_LIMIT", "lazy_rules._Questions.most"])
def test_a_space_that_couples_too_much_names_the_knobs_to_narrow(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"search_spaces.{limit}", 100)
    with pytest.raises(InputError, match=r"couples too many choices \(over 100 ") as caught:
        screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING)
    assert "narrow space.choices" in caught.value.next_step


def test_many_choices_that_rules_couple_are_refused_in_seconds() -> None:
    wide = MOE_FULL.restrict({"micro_batch_size": tuple(range(1, 65)), "tensor_model_parallel_size": range(1, 65)})
    began = process_time()
    with pytest.raises(InputError, match="couples too many choices"):
        screen(wide, load_model("qwen3-30b-a3b"), gpus(64), TRAINING, STACK)
    assert process_time() - began < 60


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_drawn_is_legal_and_everything_legal_can_be_drawn(data: st.DataObject) -> None:
    space = data.draw(spaces())
    legal = screen(space, TINY, LAPTOP_RANKS, TRAINING, rules=data.draw(drawn_rules(space)))
    points = {candidate.id for candidate in legal}
    if not points:
        with pytest.raises(ValueError, match="no legal point"):
            legal.draw(random.Random(1))
        return
    source = random.Random(data.draw(st.integers(0, 100)))
    assert {legal.draw(source).id for _ in range(20)} <= points
    wanted = data.draw(st.sampled_from(list(legal)))
    values = space.values(wanted)
    assert legal.walk(lambda knob, live: next(v for v in live if v == values[knob.name])).id == wanted.id
    alive = legal.choices_alive()
    for knob in space.knobs:
        used = {space.values(candidate)[knob.name] for candidate in legal if knob.name in space.values(candidate)}
        assert set(alive.get(knob.name, ())) == used


def test_membership_is_what_the_rules_say(laptop: LegalSpace) -> None:
    refused = [refusal.example for refusal in laptop.refusals]
    assert refused
    assert not any(candidate in laptop for candidate in refused)
    assert "a word" not in laptop


def test_one_h200_leaves_recompute_precision_grouped_gemm_and_micro_batch() -> None:
    model: ModelShape = load_model("qwen3-30b-a3b-4l")
    screening = screen(MOE_CORE, model, gpus(1), TrainingShape(sequence_length=4096, global_batch_size=16), STACK)
    changed = {name for candidate in screening for name in candidate.knobs}
    assert {"fp8_recipe", "recompute_modules", "micro_batch_size"} <= changed
    assert {candidate.knobs["moe_grouped_gemm"] for candidate in screening} == {False, True}
    assert all(candidate.knobs["moe_grouped_gemm"] for candidate in screening if candidate.env)
    assert {candidate.knobs["cuda_graph_impl"] for candidate in screening} == {"none", "transformer_engine"}
    assert all(candidate.layout.expert == 1 for candidate in screening)
    assert not any(candidate.knobs["moe_token_dispatcher_type"] == "flex" for candidate in screening)
    assert not any(candidate.knobs.get("fp8_recipe") == "mxfp8" for candidate in screening)
