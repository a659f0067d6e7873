"""How repeats scatter: what was put into made-up trials is found again, and the two parts never fall below zero."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_worker.recorded import PROFILE, measured
from train_worker.noise import Noise, fitted, idle_share
from train_worker.table import MeasuredPart

PART = MeasuredPart.of(measured((0.25,)))


def part(seconds: float, idle: float | None) -> MeasuredPart:
    busy = None if idle is None else seconds * (1 - idle)
    return PART.model_copy(update={"step_times_s": (seconds,), "gpu_busy_s": busy})


def drawn(noise: Noise, idles: Sequence[float], repeats: int) -> list[list[MeasuredPart]]:
    """Repeats of one configuration for each share of idle time."""
    chance = random.Random(3)
    return [[part(0.2 * math.exp(chance.gauss(0, noise.spread(idle))), idle) for _ in range(repeats)] for idle in idles]


@pytest.mark.parametrize("true", [Noise(0.005, 0.2, 0), Noise(0.01, 0.0, 0), Noise(0.0, 0.3, 0)])
def test_what_was_put_in_is_found_again(true: Noise) -> None:
    found = fitted(drawn(true, [number / 100 for number in range(1, 61)], 40))
    assert found is not None
    for idle in (0.01, 0.1, 0.5):
        assert found.spread(idle) == pytest.approx(true.spread(idle), rel=0.1, abs=3e-4)


def test_of_one_configuration_alone_all_is_quiet() -> None:
    found = fitted(drawn(Noise(0.04, 0.0, 0.04), [0.3], 400))
    assert found is not None
    assert found.host == 0
    assert found.quiet == pytest.approx(0.04, rel=0.1)


def test_without_repeats_nothing_is_known() -> None:
    assert fitted([]) is None
    assert fitted(drawn(Noise(0.04, 0.0, 0.04), [0.1, 0.2], 1)) is None


def test_repeats_that_agree_to_the_digit() -> None:
    assert fitted(drawn(Noise(0.0, 0.0, 0.0), [0.1, 0.2, 0.3], 3)) == pytest.approx(Noise(0.0, 0.0, 0.0), abs=1e-9)


def test_the_fit_comes_to_rest() -> None:
    """Two repeats each of five configurations, by idle share and variance: whole steps jump to and fro between no noise
    of the host and no other noise."""
    seen = ((0.0, 2.21e-5), (0.005, 3.76e-6), (0.128, 3.51e-4), (0.267, 7.15e-5), (0.292, 0.02))
    pairs = [
        [part(0.2 * math.exp(sign * math.sqrt(variance / 2)), idle) for sign in (-1, 1)] for idle, variance in seen
    ]
    found = fitted(pairs)
    assert found is not None
    assert found.quiet > 0.001
    assert found.host > 0.1


def test_trials_without_a_profile() -> None:
    assert idle_share([part(0.2, None)]) is None
    assert idle_share([part(0.2, 0.4), part(0.3, None)]) == pytest.approx(0.4)
    assert idle_share([part(0.2, -0.1)]) == 0  # the profiled step was slower than the measured ones


def test_a_gpu_that_waits_for_a_peer_does_nothing() -> None:
    waits = PROFILE.model_copy(update={"waiting_s": 0.05})
    found = part(0.2, 0.1).model_copy(update={"profile": waits})
    assert idle_share([found]) == pytest.approx(0.1 + 0.05 / 0.2)
    assert idle_share([found.model_copy(update={"profile": PROFILE})]) == pytest.approx(0.1)


def test_of_trials_without_a_profile_nothing_is_said_of_their_host() -> None:
    """They would look like a GPU that never waits, and make all that do not wait look noisy."""
    quiet, loud = drawn(Noise(0.001, 0.0, 0), [0.01, 0.02], 40), drawn(Noise(0.1, 0.0, 0), [0.5], 40)
    unseen = [[part(each.step_times_s[0], None) for each in group] for group in loud]
    found = fitted([*quiet, *unseen])
    assert found is not None
    assert found.spread(0.0) == pytest.approx(0.001, rel=0.2)
    assert found.spread(None) == pytest.approx(0.1 / math.sqrt(3), rel=0.2)
    alone = fitted(unseen)
    assert alone is not None
    assert alone.spread(None) == alone.spread(0.3) == pytest.approx(0.1, rel=0.2)


groups = st.lists(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 0.99)), min_size=1, max_size=4), min_size=1, max_size=6
)


@given(groups)
def test_any_repeats_have_a_spread(values: list[list[tuple[float, float]]]) -> None:
    found = fitted([[part(seconds, idle) for seconds, idle in group] for group in values])
    assert (found is None) == all(len(group) < 2 for group in values)
    if found:
        assert found.quiet >= 0
        assert found.host >= 0
        assert math.isfinite(found.spread(1.0))
