"""Kendall's tau-b of two passes: SciPy's where nothing is within the noise, and ties where it is."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from benchmarks.rank_stability import kendall, stability
from tests.train_worker.recorded import BASELINE, CANDIDATES, measured, row
from train_worker.recorded_table import RecordedTable

VALUES = st.sampled_from([0.1, 0.2, 0.2, 0.3, 0.4, 0.7])


@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=12))
def test_without_a_noise_floor_it_is_scipys_tau_b(both: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in both], [b for _, b in both]
    found = kendall(first, second, [0.0] * len(first)).tau_b
    expected = kendalltau(first, second, variant="b").statistic
    assert (found is None and expected != expected) or found == pytest.approx(expected)


def test_what_lies_inside_the_noise_is_tied() -> None:
    first, second = [1.0, 1.01, 2.0, 4.0], [1.01, 1.0, 2.0, 4.0]
    assert kendall(first, second, [0.01] * 4).tau_b == 1.0
    strict = kendall(first, second, [0.001] * 4)
    assert strict.discordant == 1
    assert strict.tau_b == pytest.approx(4 / 6)
    assert kendall(first, second, [10.0] * 4).tau_b is None


def test_each_pair_is_tied_by_its_own_noise() -> None:
    """The two steady ones are told apart, the two noisy ones are not; 2 sd of a difference of two."""
    first, second = [1.0, 1.02, 2.0, 2.04], [1.0, 1.02, 2.04, 2.0]
    found = kendall(first, second, [0.001, 0.001, 0.05, 0.05])
    assert (found.concordant, found.discordant, found.tied_in_both) == (5, 0, 1)
    assert found.floors == pytest.approx((math.expm1(1.96 * 0.001 * 2**0.5), math.expm1(1.96 * 0.05 * 2**0.5)))


def passes(swapped: bool) -> RecordedTable:
    chance = random.Random(1)
    rows = [row(BASELINE, measured((0.2 + 0.002 * (number % 2),)), repeat=number) for number in range(1, 11)]
    for sweep in (1, 2):
        order = list(CANDIDATES[1:12])
        if swapped and sweep == 2:
            order.reverse()
        for number, candidate in enumerate(order):
            seconds = 0.2 * 1.3**number * (1 + 0.002 * chance.random())
            rows.append(row(candidate, measured((seconds,))).model_copy(update={"sweep": sweep}))
    return RecordedTable(rows, "rows")


def test_two_passes_of_a_table() -> None:
    alike, against = stability(passes(swapped=False)), stability(passes(swapped=True))
    assert (alike.configurations, alike.tau_b) == (11, 1.0)
    assert 0 < alike.floors[0] <= alike.floors[1] < 0.03
    assert stability(passes(swapped=False), ties=False).floors == (0.0, 0.0)
    assert against.tau_b == -1.0


def test_by_how_long_the_gpu_works() -> None:
    """Which here is the same for all: every pair is tied."""
    found = stability(passes(swapped=True), "gpu_busy_s")
    assert (found.configurations, found.tau_b, found.tied_in_both) == (11, None, 55)


def test_a_table_without_passes_is_refused(tmp_path: Path) -> None:
    rows = [row(BASELINE, measured((0.2,)), repeat=number) for number in (1, 2)]
    with pytest.raises(SystemExit, match="0 configurations ran in both passes"):
        stability(RecordedTable(rows, str(tmp_path)))
