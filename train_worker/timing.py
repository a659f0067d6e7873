"""What the raw step times of one trial say, and whether they are enough. Pure: no torch, no clock.

What is assumed: a step is one draw from one distribution. It is not quite: consecutive steps share the machine's state,
so their times are correlated, and n steps say less than n independent ones would. Where the correlation of neighbours
can be told from zero, the standard error is widened for it (AR(1): by sqrt((1 + r) / (1 - r))); with few steps r itself
is hardly known, and a trial's luck as a whole (its process, its minute) is in no statistic of its steps: that is what
the interleaved repeats and the noise floor of `tuner.compare` are for.
"""

import math
import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean, median, stdev, variance

from pydantic import Field

from search_spaces.shapes import Noun

SLOW_STEPS = 3  # measured before a trial may be given up; on an H200 a step scatters by 2 to 18% within a trial
OUTLIER_SCORE = 3.5  # modified z-score, Iglewicz and Hoaglin (1993): NIST/SEMATECH e-Handbook 1.3.5.17
OUTLIER_SHARE = 0.10  # of the median: with a small MAD a score alone would name steps that differ by nothing
SIGNIFICANT = 0.01  # p of the trend test below which a drift is said
DRIFT_SHARE = 0.02  # of the median over all steps: less is said nowhere
SPEED_SHARE = 0.25  # of the steps: fewer of another speed are outliers
SPEEDS_APART = 0.05  # of the median: two speeds nearer to each other than this are one
SPEEDS_STEPS = 10  # with 8 one normal distribution in 25 splits in two by chance, with 12 one in 170
SPEEDS_EXPLAINED = 0.90  # of the variance; one normal distribution gives 0.64, a uniform one 0.75
RESAMPLES = 1000


class StepTiming(Noun):
    """Step times of one trial, in seconds; the slowest rank's. Shares are of the median.

    The interval is the bootstrap's (percentiles of the medians of resampled steps, seeded): steps taken as independent.
    """

    count: int
    median_s: float
    mad_s: float = Field(description="median of the distances from the median, not scaled")
    mean_s: float = Field(description="of all steps, outliers included")
    relative_standard_error: float | None = Field(
        description="of the mean of the steps that are no outliers, as a share of it, widened where neighbours are "
        "correlated; None: fewer than two steps"
    )
    median_low_s: float = Field(description="95% interval of the median")
    median_high_s: float
    outliers: tuple[int, ...] = Field(
        description="steps, counted from 0 without warm-up: modified z-score over 3.5, more than 10% off the median, "
        "and together under a quarter of the steps"
    )
    drift_per_step: float = Field(description="Theil-Sen slope: share of the median a step; positive: it gets slower")
    drift_p_value: float = Field(description="Mann-Kendall, two-sided, normal approximation: cautious below 10 steps")
    remarks: tuple[str, ...] = Field((), description="what a person should know before believing the number")


def step_timing(times_s: Sequence[float], seed: int = 0) -> StepTiming:
    """Statistics of step times in seconds, in the order they ran. ValueError: no times, or one that is not above 0."""
    if not times_s:
        raise ValueError("no step was timed")
    if wrong := [seconds for seconds in times_s if not (math.isfinite(seconds) and seconds > 0)]:
        raise ValueError(f"a step time must be finite and above 0, not {wrong[0]}")
    middle = median(times_s)
    low, high = _bootstrap(times_s, seed)
    drift, p_value = _trend(times_s)
    outliers = outlying(times_s)
    return StepTiming(
        count=len(times_s),
        median_s=middle,
        mad_s=_mad(times_s),
        mean_s=fmean(times_s),
        relative_standard_error=relative_error(times_s),
        median_low_s=low,
        median_high_s=high,
        outliers=outliers,
        drift_per_step=drift / middle,
        drift_p_value=p_value,
        remarks=_remarks(times_s, outliers, drift / middle, p_value),
    )


def enough(times_s: Sequence[float], target: float | None, minimum: int, cap: int) -> bool:
    """Whether to stop: at `cap` steps, or from `minimum` on where the relative standard error is at most `target`.

    `target` None: only at the cap. Looking after each step makes the error at the stop a little too small (the luckier
    the sooner); `minimum` bounds that. ValueError where minimum exceeds the cap.
    """
    if minimum > cap:
        raise ValueError(f"minimum {minimum} exceeds the cap of {cap} steps")
    if len(times_s) >= cap:
        return True
    if target is None or len(times_s) < minimum:
        return False
    error = relative_error(times_s)
    return error is not None and error <= target


def hopeless(times_s: Sequence[float], limit_s: float | None) -> bool:
    """Whether the first `SLOW_STEPS` measured steps all took longer than `limit_s`; None: never."""
    first = times_s[:SLOW_STEPS]
    return limit_s is not None and len(first) == SLOW_STEPS and min(first) > limit_s


def relative_error(times_s: Sequence[float]) -> float | None:
    """Standard error of the mean without outliers, as a share of it; None for fewer than two such steps.

    Without outliers, because the score is a median: one step that ran again does not move it, and must not keep a trial
    running to its cap.
    """
    left_out = set(outlying(times_s))
    kept = [seconds for step, seconds in enumerate(times_s) if step not in left_out]
    if len(kept) < 2:
        return None
    return stdev(kept) / math.sqrt(len(kept)) / fmean(kept) * _widening(kept)


