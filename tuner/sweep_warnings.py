"""What is odd about a sweep that can be run all the same: said by `plan`, and by `run` before anything starts."""

from search_spaces.rules.versions import version_faults
from search_spaces.shapes import StackVersions, TrainingShape
from tuner.compare import USEFUL_ROUNDS, told_apart
from tuner.cpu_memory import Shortage
from tuner.sweep_spec import SweepSpec


def warnings_of(spec: SweepSpec, stack: StackVersions | None, short: Shortage | None) -> tuple[str, ...]:
    """All of them, one text each; empty where nothing is odd.

    `stack`: the versions that the rules judge by; the nearest older rule set judges releases newer than it knows.
    """
    releases = version_faults(stack.model_dump())[1] if stack else ()
    found = (*releases, rounds_warning(spec.verify.rounds), rate_warning(spec.training), str(short or ""))
    return tuple(words for words in found if words)


def rounds_warning(rounds: int) -> str:
    """Too few rounds to verify a winner by; "" for none at all, which says that no verdict is wanted."""
    if rounds == 0 or rounds >= USEFUL_ROUNDS:
        return ""
    why = "one round gives no interval, and so no verdict"
    if rounds > 1:
        why = (
            f"two rounds tell a difference only where it is {told_apart(2):.1f} times the spread between rounds "
            f"(three: {told_apart(3):.1f} times, four: {told_apart(4):.1f})"
        )
    return f"verify.rounds {rounds}: {why}; set it to {USEFUL_ROUNDS} or more, or to 0 to leave the winner unverified"


def rate_warning(training: TrainingShape) -> str:
    """A learning rate that is still rising when a trial ends; "" where it is not."""
    rise, least = training.learning_rate_warmup_steps, training.least_steps
    if rise < least:
        return ""
    return (
        f"training.learning_rate_warmup_steps {rise}: a trial may end after {least} steps, "
        f"at {(least - 1) / rise:.0%} of the learning rate, and the guard sees little; set it below {least}"
    )
