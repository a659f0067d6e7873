"""Which rules take most of a space away: counted exactly, with the facts they look at."""

import pytest

from search_spaces.blocking import ALONE_NODES, by_fact, facts_read, most_blocking
from search_spaces.named_spaces import LAPTOP, MOE_CORE
from search_spaces.rules import ALL_RULES, case_of, rules_for
from search_spaces.screen import LegalSpace, screen, verdict
from tests.search_spaces.cases import LAPTOP_RANKS, STACK, TINY, TRAINING, case, gpus
from tests.search_spaces.examples.clusters import H8
from tests.search_spaces.test_space import listed

SMALL = LAPTOP.restrict({
    "micro_batch_size": [1], "recompute_granularity": [None], "fp8": [None, "hybrid"], "fp8_recipe": ["delayed"],
    "cuda_graph_impl": ["none"], "moe_token_dispatcher_type": ["alltoall"],
    "overlap_moe_expert_parallel_comm": [False], "tensor_model_parallel_size": [1],
})  # fmt: skip


@pytest.fixture(scope="module")
def laptop() -> LegalSpace:
    return screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING)


def test_the_ten_largest_in_order(laptop: LegalSpace) -> None:
    found = most_blocking(laptop)
    assert len(found) == 10
    assert [each.rule for each in found] == [refusal.rule for refusal in laptop.refusals[:10]]
    assert [each.count for each in found] == sorted((each.count for each in found), reverse=True)


def test_what_a_rule_blocks_alone_is_what_listing_every_point_finds() -> None:
    legal = screen(SMALL, TINY, LAPTOP_RANKS, TRAINING)
    rules = rules_for(frozenset(), None)
    points = [case_of(SMALL.canonical(point), TINY, LAPTOP_RANKS, TRAINING) for point in listed(SMALL)]
    for each in most_blocking(legal):
        others = [rule for rule in rules if rule.id != each.rule]
        assert each.alone == sum(1 for point in points if verdict(point, rules) and not verdict(point, others))
    assert any(each.alone for each in most_blocking(legal))


def test_a_rule_names_the_facts_it_looks_at(laptop: LegalSpace) -> None:
    facts = {each.rule: each.facts for each in most_blocking(laptop)}
    assert facts["PAR-01"] == {"cluster.workers_per_trial": 2}
    assert facts["CPU-02"] == {"cluster.device": "cpu"}
    by_id = {rule.id: rule for rule in ALL_RULES}
    lacking = case(H8, dispatcher="flex", ep=8, stack={})
    assert facts_read(by_id["DSP-08"], lacking)["stack.deep_ep"] is None
    assert facts_read(by_id["HW-03"], case(H8, fp8="e4m3", fp8_recipe="mxfp8")) == {"cluster.gpu_arch": "H200 sm_90"}
    assert facts_read(by_id["PRC-07"], case(H8, fp8="e4m3", fp4="e2m1")) == {}


def test_points_by_fact_add_up(laptop: LegalSpace) -> None:
    counts = by_fact(laptop)
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    cpu = sum(refusal.count for refusal in laptop.refusals if refusal.rule.startswith("CPU-"))
    assert counts["cluster.device=cpu"] >= cpu > 0


def test_a_large_diagram_is_not_counted_ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    legal = screen(MOE_CORE, TINY, gpus(8), TRAINING, STACK)
    assert legal.nodes <= ALONE_NODES
    assert all(each.alone is not None for each in most_blocking(legal))
    monkeypatch.setattr("search_spaces.blocking.ALONE_NODES", 10)
    assert all(each.alone is None for each in most_blocking(legal))
