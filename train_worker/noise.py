"""How repeats of one trial scatter, by how long its GPU waits for the host. Pure.

What varies from trial to trial is mostly the host. A step of which the GPU is idle (or waits for the GPU of another
rank) for a share x of the time takes that much longer or shorter as the host is slow or fast, so the variance of the
log of a trial's median step time is taken as quiet^2 + (host * x)^2. Seen on one H200
(`benchmarks/tables/h200_qwen3_like.jsonl`, 21 configurations measured 3 to 12 times): 0.1 to 1% where x is under 5%,
4.7% where it is 24%; one spread for all fits neither.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, variance
from typing import NamedTuple

from train_worker.table import MeasuredPart

ROUNDS = 100
LEAST = 1e-12  # a variance: repeats may agree to the digit


class Noise(NamedTuple):
    """Standard deviations of the log of a trial's median step time: of a GPU that never waits, and what a host adds
    to it per share of the step in which it does; `pooled` over all repeats."""

    quiet: float
    host: float
    pooled: float

    def spread(self, idle: float | None) -> float:
        """Of trials with this share of idle time, 0 to 1; pooled where it is not known."""
        return self.pooled if idle is None else math.hypot(self.quiet, self.host * idle)


class Pooled(NamedTuple):
    """The variance that several groups share, and its degrees of freedom."""

    variance: float
    degrees: int


class _Group(NamedTuple):
    """Repeats of one configuration: degrees of freedom, variance of their logs, squared idle share."""

    degrees: int
    variance: float
    idle: float


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """Of the values of each group about the mean of their own; None where no group has two."""
    repeated = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeated)
    if not degrees:
        return None
    return Pooled(sum((len(group) - 1) * variance(group) for group in repeated) / degrees, degrees)


def idle_share(parts: Sequence[MeasuredPart]) -> float | None:
    """Mean share of the step in which the GPU did nothing or waited for another rank, over the trials that were
    profiled; None where none was."""
    shares = [
        max(0.0, 1 - (part.gpu_busy_s - _waiting_s(part)) / median(part.step_times_s))
        for part in parts if part.gpu_busy_s
    ]  # fmt: skip
    return fmean(shares) if shares else None


def _waiting_s(part: MeasuredPart) -> float:
    return (part.profile.waiting_s or 0.0) if part.profile else 0.0


def fitted(repeats: Sequence[Sequence[MeasuredPart]]) -> Noise | None:
    """From the trials of each configuration; None where none was measured twice.

    A sample variance is a scaled chi-square: its expectation is fitted by maximum likelihood (gamma, identity link, by
    reweighted least squares), neither part below zero. Where all repeats are of one configuration, or wait equally
    long, the two parts cannot be told apart, and all of it is `quiet`; so it is where none was profiled. Each round
    goes half of the way: whole steps may jump to and fro between two bounds, at one of which nothing scatters (in 2% of
    made-up tables like the first one).
    """
    everything = pooled(_logs(parts) for parts in repeats)
    if everything is None:
        return None
    known = [(parts, idle) for parts in repeats if len(parts) > 1 and (idle := idle_share(parts)) is not None]
    quiet, host = (pooled(_logs(parts) for parts, _ in known) or everything).variance, 0.0
    groups = [_Group(len(parts) - 1, variance(_logs(parts)), idle**2) for parts, idle in known]
    if len({round(g.idle, 6) for g in groups}) > 1:
        for _ in range(ROUNDS):
            aim = _reweighted(groups, quiet, host)
            quiet, host = (quiet + aim[0]) / 2, (host + aim[1]) / 2
    return Noise(math.sqrt(quiet), math.sqrt(host), math.sqrt(everything.variance))


def _logs(parts: Sequence[MeasuredPart]) -> list[float]:
    return [math.log(median(part.step_times_s)) for part in parts]


def _reweighted(groups: Sequence[_Group], quiet: float, host: float) -> tuple[float, float]:
    """Weighted least squares of variance = quiet + host * idle, each weighted by what the last round expects of it."""
    weights = [g.degrees / max(quiet + host * g.idle, LEAST) ** 2 for g in groups]
    total = sum(weights)
    mean_x = sum(w * g.idle for w, g in zip(weights, groups, strict=True)) / total
    mean_y = sum(w * g.variance for w, g in zip(weights, groups, strict=True)) / total
    square = sum(w * (g.idle - mean_x) ** 2 for w, g in zip(weights, groups, strict=True))
    cross = sum(w * (g.idle - mean_x) * (g.variance - mean_y) for w, g in zip(weights, groups, strict=True))
    slope = cross / square
    if slope < 0:
        return mean_y, 0.0
    if mean_y - slope * mean_x >= 0:
        return mean_y - slope * mean_x, slope
    through = sum(w * g.idle * g.variance for w, g in zip(weights, groups, strict=True))
    return 0.0, through / sum(w * g.idle**2 for w, g in zip(weights, groups, strict=True))
