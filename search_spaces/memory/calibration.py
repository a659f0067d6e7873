"""Factors of one fingerprint that turn a plan into reserved and device bytes: fitted, stored, inspectable.

`fit` takes measured rows, splits them by a stable hash into a fitted and a held-out part, and reports the error on the
part it has not seen. Ridge with factors of at least 0, by coordinate descent in plain Python: seven factors, some
dozens of rows.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from search_spaces.memory.plan import StagePlan
from search_spaces.memory.reserved import Slack, slack_of
from search_spaces.shapes import Noun

DEFAULT_FILE = Path(__file__).parent / "h200.json"
GIB = 2**30
RIDGE = 3e-7  # on relative errors: enough to settle factors that no row speaks about at 0
HELD_OUT = 3  # every third row, by hash
LEAST_MARGIN = 0.01


class Errors(Noun):
    """Relative errors of predicted reserved memory over some rows."""

    rows: int
    mean: float
    worst: float
    worst_row: str = ""


class Margin(Noun):
    """By what share of the prediction it was too `low` or too `high` at worst, on rows that the fit had not seen; at
    least 1%."""

    low: float = Field(gt=0)
    high: float = Field(gt=0, lt=1)


class Calibration(Noun):
    """`factors` by name of `Slack`; `context_bytes` the device uses beyond what is reserved. `eager` and `graphs`: the
    margins of plans without and with captured graphs; `exchanged` of both where tokens change ranks: sizes differ from
    step to step, and the allocator's rests with them."""

    fingerprint: str
    factors: dict[str, float]
    context_bytes: int
    eager: Margin
    graphs: Margin
    fitted: Errors
    held_out: Errors
    other_shapes: Errors = Field(description="on models of which no row was fitted")
    other_runs: Errors = Field(description="on the trials of sweeps, none of which is ever fitted")
    exchanged: Margin | None = None
    exchanging: Errors | None = Field(
        None, description="on trials with expert parallelism, none of which is ever fitted"
    )
    source: str

    def margin(self, stage: StagePlan) -> Margin:
        """How far off a prediction for this stage may be."""
        if stage.exchanged and self.exchanged:
            return self.exchanged
        return self.graphs if stage.active.captured else self.eager

    def reserved(self, stage: StagePlan, expandable: bool = False) -> int:
        """Predicted `torch.cuda.max_memory_reserved`, bytes."""
        return stage.total + self.slack(stage, expandable) + self.pool(stage)

    def slack(self, stage: StagePlan, expandable: bool = False) -> int:
        """Reserved beyond allocated, graphs left out."""
        parts = slack_of(stage, expandable)._asdict()
        found: float = sum(self.factors[name] * size for name, size in parts.items() if name != "graphs")
        return round(found)

    def pool(self, stage: StagePlan) -> int:
        """What captured graphs hold beyond eager steps."""
        return round(self.factors["graphs"] * stage.active.captured)

    def device(self, stage: StagePlan, expandable: bool = False) -> int:
        """Predicted use of the device, bytes: what nvidia-smi shows for the process."""
        return self.reserved(stage, expandable) + self.context_bytes + stage.communication


class Sample(NamedTuple):
    """One measured row beside its plan. `shape`: which model it is, for errors on shapes that were not fitted."""

    id: str
    shape: str
    stage: StagePlan
    expandable: bool
    reserved_bytes: int
    device_used_bytes: int | None


def held_out(identity: str) -> bool:
    """Whether a row is kept from fitting: the same answer on every machine, whatever the other rows."""
    return int(hashlib.sha256(identity.encode()).hexdigest(), 16) % HELD_OUT == 0


