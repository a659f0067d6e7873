"""What is odd about a sweep that can be run all the same: said by `plan`, and by `run` before anything starts."""

from search_spaces.rules.versions import version_faults
from search_spaces.shapes import TrainingShape
from tuner.compare import USEFUL_ROUNDS, told_apart
from tuner.cpu_memory import shortage_of
from tuner.sweep import LoadedSweep
from tuner.sweep_spec import SweepSpec


def warnings_of(sweep: LoadedSweep) -> tuple[str, ...]:
    """All of them, one text each; empty where nothing is odd."""
    short = shortage_of(sweep, sweep.spec.launch.address)
    found = (*stack_warnings(sweep.spec), *file_warnings(sweep.spec), str(short or ""))
    return tuple(words for words in found if words)


def file_warnings(spec: SweepSpec) -> tuple[str, ...]:
    """What the file alone shows."""
    found = (rounds_warning(spec.verify.rounds), rate_warning(spec.training))
    return tuple(words for words in found if words)


def stack_warnings(spec: SweepSpec) -> tuple[str, ...]:
    """Releases of the named stack that are newer than the rules know: the nearest older rule set judges them."""
    return tuple(version_faults(spec.stack.model_dump())[1]) if spec.stack else ()


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