def outlying(times_s: Sequence[float]) -> tuple[int, ...]:
    """Indices of outliers: 0.6745 |x - median| / MAD over 3.5, and more than 10% off the median.

    None where these are a quarter of the steps or more: then it is the steps that have two speeds, and leaving one of
    them out would make the error of the mean look small.
    """
    middle, spread = median(times_s), _mad(times_s)
    far = tuple(
        step
        for step, seconds in enumerate(times_s)
        if abs(seconds - middle) > OUTLIER_SHARE * middle and 0.6745 * abs(seconds - middle) > OUTLIER_SCORE * spread
    )
    return far if len(far) < len(times_s) * SPEED_SHARE else ()


def _mad(times_s: Sequence[float]) -> float:
    middle = median(times_s)
    return median(abs(seconds - middle) for seconds in times_s)


def _widening(times_s: Sequence[float]) -> float:
    """Factor on the standard error for correlated neighbours; 1 where r is within what independent steps give."""
    mean, count = fmean(times_s), len(times_s)
    squares = sum((seconds - mean) ** 2 for seconds in times_s)
    if not squares:
        return 1.0
    r = sum((a - mean) * (b - mean) for a, b in pairwise(times_s)) / squares
    # Of independent steps r has mean -1/n and spread 1/sqrt(n); above their one-sided 95% point it is believed.
    return math.sqrt((1 + r) / (1 - r)) if r > 1.645 / math.sqrt(count) - 1 / count else 1.0


def _bootstrap(times_s: Sequence[float], seed: int) -> tuple[float, float]:
    draw, count = random.Random(seed), len(times_s)
    medians = sorted(median(draw.choices(times_s, k=count)) for _ in range(RESAMPLES))
    edge = round(0.025 * RESAMPLES)
    return medians[edge], medians[-1 - edge]


def _trend(times_s: Sequence[float]) -> tuple[float, float]:
    """Theil-Sen slope, seconds a step, and the two-sided p of Mann-Kendall (corrected for ties and continuity)."""
    pairs = list(combinations(enumerate(times_s), 2))
    if not pairs:
        return 0.0, 1.0
    slope = median((later - sooner) / (second - first) for (first, sooner), (second, later) in pairs)
    balance = sum((later > sooner) - (later < sooner) for (_, sooner), (_, later) in pairs)
    count = len(times_s)
    ties = [times_s.count(seconds) for seconds in set(times_s)]
    spread = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if spread <= 0 or not balance:
        return slope, 1.0
    return slope, math.erfc((abs(balance) - 1) / math.sqrt(2 * spread))


def _remarks(times_s: Sequence[float], outliers: tuple[int, ...], drift: float, p_value: float) -> tuple[str, ...]:
    found = []
    middle = median(times_s)
    if outliers:
        shown = ", ".join(f"{step} ({times_s[step] / middle:.2f}x)" for step in outliers)
        why = ": a step that ran again, or a neighbour" if any(times_s[step] > middle for step in outliers) else ""
        found.append(f"Far from the median of {len(times_s)} steps: {shown}{why}.")
    speeds = _two_speeds({step: seconds for step, seconds in enumerate(times_s) if step not in outliers})
    total = drift * (len(times_s) - 1)
    if speeds:
        found.append(speeds)
    elif p_value < SIGNIFICANT and abs(total) > DRIFT_SHARE:
        word = "slower" if total > 0 else "faster"
        found.append(
            f"The steps get {word}, by {abs(drift):.2%} of the median each (p {p_value:.1g}): the clock, or not warm."
        )
    return tuple(found)


def _two_speeds(times_s: dict[int, float]) -> str:
    """A sentence where the times (by step) fall into two groups: in a row (something changed) or in turns."""
    ordered, count = sorted(times_s.values()), len(times_s)
    if count < SPEEDS_STEPS or ordered[0] == ordered[-1]:
        return ""
    least = math.ceil(count * SPEED_SHARE)
    cut = max(range(least, count - least + 1), key=lambda at: ordered[at] - ordered[at - 1])
    fast, slow = ordered[:cut], ordered[cut:]
    within = sum((len(group) - 1) * variance(group) for group in (fast, slow))
    explained = 1 - within / ((count - 1) * variance(ordered))
    apart = (fmean(slow) - fmean(fast)) / median(ordered)
    if explained < SPEEDS_EXPLAINED or apart < SPEEDS_APART:
        return ""
    is_slow = {step: seconds >= slow[0] for step, seconds in times_s.items()}
    changes = [step for before, step in pairwise(is_slow) if is_slow[before] != is_slow[step]]
    if len(changes) == 1:
        word = "slower" if is_slow[changes[0]] else "faster"
        return f"From step {changes[0]} on they are {word} by {apart:.1%}: a clock that changed, or a neighbour."
    return f"Two speeds, {apart:.1%} apart, in turns ({len(slow)} of {count} slow): the steps are not all alike."
