"""What a sweep optimises (`Objective`) and what it refuses to call correct (`Guard`); both are parts of a sweep file.

Pure: an `Outcome` goes in, a number or another `Outcome` comes out.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Literal

from pydantic import Field, model_validator

from search_spaces.shapes import Noun
from train_worker.outcome import Diverged, Measured, Outcome, Rejected

Metric = Literal["step_time_s", "tokens_per_s", "peak_memory_bytes"]
Direction = Literal["minimize", "maximize"]
BETTER: dict[Metric, Direction] = {
    "step_time_s": "minimize",
    "tokens_per_s": "maximize",
    "peak_memory_bytes": "minimize",
}


class Objective(Noun):
    """The metric the search follows: the median over measured steps, or the peak for memory."""

    metric: Metric = "step_time_s"
    direction: Direction = "minimize"

    @model_validator(mode="after")
    def _sensible(self) -> "Objective":
        if self.direction != BETTER[self.metric]:
            raise ValueError(f"{self.metric} is to {BETTER[self.metric]}, not to {self.direction}")
        return self


LOW_PRECISION = ("fp8", "fp4")  # knobs


class Guard(Noun):
    """How far a trial may stray from the baseline on the same data, as a share of the baseline's value.

    None: that quantity is not compared. NaN and infinity are always refused.
    """

    loss_relative_tolerance: float = Field(0.02, gt=0, description="of the loss of each step")
    low_precision_mean_loss_relative_tolerance: float | None = Field(
        None, gt=0,
        description="where one of the two trains in FP8 or FP4: of the losses' differences averaged over the steps "
        "that both have, whatever a single step's is; None: as any other",
    )  # fmt: skip
    grad_norm_relative_tolerance: float | None = Field(None, gt=0)

    def mean_tolerance(self, *compared: Measured | None) -> float | None:
        """What holds for the mean where these trials are compared with each other; None: each step is judged."""
        low = any(each is not None and any(each.effective.get(name) for name in LOW_PRECISION) for each in compared)
        return self.low_precision_mean_loss_relative_tolerance if low else None


def score(outcome: Outcome, objective: Objective) -> float | None:
    """What the sampler sees, in the metric's own unit; None where the trial did not run or gave no finite number."""
    if not isinstance(outcome, Measured):
        return None
    if objective.metric == "peak_memory_bytes":
        return float(outcome.peak_memory_bytes)
    values = [getattr(sample, objective.metric) for sample in outcome.steps]
    found = median(values) if values and all(map(math.isfinite, values)) else math.nan
    return found if math.isfinite(found) else None


def judge(outcome: Outcome, reference: Measured | None, guard: Guard, at_least: int = 0) -> Outcome:
    """The outcome itself, or `Diverged` at the first step whose loss or grad norm the guard refuses.

    Steps count from 0 and include warm-up: weights part there already. `reference` is the baseline on the same
    data; None (the baseline judging itself) leaves only the refusal of NaN and infinity. A trial may stop sooner than
    the baseline or later: the steps both have are compared, and where these are fewer than `at_least` the trial is
    Rejected (rule "too-few-steps"): nothing was shown. One that was given up as slow has few, and wins nothing by it.
    """
    if not isinstance(outcome, Measured):
        return outcome
    mine = outcome.warmup + outcome.steps
    theirs = reference.warmup + reference.steps if reference else ()
    if reference and not outcome.given_up and (common := min(len(mine), len(theirs))) < at_least:
        return Rejected(
            rule="too-few-steps", reason=f"compared with the baseline over {common} steps, of {at_least} needed"
        )
    on_average = guard.mean_tolerance(outcome, reference)
    for step, sample in enumerate(mine):
        base = theirs[step] if step < len(theirs) else None
        for name, value, expected, allowed in (
            ("loss", sample.loss, base.loss if base else None, None if on_average else guard.loss_relative_tolerance),
            ("grad norm", sample.grad_norm, base.grad_norm if base else None, guard.grad_norm_relative_tolerance),
        ):
            if fault := _fault(name, value, expected, allowed):
                return Diverged(step=step, reason=fault, losses=finite_or_none(outcome.losses))
    common = min(len(mine), len(theirs))
    if on_average and common:
        away = mean_difference([each.loss for each in mine], [each.loss for each in theirs])
        if not abs(away) <= on_average:
            reason = f"losses are on average {away:+.2%} away from the baseline's (allowed: {on_average:.2%})"
            return Diverged(step=common - 1, reason=reason, losses=finite_or_none(outcome.losses))
    return outcome


def mean_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The losses' differences as shares of the reference's, averaged over the steps both have, with their signs."""
    pairs = list(zip(losses, reference, strict=False))
    return fmean((mine - theirs) / (abs(theirs) or math.nan) for mine, theirs in pairs)


def _fault(name: str, value: float, expected: float | None, tolerance: float | None) -> str:
    if not math.isfinite(value):
        return f"{name} is {value}"
    # A reference that is not finite cannot be followed; the baseline is judged first, so it never gets here.
    if expected is None or tolerance is None or not math.isfinite(expected):
        return ""
    if abs(value - expected) <= tolerance * abs(expected):
        return ""
    away = abs(value - expected) / abs(expected) if expected else math.inf
    return f"{name} {value:.6g} is {away:.2%} away from the baseline's {expected:.6g} (allowed: {tolerance:.2%})"


def finite_or_none(values: Iterable[float]) -> tuple[float | None, ...]:
    """JSON has no NaN: what is not a number becomes None."""
    return tuple(value if math.isfinite(value) else None for value in values)
