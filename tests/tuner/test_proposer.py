"""The real Optuna study: never the same candidate twice, only legal ones, and the same again from the same past."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_spaces.candidate import Candidate
from search_spaces.legal import LegalSpace
from search_spaces.memory.fits import State
from search_spaces.rules import Case, Rule
from search_spaces.space import Condition, Knob, SearchSpace
from tests.search_spaces.cases import LAPTOP_RANKS, TINY, TRAINING
from tuner.proposer import Proposer

SPACE = SearchSpace(
    "toy",
    (
        Knob("moe_token_dispatcher_type", ("allgather", "alltoall", "flex"), "allgather"),
        Knob(
            "moe_flex_dispatcher_backend",
            ("deepep", "hybridep"),
            "deepep",
            when=(Condition("moe_token_dispatcher_type", ("flex",)),),
        ),
        Knob("micro_batch_size", (1, 2, 4, 8), 1),
        Knob("overlap_grad_reduce", (False, True), False),
        Knob("recompute_granularity", (None, "selective", "full"), None),
    ),
)


def _refused(case: Case) -> str | None:
    return "flex is refused" if case.text("moe_token_dispatcher_type") == "flex" else None


def _halved(case: Case) -> str | None:
    return "2 is refused" if case.integer("micro_batch_size", 1) == 2 else None


RULES = (
    Rule("R-1", frozenset({"moe_token_dispatcher_type"}), _refused, "drawn", "change it"),
    Rule("R-2", frozenset({"micro_batch_size"}), _halved, "drawn", "change it"),
)
LEGAL_SPACE = LegalSpace(SPACE, RULES, Case({}, TINY, LAPTOP_RANKS, TRAINING))
LEGAL = list(LEGAL_SPACE)


def cost(candidate: Candidate) -> float:
    """A landscape with one best point: alltoall, micro-batch 8, overlap, no recompute."""
    knobs = candidate.knobs
    return (
        1.0
        + (knobs["moe_token_dispatcher_type"] != "alltoall") * 0.3
        + {1: 0.8, 4: 0.3, 8: 0.0}[knobs["micro_batch_size"]]
        + (not knobs["overlap_grad_reduce"]) * 0.1
        + {None: 0.0, "selective": 0.2, "full": 0.5}[knobs["recompute_granularity"]]
    )


def drive(proposer: Proposer, numbers: Sequence[int], infeasible: set[int] | None = None) -> list[Candidate]:
    proposed = []
    for number in numbers:
        candidate = proposer.propose(number)
        if candidate is None:
            break
        proposed.append(candidate)
        if number in (infeasible or set()):
            proposer.tell(number, "infeasible")
        else:
            proposer.tell(number, "measured", cost(candidate))
    return proposed


def make(seed: int = 1, direction: str = "minimize") -> Proposer:
    return Proposer(LEGAL_SPACE, direction, seed, expected_trials=16)


def test_every_legal_candidate_once_and_then_none() -> None:
    proposer = make()
    proposed = drive(proposer, range(1000))
    assert len(proposed) == len(LEGAL) == 36
    assert {c.id for c in proposed} == {c.id for c in LEGAL}
    assert proposer.propose(1000) is None


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31 - 1), st.sets(st.integers(0, 15), max_size=8), st.integers(1, 14))
def test_the_same_past_gives_the_same_future_resumed_or_not(seed: int, infeasible: set[int], cut: int) -> None:
    whole = drive(make(seed), range(16), infeasible)
    assert drive(make(seed), range(16), infeasible) == whole
    resumed = make(seed)
    for number, candidate in enumerate(whole[:cut]):
        if number in infeasible:
            resumed.restore(candidate, "infeasible")
        else:
            resumed.restore(candidate, "measured", cost(candidate))
    assert drive(resumed, range(cut, 16), infeasible) == whole[cut:]


def test_another_seed_searches_differently() -> None:
    assert drive(make(1), range(12)) != drive(make(2), range(12))


def test_the_search_learns() -> None:
    """Over ten seeds TPE meets the best of 36 points sooner than a draw without replacement would (mean 18.5)."""
    best = min(LEGAL, key=cost)
    met = [drive(make(seed), range(36)).index(best) + 1 for seed in range(10)]
    assert sum(met) / len(met) < 15


def test_a_maximising_search_goes_the_other_way() -> None:
    worst = max(LEGAL, key=cost)
    met = [drive(make(seed, "maximize"), range(36)).index(worst) + 1 for seed in range(10)]
    assert sum(met) / len(met) < 15


def test_the_sampler_stays_away_from_what_does_not_run() -> None:
    """Whatever does not recompute fully runs out of memory: later proposals hold fewer of those than chance (2/3)."""
    bad = 0
    for seed in range(6):
        proposer = make(seed)
        for number in range(14):
            candidate = proposer.propose(number)
            assert candidate is not None
            fits = candidate.knobs["recompute_granularity"] == "full"
            bad += number >= 6 and not fits
            proposer.tell(number, "measured" if fits else "infeasible", cost(candidate) if fits else None)
    assert bad / (6 * 8) < 0.5


def test_an_adopted_candidate_is_not_proposed_again() -> None:
    proposer = make()
    default = SPACE.default()
    proposer.adopt(0, default)
    proposer.tell(0, "measured", cost(default))
    assert default not in drive(proposer, range(1, 100))


def test_a_lost_trial_teaches_nothing_and_stops_nothing() -> None:
    proposer = make()
    first = proposer.propose(0)
    assert first is not None
    proposer.tell(0, "lost")
    assert len(drive(proposer, range(1, 100))) == len(LEGAL) - 1


def test_an_unknown_number_cannot_be_told() -> None:
    with pytest.raises(KeyError):
        make().tell(7, "measured", 1.0)


def sized(candidate: Candidate) -> State:
    """Memory as a judge would see it: micro-batch 8 fits with full recompute only, 4 without is tight."""
    size, full = candidate.knobs["micro_batch_size"], candidate.knobs["recompute_granularity"] == "full"
    if full or size == 1:
        return "fits"
    return "tight" if size == 4 else "refused"


def judged(seed: int = 1) -> Proposer:
    return Proposer(LEGAL_SPACE, "minimize", seed, expected_trials=16, fit=sized)


@pytest.mark.parametrize("seed", range(4))
def test_what_cannot_fit_is_never_proposed_and_what_is_tight_comes_last(seed: int) -> None:
    proposer = judged(seed)
    proposed = drive(proposer, range(1000))
    states = [sized(candidate) for candidate in proposed]
    counts = {state: sum(sized(c) == state for c in LEGAL) for state in ("fits", "tight", "refused")}
    assert states == ["fits"] * counts["fits"] + ["tight"] * counts["tight"]
    assert counts["refused"] > 0
    assert len({candidate.id for candidate in proposed}) == len(proposed)
    assert proposer.propose(1000) is None


def test_a_judged_search_goes_on_as_if_it_had_not_been_interrupted() -> None:
    whole = drive(judged(), range(12))
    resumed = judged()
    for candidate in whole[:7]:
        resumed.restore(candidate, "measured", cost(candidate))
    assert drive(resumed, range(7, 12)) == whole[7:]


def test_a_large_space_of_which_little_fits_is_searched_at_once() -> None:
    """One point in 36 fits: far tries and the scan find it."""
    only = LEGAL[-1]
    proposer = Proposer(LEGAL_SPACE, "minimize", 3, 16, lambda candidate: "fits" if candidate == only else "refused")
    assert proposer.propose(0) == only
    assert proposer.propose(1) is None