def fit(
    samples: Sequence[Sample], fingerprint: str, source: str, common: frozenset[str], never: Sequence[Sample] = (),
    exchanging: Sequence[Sample] = (),
) -> Calibration:  # fmt: skip
    """Factors from the fitted part. `common`: shapes to fit on when the error on other shapes is asked. `never` and
    `exchanging` (with expert parallelism): rows that only say how large the error is."""
    seen = [sample for sample in samples if not held_out(sample.id)]
    unseen = [sample for sample in samples if held_out(sample.id)]
    factors = _factors(seen)
    narrow = _factors([sample for sample in seen if sample.shape in common])
    contexts = sorted(s.device_used_bytes - s.reserved_bytes for s in seen if s.device_used_bytes is not None)
    strange = [sample for sample in samples if sample.shape not in common]
    misses = [(s, _miss(factors, s)) for s in (*unseen, *never)] + [(s, _miss(narrow, s)) for s in strange]
    return Calibration(
        fingerprint=fingerprint,
        factors=factors,
        context_bytes=contexts[len(contexts) // 2] if contexts else 0,
        eager=_margin([miss for s, miss in misses if not s.stage.active.captured]),
        graphs=_margin([miss for s, miss in misses if s.stage.active.captured]),
        fitted=errors(factors, seen),
        held_out=errors(factors, unseen),
        other_shapes=errors(narrow, strange),
        other_runs=errors(factors, never),
        exchanged=_margin([_miss(factors, sample) for sample in exchanging]) if exchanging else None,
        exchanging=errors(factors, exchanging) if exchanging else None,
        source=source,
    )


def stored(path: Path = DEFAULT_FILE) -> Calibration:
    """A calibration as `fit` made it; the default one is of one H200 (see its `source`)."""
    return _read(path)


@cache
def _read(path: Path) -> Calibration:
    return Calibration.model_validate_json(path.read_text())


def predicted(factors: Mapping[str, float], sample: Sample) -> float:
    parts = slack_of(sample.stage, sample.expandable)._asdict()
    slack: float = sum(factors[name] * size for name, size in parts.items())
    return sample.stage.total + slack


def errors(factors: Mapping[str, float], samples: Sequence[Sample]) -> Errors:
    """Mean and worst of |predicted - measured| / measured."""
    if not samples:
        return Errors(rows=0, mean=0.0, worst=0.0)
    off = [(abs(predicted(factors, s) - s.reserved_bytes) / s.reserved_bytes, s.id) for s in samples]
    worst, row = max(off)
    return Errors(rows=len(off), mean=sum(error for error, _ in off) / len(off), worst=worst, worst_row=row)


def _margin(misses: Sequence[float]) -> Margin:
    low, high = max([LEAST_MARGIN, *misses]), max([LEAST_MARGIN, *(-miss for miss in misses)])
    return Margin(low=round(low, 4), high=round(high, 4))


def _miss(factors: Mapping[str, float], sample: Sample) -> float:
    """Share of the prediction by which it was too low; negative where too high."""
    return sample.reserved_bytes / predicted(factors, sample) - 1


def _factors(samples: Sequence[Sample]) -> dict[str, float]:
    """Ridge on relative errors, each factor at least 0: coordinate descent, exact for one factor at a time."""
    rows = [[size / s.reserved_bytes for size in slack_of(s.stage, s.expandable)] for s in samples]
    left = [(s.reserved_bytes - s.stage.total) / s.reserved_bytes for s in samples]
    found = [0.0] * len(Slack._fields)
    for _ in range(2000):
        moved = 0.0
        for index in range(len(found)):
            column = [row[index] for row in rows]
            weight = sum(value * value for value in column) + RIDGE * len(rows)
            pull = (
                sum(value * rest for value, rest in zip(column, left, strict=True)) - RIDGE * len(rows) * found[index]
            )
            step = max(found[index] + pull / weight, 0.0) - found[index] if weight else 0.0
            found[index] += step
            left = [rest - step * value for rest, value in zip(left, column, strict=True)]
            moved = max(moved, abs(step))
        if moved < 1e-9:
            break
    return {name: round(value, 6) for name, value in zip(Slack._fields, found, strict=True)}
