"""What one knob does, all others equal: matched pairs of a table's rows, as a signed gain with an interval, or a tie.

A pair is two configurations that differ in one knob (and in the knobs that come and go with it), measured on one
software stack: what differs between stacks is no effect of the knob. The interval is
Student's t over the logs of the pairs' ratios (`tuner.compare`): it holds for the mean effect over the configurations
of the table, among which the effect may differ, and its noise is that of single trials.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.space import SearchSpace
from train_worker.outcome import Diverged, Measured
from train_worker.profile import StepProfile
from train_worker.recorded_table import RecordedTable
from tuner.compare import compare
from tuner.objective import Guard, judge


@dataclass(frozen=True)
class Contrast:
    """`knob` at `value` against the same at `against`. `same_loss`: both must train alike, within the guard.
    `communication`: say what was exposed and hidden."""

    name: str
    knob: str
    value: KnobValue
    against: KnobValue
    same_loss: bool = False
    communication: bool = False


class Pair(NamedTuple):
    """Ids of two configurations, and the digest of the fingerprint that both were measured under."""

    mine: str
    other: str
    stack: str


def pairs(table: RecordedTable, space: SearchSpace, contrast: Contrast) -> list[Pair]:
    """The configurations (with the value, against it) that both have a measurement; one pair for each stack."""
    found = []
    for candidate in table.candidates:
        values = space.values(candidate)
        if contrast.knob not in values or values[contrast.knob] != contrast.value:
            continue
        other = _turned(space, values, contrast, contrast.against)
        if other is None or other.id not in table.by_id:
            continue
        if _turned(space, space.values(other), contrast, contrast.value) != candidate:
            continue  # a knob under this one is not at its default: its effect would count too
        there = {part.fingerprint_digest for part in table.measured_of(other.id)}
        mine = dict.fromkeys(part.fingerprint_digest for part in table.measured_of(candidate.id))
        found += [Pair(candidate.id, other.id, stack) for stack in mine if stack in there]
    return found


def _turned(
    space: SearchSpace, values: Mapping[str, KnobValue], contrast: Contrast, value: KnobValue
) -> Candidate | None:
    knob = space.by_name[contrast.knob]
    return space.canonical({**values, contrast.knob: value}) if knob.allows(value) else None


def typical_s(table: RecordedTable, name: str, stack: str) -> float:
    """The median step time of a configuration on one stack; over its repeats the geometric mean."""
    there = [part for part in table.measured_of(name) if part.fingerprint_digest == stack]
    return math.exp(fmean(math.log(median(part.step_times_s)) for part in there))


def _sides(table: RecordedTable, found: list[Pair]) -> Iterator[tuple[float, float]]:
    """Seconds with and without, once for two configurations: over several stacks the geometric means."""
    stacks = dict[tuple[str, str], list[str]]()
    for mine, other, stack in found:
        stacks.setdefault((mine, other), []).append(stack)
    for names, there in stacks.items():
        mine, other = (math.exp(fmean(math.log(typical_s(table, name, on)) for on in there)) for name in names)
        yield mine, other


def said(table: RecordedTable, space: SearchSpace, contrast: Contrast, guard: Guard) -> str:
    """One line: the gain in step time (positive: faster) with its 95% interval, and whether losses agree."""
    found = pairs(table, space, contrast)
    if not found:
        return f"{contrast.name}: no pair was measured"
    sides = list(_sides(table, found))
    result = compare("with", "without", sides)
    gain, low, high = (100 * (1 - ratio) for ratio in (result.ratio, result.ratio_high, result.ratio_low))
    line = f"{contrast.name}: {result.verdict}, {gain:+.1f}% [{low:+.1f}%, {high:+.1f}%] over {len(sides)} pairs"
    parts = [line]
    if contrast.communication:
        parts.append(_communication(table, found))
    if contrast.same_loss:
        parts.append(_losses(table, found, guard))
    return "; ".join(parts)


def _communication(table: RecordedTable, found: list[Pair]) -> str:
    """Milliseconds of a profiled step, by interval union, without the value and with it; means over the pairs."""
    profiles = [(_first(table, mine, on).profile, _first(table, other, on).profile) for mine, other, on in found]
    whole = [(mine, other) for mine, other in profiles if mine is not None and other is not None]
    if not whole:
        return "no pair was profiled"
    told = [
        f"{word} {_mean_ms(whole, 1, field):.1f} -> {_mean_ms(whole, 0, field):.1f} ms"
        for word, field in (("exposed", "exposed_communication_s"), ("hidden", "hidden_communication_s"))
    ]
    if all(profile.waiting_s is not None for pair in whole for profile in pair):
        waits = [_mean_ms(whole, side, "waiting_s") for side in (1, 0)]
        told.insert(1, f"{waits[0]:.1f} -> {waits[1]:.1f} ms of it waiting for the other rank")
    return f"communication {', '.join(told)}"


def _mean_ms(whole: list[tuple[StepProfile, StepProfile]], side: int, field: str) -> float:
    return 1e3 * fmean(getattr(pair[side], field) for pair in whole)


def _losses(table: RecordedTable, found: list[Pair], guard: Guard) -> str:
    """Whether each pair trains alike on the same data."""
    worst, refused = 0.0, []
    for name, other, stack in found:
        mine, theirs = (_first(table, each, stack) for each in (name, other))
        worst = max(worst, *(abs(a / b - 1) for a, b in zip(mine.losses, theirs.losses, strict=False)))
        judged = judge(mine, theirs, guard)
        if isinstance(judged, Diverged):
            refused.append(f"{name} against {other} at step {judged.step}: {judged.reason}")
    alike = f"losses agree within the guard ({worst:.2e} apart at most)"
    return f"LOSSES DIFFER: {'; '.join(refused)}" if refused else alike


def _first(table: RecordedTable, name: str, stack: str) -> Measured:
    rows = (row for row in table.by_id[name] if row.measured and row.measured.fingerprint_digest == stack)
    return next(found for row in rows if isinstance(found := row.recorded(), Measured))
