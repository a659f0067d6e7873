"""What is said of a sweep that can run all the same: too few rounds to verify by."""

from math import exp, sqrt
from pathlib import Path

import pytest

from search_spaces.shapes import TrainingShape
from tests.end_to_end.sweeps import write_sweep
from tuner.commands.plan import plan
from tuner.compare import USEFUL_ROUNDS, compare, told_apart
from tuner.sweep import load_sweep
from tuner.sweep_warnings import rate_warning, rounds_warning


def rounds_of(count: int, difference: float) -> list[tuple[float, float]]:
    """Pairs whose log ratios have a spread (sample standard deviation) of 0.01 around -0.01 x `difference`."""
    half = 0.01 * sqrt((count - 1) / count)  # of values half above and half below
    assert count % 2 == 0
    return [(exp(-0.01 * difference + half * (-1) ** number), 1.0) for number in range(count)]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_difference_is_told_just_beyond_so_many_spreads(count: int) -> None:
    limit = told_apart(count)
    assert compare("a", "b", rounds_of(count, limit * 0.99)).verdict == "tie"
    assert compare("a", "b", rounds_of(count, limit * 1.01)).verdict == "faster"


def test_what_more_rounds_are_worth() -> None:
    assert [round(told_apart(count), 2) for count in (2, 3, 4, 5)] == [8.98, 2.48, 1.59, 1.24]


def test_too_few_rounds_are_said_with_the_least_useful_number() -> None:
    assert [bool(rounds_warning(count)) for count in (0, 1, 2, 3, 4)] == [False, True, True, False, False]
    assert "no verdict; set it to 3 or more, or to 0" in rounds_warning(1)
    assert "9.0 times the spread between rounds (three: 2.5 times, four: 1.6); set it to 3" in rounds_warning(2)
    assert USEFUL_ROUNDS == 3


def test_the_plan_says_it(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, 3)
    assert plan(load_sweep(path)).warnings == (rounds_warning(2),)
    path.write_text(path.read_text().replace("rounds: 2", "rounds: 0"))
    assert plan(load_sweep(path)).warnings == ()
    path.write_text(path.read_text().replace("warmup_steps: 1", "warmup_steps: 1\n  learning_rate_warmup_steps: 100"))
    (rising,) = plan(load_sweep(path)).warnings
    assert rising.startswith("training.learning_rate_warmup_steps 100: a trial may end after")


def test_a_learning_rate_that_still_rises_at_the_end_of_a_trial_is_said() -> None:
    training = TrainingShape(sequence_length=8, global_batch_size=8, warmup_steps=3, measured_steps=8)
    for rise, said in ((0, False), (10, False), (11, True), (40, True)):
        words = rate_warning(training.model_copy(update={"learning_rate_warmup_steps": rise}))
        assert bool(words) == said
    assert "after 11 steps, at 25% of the learning rate" in words
    stops = training.model_copy(update={"min_measured_steps": 4, "learning_rate_warmup_steps": 8})
    assert "after 7 steps" in rate_warning(stops)
