import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.compare import compare, median_interval, name_one, noise_floor, order, t_quantile

TIMES = st.floats(1e-4, 1e3)
# No deadline: a busy machine is no fault of the code. Derandomized: the suite says the same every time.
quiet = settings(deadline=None, derandomize=True)


@quiet
@given(st.lists(TIMES, min_size=2, max_size=20))
def test_identical_series_tie(times: list[float]) -> None:
    result = compare("a", "b", [(t, t) for t in times])
    assert result.verdict == "tie"
    assert result.ratio == result.ratio_low == result.ratio_high == 1.0


@quiet
@given(st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=20))
def test_swapping_the_sides_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    there, back = compare("a", "b", pairs), compare("b", "a", [(b, a) for a, b in pairs])
    assert there.ratio_low <= there.ratio * (1 + 1e-9)
    assert there.ratio <= there.ratio_high * (1 + 1e-9)
    assert math.isclose(there.ratio * back.ratio, 1, rel_tol=1e-9)
    assert {there.verdict, back.verdict} in ({"tie"}, {"faster", "slower"})


@quiet
@given(st.lists(TIMES, min_size=2, max_size=10), st.floats(0.1, 0.9))
def test_a_constant_gain_is_faster_whatever_the_rounds_have_in_common(times: list[float], gain: float) -> None:
    result = compare("a", "b", [(t * gain, t) for t in times])
    assert result.verdict == "faster"
    assert math.isclose(result.ratio, gain, rel_tol=1e-6)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, hits, runs = random.Random(7), 0, 2000
    for _ in range(runs):
        pairs = [(0.97 * math.exp(rng.gauss(0, 0.02)), math.exp(rng.gauss(0, 0.02))) for _ in range(4)]
        result = compare("a", "b", pairs)
        hits += result.ratio_low <= 0.97 <= result.ratio_high
    assert 0.935 < hits / runs < 0.965  # 3 standard errors around 0.95


@pytest.mark.parametrize(("pairs", "ratio"), [([], 1.0), ([(0.5, 1.0)], 0.5), ([(0.5, 1.0), (math.nan, 1.0)], 0.5)])
def test_fewer_than_two_pairs_prove_nothing(pairs: list[tuple[float, float]], ratio: float) -> None:
    result = compare("a", "b", pairs)
    assert result.verdict == "unverified"
    assert result.ratio == result.ratio_low == result.ratio_high == ratio


def test_the_default_against_itself_is_the_same() -> None:
    assert compare("a", "a", [(1.0, 2.0), (1.0, 2.0)]).verdict == "same"


def test_noise_that_hides_the_gain_is_a_tie() -> None:
    assert compare("a", "b", [(0.90, 1.0), (1.05, 1.0), (0.95, 1.0)]).verdict == "tie"


def test_the_order_turns_every_round() -> None:
    assert [order(i, 2) for i in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert [order(i, 3) for i in range(4)] == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]


LATE = math.nan  # a round that was lost


@pytest.mark.parametrize(
    ("one", "two", "named"),
    [
        ([0.80, 0.81, 0.80], [0.70, 0.71, 0.70], "two"),
        ([0.70, 0.71, 0.70], [0.80, 0.81, 0.80], "one"),
        ([0.70, 1.10, 0.80], [0.90, 0.91, 0.90], "two"),  # 0.85 at its best, which 1 is in the interval of
        ([0.95, 1.08, 0.97], [0.90, 1.20, 0.92], "two"),  # nothing is shown: 0.995 and 0.994
        ([0.80, LATE, LATE], [1.10, 1.11, 1.10], "two"),  # slower is an answer, a single round is none
        ([0.90, LATE, LATE], [0.80, LATE, LATE], "one"),
        ([0.80, 0.80, 0.80], [0.80, 0.80, 0.80], "one"),
    ],
)
def test_the_best_proven_one_is_named(one: list[float], two: list[float], named: str) -> None:
    compared = name_one({"one": one, "two": two}, "default", [1.0, 1.0, 1.0])
    assert compared.finalist_id == named
    assert [each.finalist_id for each in compared.runners_up] == [{"one": "two", "two": "one"}[named]]


def test_one_that_failed_is_named_last_and_has_the_rounds_that_it_ran() -> None:
    times = {"one": [0.5, 0.5, LATE], "two": [1.1, 1.2, 1.1, 1.2]}
    compared = name_one(times, "default", [1.0] * 4, failed={"one"})
    assert (compared.finalist_id, compared.verdict, compared.rounds) == ("two", "slower", 4)
    assert (compared.runners_up[0].against_default.rounds, compared.runners_up[0].against_named.rounds) == (2, 2)
    assert name_one(times, "default", [1.0] * 4, failed=times).finalist_id == "one"


def test_one_finalist_is_compared_as_ever() -> None:
    times, default = [0.9, 1.0, 0.8], [1.0, 1.1, 1.2]
    assert name_one({"a": times}, "b", default, "natural") == compare(
        "a", "b", list(zip(times, default, strict=True)), "natural"
    )
    assert name_one({"b": []}, "b", []).verdict == "same"


def test_t_quantiles() -> None:
    assert t_quantile(1) == 12.706
    assert t_quantile(30) == t_quantile(1000) == 2.042


def test_noise_floor_grows_with_the_spread_and_needs_two_repeats() -> None:
    assert noise_floor([]) is None
    assert noise_floor([[1.0], [2.0]]) is None
    assert noise_floor([[1.0, 1.0, 1.0]]) == 0.0
    calm, wild = noise_floor([[1.0, 1.01, 0.99, 1.0]]), noise_floor([[1.0, 1.1, 0.9, 1.0]])
    assert calm is not None
    assert wild is not None
    assert 0.02 < calm < wild


def test_the_noise_floor_holds_back_differences_of_one_and_the_same() -> None:
    rng, inside, runs = random.Random(3), 0, 1000
    for _ in range(runs):
        floor = noise_floor([[math.exp(rng.gauss(level, 0.02)) for _ in range(3)] for level in (0, 1)])
        first, second = (math.exp(rng.gauss(0, 0.02)) for _ in range(2))
        assert floor is not None
        inside += max(first, second) / min(first, second) - 1 <= floor
    assert 0.93 < inside / runs < 0.97


def test_the_interval_of_a_median_covers_it() -> None:
    rng, runs = random.Random(5), 2000
    for count, least in ((6, 0.95), (8, 0.95), (30, 0.95), (3, 0.70)):
        hits = 0
        for _ in range(runs):
            low, high = median_interval([rng.expovariate(1) for _ in range(count)])
            hits += low <= math.log(2) <= high
        assert hits / runs > least - 0.015
    assert median_interval([2.0]) == (2.0, 2.0)
    assert median_interval([float(i) for i in range(100)]) == (39.0, 60.0)  # textbook: ranks 40 and 61 of 100
