"""Step times made to have one oddity each, and none; seconds."""

import random
from statistics import fmean, stdev

import pytest

from train_worker.timing import enough, hopeless, outlying, relative_error, step_timing

QUIET = [0.250, 0.252, 0.249, 0.251, 0.250, 0.248, 0.252, 0.250, 0.251, 0.249, 0.250, 0.251]


def noisy(seed: int, count: int = 20, spread: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [0.25 * (1 + spread * draw.gauss(0, 1)) for _ in range(count)]


@pytest.mark.parametrize(
    ("times", "limit", "given_up"),
    [
        ([2.0, 2.0, 2.0], 1.5, True),
        ([2.0, 1.4, 2.0, 2.0], 1.5, False),  # one quick step is enough
        ([2.0, 2.0, 2.0, 1.0], 1.5, True),  # looked at when there are three
        ([9.0, 9.0], 1.5, False),
        ([9.0, 9.0, 9.0], None, False),
    ],
)
def test_a_trial_is_given_up_on_its_first_three_steps(times: list[float], limit: float | None, given_up: bool) -> None:
    assert hopeless(times, limit) is given_up


def test_a_quiet_trial_has_numbers_and_no_remarks() -> None:
    timing = step_timing(QUIET)
    assert (timing.count, timing.median_s, timing.outliers, timing.remarks) == (12, 0.250, (), ())
    assert timing.mad_s == pytest.approx(0.001)
    assert timing.mean_s == fmean(QUIET)
    assert timing.relative_standard_error == pytest.approx(stdev(QUIET) / 12**0.5 / fmean(QUIET))
    assert 0.249 <= timing.median_low_s <= 0.250 <= timing.median_high_s <= 0.252


def test_the_same_times_give_the_same_interval() -> None:
    assert step_timing(noisy(1)) == step_timing(noisy(1))
    assert step_timing(noisy(1)) != step_timing(noisy(2))


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    timings = [step_timing(noisy(seed)) for seed in range(200)]
    held = sum(timing.median_low_s <= 0.25 <= timing.median_high_s for timing in timings)
    assert 0.88 <= held / len(timings) <= 0.99


def test_a_step_that_ran_again_is_an_outlier_and_does_not_widen_the_error() -> None:
    odd = [*QUIET[:5], 0.503, *QUIET[5:]]
    timing = step_timing(odd)
    assert timing.outliers == (5,)
    assert timing.remarks == ("Far from the median of 13 steps: 5 (2.01x): a step that ran again, or a neighbour.",)
    assert timing.relative_standard_error == pytest.approx(relative_error(QUIET))
    assert timing.mean_s > 0.265


def test_a_difference_of_nothing_is_no_outlier_however_quiet_the_rest() -> None:
    assert outlying([0.250] * 9 + [0.252]) == ()  # MAD 0: its score is infinite
    assert outlying([0.250] * 9 + [0.300]) == (9,)
    assert outlying([0.1, 0.9]) == ()


def test_a_quarter_of_the_steps_is_a_speed_and_widens_the_error() -> None:
    few, many = [*QUIET[:10], 0.3, 0.3], [*QUIET[:9], 0.3, 0.3, 0.3]
    assert outlying(few) == (10, 11)
    assert outlying(many) == ()
    error = relative_error(many)
    assert error is not None
    assert error > 0.03  # and so a trial whose clock has dropped goes on


def test_a_drift_is_told_with_its_slope() -> None:
    timing = step_timing([seconds * (1 + 0.01 * step) for step, seconds in enumerate(QUIET)])
    assert timing.drift_per_step == pytest.approx(0.01, rel=0.15)
    assert timing.drift_p_value < 1e-3
    assert len(timing.remarks) == 1
    assert timing.remarks[0].startswith("The steps get slower, by 0.9")
    falling = step_timing([seconds * (1 - 0.01 * step) for step, seconds in enumerate(QUIET)])
    assert falling.remarks[0].startswith("The steps get faster, by 1.0")


def test_a_drift_too_small_to_matter_is_measured_and_not_said() -> None:
    timing = step_timing([0.25 * (1 + 0.001 * step) for step in range(12)])
    assert timing.drift_p_value < 1e-3
    assert timing.remarks == ()


def test_a_clock_that_drops_in_the_middle_is_told_with_its_step() -> None:
    timing = step_timing([*QUIET[:7], *(1.2 * seconds for seconds in QUIET[7:])])
    assert timing.remarks == ("From step 7 on they are slower by 19.8%: a clock that changed, or a neighbour.",)


def test_the_step_of_a_change_counts_the_outliers_too() -> None:
    timing = step_timing([0.9, *QUIET[:6], *(1.2 * seconds for seconds in QUIET[6:])])
    assert timing.outliers == (0,)
    assert timing.remarks[1].startswith("From step 7 on they are slower")


def test_steps_that_alternate_have_two_speeds() -> None:
    timing = step_timing([seconds * (1.3 if step % 2 else 1) for step, seconds in enumerate(QUIET)])
    assert timing.remarks == ("Two speeds, 26.1% apart, in turns (6 of 12 slow): the steps are not all alike.",)


def test_plain_noise_is_rarely_called_odd() -> None:
    remarked = sum(bool(step_timing(noisy(seed, spread=0.03)).remarks) for seed in range(200))
    assert remarked <= 12


def test_correlated_steps_say_less_than_as_many_independent_ones() -> None:
    slow_wave = [0.25 + 0.005 * (step // 5 % 2) for step in range(20)]
    shuffled = random.Random(3).sample(slow_wave, 20)
    wave, mixed = relative_error(slow_wave), relative_error(shuffled)
    assert wave is not None
    assert mixed is not None
    assert wave > 1.5 * mixed


@pytest.mark.parametrize("bad", [[], [0.1, 0.0], [0.1, float("nan")], [float("inf")], [-1.0]])
def test_what_is_no_time_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no step was timed|finite and above 0"):
        step_timing(bad)


def test_one_step_has_no_error_and_no_trend() -> None:
    timing = step_timing([0.25])
    assert (timing.relative_standard_error, timing.drift_per_step, timing.drift_p_value) == (None, 0.0, 1.0)
    assert timing.median_low_s == timing.median_high_s == 0.25


def test_enough_is_the_target_from_the_minimum_on_and_the_cap_at_last() -> None:
    error = relative_error(QUIET[:6])
    assert error is not None
    assert not enough(QUIET[:5], 0.5, 6, 20)
    assert enough(QUIET[:6], error, 6, 20)
    assert not enough(QUIET[:6], error * 0.99, 6, 20)
    assert enough(QUIET, 1e-9, 6, 12)
    assert not enough(QUIET[:11], None, 6, 12)
    assert enough(QUIET, None, 6, 12)
    assert not enough([0.25], 0.5, 1, 12)
    with pytest.raises(ValueError, match="minimum 6 exceeds the cap of 5 steps"):
        enough(QUIET, 0.1, 6, 5)
