"""Is a finalist faster than the default, or is it noise? Paired, interleaved rounds and an interval. Pure.

Each round measures all of them, one after the other, in an order that turns from round to round (AB BA AB ..., or ABC
BCA CAB ...), so a machine that slowly warms up or fills up favours none. The statistic is the log of the ratio of two
medians of a round; the 95% interval is Student's t over the rounds' logs, turned back into a ratio. Pairing removes
what a round has in common; the log makes "x% faster" and "x% slower" the same distance from a tie.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

from search_spaces.shapes import Routing
from tracking.record import Compared, RunnerUp, Versus
from train_worker.noise import pooled

# Student's t, two-sided 95%, by degrees of freedom 1..30 (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2).
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

USEFUL_ROUNDS = 3  # two need a difference of 9 times their spread, see `told_apart`


def t_quantile(degrees: int) -> float:
    """Two-sided 95% point; beyond the table, the table's last row, which is a little too wide: the safe side."""
    return T_95[min(degrees, len(T_95)) - 1]


def told_apart(rounds: int) -> float:
    """How many times the spread between rounds a difference must be for a verdict: half the interval over it.

    9.0 in two rounds, 2.5 in three, 1.6 in four. `rounds`: 2 or more.
    """
    return t_quantile(rounds - 1) / math.sqrt(rounds)


def order(round_number: int, sides: int) -> tuple[int, ...]:
    """Who is measured when in a round, counted from 0; side 0 is the default. Each round begins one side later."""
    return tuple((round_number + place) % sides for place in range(sides))


def versus(pairs: Iterable[tuple[float, float]]) -> Versus:
    """`pairs`: median step times of the one and the other in seconds, one pair a round. Ratio < 1: the one is faster.

    "unverified": fewer than two usable pairs, so there is no interval and `ratio_low` = `ratio_high` = `ratio` (1.0
    without any pair). "tie": the interval includes 1. Pairs with a value that is not finite and above zero are left
    out; `rounds` counts the pairs used.
    """
    logs = [math.log(a / b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and min(a, b) > 0]
    centre = fmean(logs) if logs else 0.0
    half = told_apart(len(logs)) * stdev(logs) if len(logs) > 1 else 0.0
    low, high = math.exp(centre - half), math.exp(centre + half)
    verdict: Literal["faster", "slower", "tie", "unverified"]
    if len(logs) < 2:
        verdict = "unverified"
    elif high < 1:
        verdict = "faster"
    else:
        verdict = "slower" if low > 1 else "tie"
    return Versus(rounds=len(logs), ratio=math.exp(centre), ratio_low=low, ratio_high=high, verdict=verdict)


def compare(
    finalist_id: str, default_id: str, pairs: list[tuple[float, float]], routing: Routing | None = None
) -> Compared:
    """`pairs`: (finalist, default), as in `versus`. "same": both are one candidate.

    `routing` is what both sides were measured with.
    """
    found = versus(pairs)
    return Compared(
        finalist_id=finalist_id,
        default_id=default_id,
        rounds=found.rounds,
        ratio=found.ratio,
        ratio_low=found.ratio_low,
        ratio_high=found.ratio_high,
        verdict="same" if finalist_id == default_id else found.verdict,
        routing=routing if found.rounds else None,
    )


def name_one(
    finalists: Mapping[str, Sequence[float]],
    default_id: str,
    default: Sequence[float],
    routing: Routing | None = None,
    failed: Collection[str] = (),
) -> Compared:
    """The finalist to name, and how the others stand to the default and to it.

    `finalists`: median step times in seconds by candidate id, one a round, the best of the search first (one at least);
    a round without a measurement is NaN, and one that ended early has fewer. `failed`: ids that did so by themselves.
    Named is, of those that did not fail, the one with the least ratio to the default, among those shown to be faster
    where there are any: a smaller ratio with 1 in its interval proves nothing. Too few rounds leave the search's order.
    """
    found = {name: compare(name, default_id, _paired(times, default), routing) for name, times in finalists.items()}

    def merit(each: Compared) -> tuple[bool, bool, bool, float]:
        unverified = each.verdict == "unverified"
        failing = each.finalist_id in failed
        return failing, each.verdict != "faster", unverified, math.inf if unverified else each.ratio

    named = min(found.values(), key=merit)
    others = tuple(
        RunnerUp(
            finalist_id=name,
            against_default=versus(_paired(times, default)),
            against_named=versus(_paired(times, finalists[named.finalist_id])),
        )
        for name, times in finalists.items()
        if name != named.finalist_id
    )
    return named.model_copy(update={"runners_up": others})


def _paired(one: Sequence[float], other: Sequence[float]) -> list[tuple[float, float]]:
    """By round, as far as both have one."""
    return list(zip(one, other, strict=False))


def noise_floor(groups: Iterable[Sequence[float]]) -> float | None:
    """A/A: the share by which two single measurements of the *same* candidate differ, up to the 95% point.

    `groups`: one sequence a candidate, the median step times (s) of its separate trials; their spreads are pooled,
    since two or three repeats of one candidate alone say little. 0.03 means that a difference of 3% between two
    trials says nothing. None where no candidate was measured twice.
    """
    logs = [[math.log(value) for value in group if math.isfinite(value) and value > 0] for group in groups]
    found = pooled(logs)
    # The difference of two draws has sqrt(2) times the spread of one.
    return math.expm1(t_quantile(found.degrees) * math.sqrt(2 * found.variance)) if found else None


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the median by order statistics: no assumption about the shape of the noise.

    With fewer than six values no order statistics reach 95%: the interval is then the whole range. The steps of one
    trial share that trial's luck, so between trials the noise floor counts as well.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.5**count, 0  # P(fewer than `rank + 1` of the values lie below the median), summed up term by term
    while tail <= 0.025 and rank < count // 2:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    low = max(rank - 1, 0)
    return ordered[low], ordered[count - 1 - low]
