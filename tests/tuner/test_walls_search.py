"""Strategy "walls" on real spaces: what it tries against each wall, that it goes on with TPE, and that it resumes."""

from pathlib import Path

import pytest

from search_spaces.candidate import Candidate
from search_spaces.legal import LegalSpace
from search_spaces.screen import screen
from tests.tuner.test_proposer import LEGAL, LEGAL_SPACE, SPACE, cost
from train_worker.profile import Wall
from tuner.sweep import load_sweep
from tuner.walls_search import FAILURES, WallsProposer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def h200() -> LegalSpace:
    """The space of the H200 example, which has FP8 recipes, CUDA graphs and the grouped GEMM."""
    sweep = load_sweep(ROOT / "examples/h200.yaml")
    return screen(sweep.space, sweep.model, sweep.spec.cluster, sweep.spec.training, sweep.spec.stack)


def first_tries(legal: LegalSpace, wall: Wall | None, count: int) -> list[dict[str, object]]:
    """What changed against the default in the first proposals, all of them slower than it."""
    proposer = WallsProposer(legal, "minimize", seed=1, expected_trials=count)
    default = legal.space.default()
    proposer.adopt(0, default)
    proposer.tell(0, "measured", 1.0, wall)
    changes = []
    for number in range(1, count + 1):
        found = proposer.propose(number)
        assert found is not None
        assert found in legal
        proposer.tell(number, "measured", 2.0, "compute")
        before = default.knobs | default.env
        changes.append({k: v for k, v in (found.knobs | found.env).items() if k not in before or before[k] != v})
    return changes


def test_a_host_bound_default_gets_fewer_launches_then_graphs_then_more_work_for_each(h200: LegalSpace) -> None:
    grouped, captured, *later = first_tries(h200, "host", 10)
    assert grouped["moe_grouped_gemm"] is True
    assert captured["cuda_graph_impl"] == "transformer_engine"
    assert captured["cuda_graph_modules"] == "attn+moe_router+moe_preprocess"
    sizes = [change["micro_batch_size"] for change in later if "micro_batch_size" in change]
    assert sizes[:3] == [8, 4, 2]


def test_a_compute_bound_default_gets_the_grouped_gemm_then_fp8(h200: LegalSpace) -> None:
    first, *later = first_tries(h200, "compute", 8)
    assert first["moe_grouped_gemm"] is True
    assert any("fp8_recipe" in change and change["fp8"] for change in later)


def test_a_default_at_the_memory_wall_gets_selective_recompute(h200: LegalSpace) -> None:
    assert first_tries(h200, "memory", 1)[0]["recompute_granularity"] == "selective"


def told(proposer: WallsProposer, candidate: Candidate, seconds: float, wall: Wall, number: int = 0) -> None:
    proposer.adopt(number, candidate)
    proposer.tell(number, "measured", seconds, wall)


COSTLY = ("recompute_granularity", "fine_grained_activation_offloading", "optimizer_cpu_offload")


@pytest.mark.parametrize("wall", ["host", "compute", "communication"])
def test_what_buys_memory_with_time_waits_for_the_memory_wall(h200: LegalSpace, wall: Wall) -> None:
    """On a recorded table of 155 configurations it cost walls a third of its trials, none of them faster."""
    proposer = WallsProposer(h200, "minimize", seed=1, expected_trials=16)
    default = h200.space.default()
    told(proposer, default, 1.0, wall)
    asked = 0
    while (found := proposer._against_the_wall()) is not None:
        asked += 1
        assert all(found.knobs.get(name) == default.knobs.get(name) for name in COSTLY)
        told(proposer, found, 2.0, "memory", asked)  # the wall of what is not the best decides nothing
    assert asked > 5


@pytest.mark.parametrize("wall", ["host", "compute", "communication", "memory"])
def test_recompute_is_given_back_first_where_memory_is_no_wall(h200: LegalSpace, wall: Wall) -> None:
    proposer = WallsProposer(h200, "minimize", seed=1, expected_trials=16)
    before = h200.space.values(h200.space.default()) | {"recompute_granularity": "full"}
    full = h200.space.candidate(h200.space.values(h200.space.canonical(before)))
    assert full in h200
    told(proposer, full, 1.0, wall)
    found = proposer.propose(1)
    assert found is not None
    assert (found.knobs["recompute_granularity"] is None) == (wall != "memory")
    if wall != "memory":
        kept = {name: value for name, value in full.knobs.items() if not name.startswith("recompute_")}
        assert {name: value for name, value in found.knobs.items() if not name.startswith("recompute_")} == kept


def test_without_a_profile_it_is_tpe() -> None:
    plain = [WallsProposer(LEGAL_SPACE, "minimize", seed, 16) for seed in (1, 2)]
    for proposer in plain:
        proposer.adopt(0, SPACE.default())
        proposer.tell(0, "measured", 1.0, None)
    assert plain[0].propose(1) != plain[1].propose(1)  # drawn, not named by a guide


def run(proposer: WallsProposer, numbers: range, wall: Wall) -> list[Candidate]:
    found = []
    for number in numbers:
        candidate = proposer.propose(number)
        if candidate is None:
            break
        found.append(candidate)
        proposer.tell(number, "measured", cost(candidate), wall)
    return found


def test_every_legal_candidate_once_and_then_none() -> None:
    found = run(WallsProposer(LEGAL_SPACE, "minimize", 1, 16), range(100), "communication")
    assert len(found) == len({each.id for each in found}) == len(LEGAL)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_same_past_gives_the_same_future(direction: str) -> None:
    first = WallsProposer(LEGAL_SPACE, direction, 3, 16)  # type: ignore[arg-type]
    past, future = run(first, range(6), "host"), run(first, range(6, 12), "communication")
    again = WallsProposer(LEGAL_SPACE, direction, 3, 16)  # type: ignore[arg-type]
    for candidate in past:
        again.restore(candidate, "measured", cost(candidate), "host")
    assert run(again, range(6, 12), "communication") == future


def test_a_value_that_only_fails_is_not_asked_for_a_third_time(h200: LegalSpace) -> None:
    """Seen on an H200: FP8 with delayed scaling trained to another loss in each of five trials."""
    proposer = WallsProposer(h200, "minimize", seed=1, expected_trials=16)
    proposer.adopt(0, h200.space.default())
    proposer.tell(0, "measured", 1.0, "compute")
    named = []
    for number in range(1, 60):
        if proposer._against_the_wall() is None:
            break
        found = proposer.propose(number)
        assert found is not None
        named.append(found.knobs.get("fp8_recipe"))
        delayed = named[-1] == "delayed"  # every other one is an improvement, and the next one starts from it
        proposer.tell(number, *(("infeasible", None) if delayed else ("measured", 1.0 - number / 100)), "compute")
    assert named.count("delayed") == FAILURES
    assert named.count("tensorwise") + named.count("blockwise") > FAILURES
    assert len(named) > 10


def test_it_goes_on_from_the_best_not_from_the_last() -> None:
    proposer = WallsProposer(LEGAL_SPACE, "minimize", 1, 16)
    proposer.adopt(0, SPACE.default())
    proposer.tell(0, "measured", cost(SPACE.default()), "host")
    larger = proposer.propose(1)
    assert larger is not None
    assert larger.knobs["micro_batch_size"] == 8  # the largest first
    proposer.tell(1, "measured", cost(larger), "communication")
    overlapped = proposer.propose(2)
    assert overlapped is not None
    assert overlapped.knobs == larger.knobs | {"overlap_grad_reduce": True}
