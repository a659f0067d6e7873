"""Exhaustive grids, measured row by row: what `h200_table.py` and `two_gpus.py` share.

A grid is a union of blocks of `moe-full`'s knobs, each filtered by this project's own rules. Its trials run in a seeded
random order, so that no drift of the machine lines up with a knob, with the baseline (A/A) between them. Rows append;
what is in the file already is skipped, so a run that was cut off goes on.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from benchmarks import contrasts
from benchmarks.contrasts import Contrast
from search_spaces.candidate import Candidate, KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.full_space import MOE_FULL
from search_spaces.named_spaces import ENVIRONMENT_KNOBS
from search_spaces.screen import LegalSpace, screen
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions, TrainingShape
from search_spaces.space import SearchSpace
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from train_worker.outcome import Measured, Outcome
from train_worker.recorded_table import RecordedTable, rows_of
from train_worker.table import MeasuredPart, TableRow, shortened
from tuner.objective import Guard

Choices = Mapping[str, tuple[KnobValue, ...]]
TRIAL_LIMIT_S = 120.0
GUARD = Guard(low_precision_mean_loss_relative_tolerance=0.03)
SEED = 1
# As the H200 host has it: rules about versions and missing packages read it.
STACK = StackVersions(
    megatron_core="0.19.2", torch="2.11.0", transformer_engine="2.20.2", nccl="2.28.9", cuda="13.0"
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """One trial to come: of the grid, an A/A repeat of its baseline, or one of two passes."""

    candidate: Candidate
    repeat: int | None = None
    sweep: int | None = None

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        return self.candidate.id, self.repeat, self.sweep


@dataclass(frozen=True)
class Grid:
    """What is measured. `blocks`: choices of knobs, every block of the same knobs; the grid is their union.

    `every`: trials between two A/A repeats. `predict`: seconds one trial will take. `contrasts`: what is compared.
    """

    name: str
    model: ModelShape
    cluster: ClusterShape
    training: TrainingShape
    blocks: tuple[Choices, ...]
    baseline_values: Mapping[str, KnobValue]
    every: int
    predict: Callable[[Candidate], float]
    contrasts: tuple[Contrast, ...] = ()
    stack: StackVersions | None = STACK

    def legal(self, block: Choices) -> LegalSpace:
        """The points of one block that the rules accept."""
        return screen(space_of(block), self.model, self.cluster, self.training, self.stack)

    @cached_property
    def space(self) -> SearchSpace:
        """Every choice of every block."""
        names = self.blocks[0]
        return space_of({name: tuple(dict.fromkeys(v for b in self.blocks for v in b[name])) for name in names})

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        found = {candidate.id: candidate for block in self.blocks for candidate in self.legal(block)}
        return tuple(found.values())

    @cached_property
    def baseline(self) -> Candidate:
        candidate = self.space.canonical(self.baseline_values)
        if candidate.id not in {each.id for each in self.candidates}:
            raise ValueError(f"the baseline of {self.name} is not in its grid")
        return candidate

    def trials(self) -> Iterator[Planned]:
        """Every candidate once in an order of chance, an A/A repeat of the baseline every so often, one at each end."""
        order = list(self.candidates)
        random.Random(f"{SEED}/{self.name}").shuffle(order)
        for number, candidate in enumerate(order):
            if number % self.every == 0:
                yield Planned(self.baseline, repeat=number // self.every + 1)
            yield Planned(candidate)
        yield Planned(self.baseline, repeat=(len(order) - 1) // self.every + 2)

    def twice(self, count: int) -> Iterator[Planned]:
        """`count` candidates drawn once, then two passes over them, each in an order of its own."""
        chance = random.Random(f"{SEED}/{self.name}/again")
        drawn = chance.sample(self.candidates, count)
        for sweep in (1, 2):
            yield from (Planned(candidate, sweep=sweep) for candidate in chance.sample(drawn, count))

    def job(self, planned: Planned) -> TrialJob:
        name = "-".join(str(part) for part in planned.key if part is not None)
        return TrialJob(
            trial_id=name, candidate=planned.candidate, model=self.model, cluster=self.cluster,
            training=self.training, seed=SEED, time_limit_s=TRIAL_LIMIT_S,
            environment_knobs=tuple(sorted(ENVIRONMENT_KNOBS)),
        )  # fmt: skip


def space_of(block: Choices) -> SearchSpace:
    """`moe-full` narrowed to the knobs of a block; conditions on other knobs are met by their defaults."""
    knobs = [
        replace(
            knob, choices=block[knob.name], default=block[knob.name][0],
            when=tuple(condition for condition in knob.when if condition.knob in block),
        )
        for knob in MOE_FULL.knobs if knob.name in block
    ]  # fmt: skip
    if missing := set(block) - {knob.name for knob in knobs}:
        raise ValueError(f"no such knobs: {sorted(missing)}")
    return SearchSpace("grid", tuple(knobs))


def row_of(grid: Grid, planned: Planned, order: int, started_at: str, outcome: Outcome, wall_s: float) -> TableRow:
    """What is written of one trial."""
    measured = MeasuredPart.of(outcome) if isinstance(outcome, Measured) else None
    return TableRow.model_validate(
        {
            "id": planned.candidate.id, "order": order, "repeat": planned.repeat, "pass": planned.sweep,
            "started_at": started_at, "wall_s": round(wall_s, 2), "outcome": outcome.kind,
            "knobs": planned.candidate.knobs, "env": planned.candidate.env, "shape": grid.model,
            "cluster": grid.cluster, "training": grid.training, "measured": measured,
            "failure": None if isinstance(outcome, Measured) else shortened(outcome),
        }
    )  # fmt: skip


def of_model(table: RecordedTable, model: ModelShape) -> RecordedTable:
    """The table. Raises InputError where it has rows of another model."""
    if others := sorted({row.shape.name for row in table.rows if row.shape != model}):
        raise InputError([Fault(f"rows of {', '.join(others)}", table.where)], "give each shape a file of its own")
    return table


def held(path: Path) -> RecordedTable:
    """What a file of rows has so far. Half a line at its end (a run that was killed) is cut off.

    Raises InputError for what is no row.
    """
    if not path.exists():
        return RecordedTable([], str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([Fault(f"cannot read it: {error}", str(path))], "give a file for the rows") from error
    whole = text[: text.rfind("\n") + 1]
    rows = rows_of(whole.removesuffix("\n").split("\n") if whole else [], str(path))
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return RecordedTable(rows, str(path))


def waiting(planned: Sequence[Planned], found: RecordedTable, retry: Sequence[str]) -> list[Planned]:
    """What is not in the file yet. Network faults count as not run, and so do the outcomes in `retry`."""
    lost = {row.key for row in found.rows if row.outcome in retry or getattr(row.failure, "infrastructure", False)}
    done = {row.key for row in found.rows} - lost
    return [each for each in planned if each.key not in done]


def run(
    grid: Grid, planned: Sequence[Planned], path: Path, seconds: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """Run trials and append their rows while `seconds` last; returns how many ran."""
    began, order = clock(), max((row.order for row in held(path).rows), default=0)
    with tempfile.TemporaryDirectory() as folder:
        gang = LocalGang(grid.cluster.workers_per_trial, grid.cluster.device, Path(folder))
        with gang:
            for ran, each in enumerate(planned):
                if clock() - began + 2 * grid.predict(each.candidate) > seconds:
                    return ran
                started, started_at = clock(), datetime.now(UTC).isoformat(timespec="seconds")
                outcome = gang.run(grid.job(each))
                row = row_of(grid, each, order + ran + 1, started_at, outcome, clock() - started)
                with path.open("a", encoding="utf-8") as stream:
                    stream.write(row.line())
                print(f"{row.order} {row.id} {row.outcome} {row.wall_s} s {said(row, grid.baseline)}", flush=True)
    return len(planned)


def said(row: TableRow, baseline: Candidate) -> str:
    """One row for people: its step time, and how its configuration differs from the baseline."""
    times = sorted(row.measured.step_times_s) if row.measured else []
    shown = f"{times[len(times) // 2] * 1000:.0f} ms " if times else ""
    return shown + row.candidate.label(baseline)


def listed(grid: Grid, planned: Sequence[Planned]) -> str:
    """How many trials there are and how long they will take."""
    lines = [f"{grid.name}: {len(grid.candidates)} legal configurations"]
    for number, block in enumerate(grid.blocks, start=1):
        legal = grid.legal(block)
        lines.append(f"  block {number}: {legal.count} of {legal.total} points are legal")
        lines += [f"    {refused.count} not: {refused.rule}, {refused.reason}" for refused in legal.refusals]
    repeats = sum(each.repeat is not None for each in planned)
    total = sum(grid.predict(each.candidate) for each in planned)
    lines.append(f"  to run: {len(planned)} trials, {repeats} of them A/A; predicted {total:.0f} s")
    return "\n".join(lines)


def summary(grid: Grid, path: Path) -> str:
    """What each contrast of the grid shows in the rows."""
    table = of_model(RecordedTable.read(path), grid.model)
    lines = [contrasts.said(table, grid.space, contrast, GUARD) for contrast in grid.contrasts]
    failed = [f"row {row.order}: {row.outcome} {row.candidate.label(grid.baseline)}" for row in table.rows
              if row.measured is None]  # fmt: skip
    return "\n".join(
        [f"{grid.name}: {len(table.candidates)} configurations, {len(failed)} trials failed", *failed, *lines]
    )


def command(grids: Mapping[str, Grid], description: str | None) -> None:
    """The command line of a table. Ends with exit code 2 where the rows cannot be read."""
    try:
        _command(grids, description)
    except InputError as error:
        print(f"{error}\n  next: {error.next_step}", file=sys.stderr)
        sys.exit(error.exit_code)


def _command(grids: Mapping[str, Grid], description: str | None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?", help="the table, one file a shape; rows append")
    parser.add_argument("--shape", choices=list(grids), default=next(iter(grids)))
    parser.add_argument("--seconds", type=float, default=560.0, help="stop before this has passed")
    parser.add_argument("--again", type=int, metavar="N", help="measure N of the configurations in two passes instead")
    parser.add_argument("--retry", nargs="*", default=[], metavar="OUTCOME", help="run these again, such as crashed")
    parser.add_argument("--list", action="store_true", help="count and predict, run nothing")
    parser.add_argument("--summary", action="store_true", help="what each knob does in the rows; runs nothing")
    options = parser.parse_args()
    if options.rows is None and (options.summary or not options.list):
        parser.error("give a file for the rows, or --list")
    if options.summary:
        print(summary(grids[options.shape], options.rows))
        return
    for name in grids if options.list and options.rows is None else [options.shape]:
        grid = grids[name]
        planned = list(grid.twice(options.again) if options.again else grid.trials())
        if options.rows is not None:
            planned = waiting(planned, of_model(held(options.rows), grid.model), options.retry)
        print(listed(grid, planned), flush=True)
        if not options.list:
            print(f"{run(grid, planned, options.rows, options.seconds)} of {len(planned)} ran", flush=True)
