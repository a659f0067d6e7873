"""A table of recorded trials: rows of `train_worker.table`, all of one model on one machine.

A benchmark writes rows; a replay answers from the table. Rows are only appended, so a run that was cut off goes on; a
later row of the same trial replaces the earlier.
"""

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from search_spaces.candidate import Candidate
from search_spaces.errors import Fault, InputError
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from train_worker.table import MeasuredPart, TableRow

MOST_FAULTS = 20  # shown of one table
MEND = "mend the rows, or record them again (benchmarks/h200_table.py)"
# What may differ between the rows of a table and a job that is answered from it: how long a trial measures.
STEP_COUNTS = frozenset({"warmup_steps", "measured_steps", "min_measured_steps", "target_relative_error"})


class RecordedTable:
    """The trials of one model on one machine, by candidate; nothing is evaluated here.

    The baseline is the candidate with repeats. `where` names the file in errors.
    """

    def __init__(self, rows: list[TableRow], where: str) -> None:
        latest = {row.key: row for row in rows}
        self.rows, self.where = tuple(latest.values()), where
        self.by_id: dict[str, list[TableRow]] = {}
        for row in self.rows:
            self.by_id.setdefault(row.id, []).append(row)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises InputError, with file and line, for what is no row, for rows of several models, machines or training
        jobs, and where no baseline was repeated."""
        try:
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # U+2028 ends no line of JSON
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                [Fault(f"cannot read it: {error}", str(path))], "give a table of recorded trials"
            ) from error
        rows = rows_of([] if lines == [""] else lines, str(path))
        faults = _strangers(rows, str(path))
        if not faults and len({row.id for row in rows if row.repeat}) != 1:
            faults = [Fault('exactly one configuration must have rows with "repeat": the baseline', str(path))]
        if faults:
            raise InputError(faults[:MOST_FAULTS], MEND)
        return cls(rows, str(path))

    @cached_property
    def baseline(self) -> Candidate:
        return next(row for row in self.rows if row.repeat).candidate

    @property
    def shape(self) -> ModelShape:
        return self.rows[0].shape

    @property
    def training(self) -> TrainingShape:
        return self.rows[0].training

    @property
    def cluster(self) -> ClusterShape:
        return self.rows[0].cluster

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Each once, in the order of the file."""
        return tuple(rows[0].candidate for rows in self.by_id.values())

    def measured_of(self, name: str) -> Iterator[MeasuredPart]:
        """The measurements of a candidate, by its id."""
        return (row.measured for row in self.by_id[name] if row.measured is not None)


def rows_of(lines: Iterable[str], path: str) -> list[TableRow]:
    """Raises InputError, with file and line, for what is no row."""
    faults: list[Fault] = []
    rows = [row for number, line in enumerate(lines, 1) if (row := _row(line, path, number, faults))]
    if faults:
        raise InputError(faults[:MOST_FAULTS], MEND)
    return rows


def _row(line: str, path: str, number: int, faults: list[Fault]) -> TableRow | None:
    try:
        return TableRow.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        hint = "a run that was killed leaves half a line: delete it"
        faults.append(Fault(f"no JSON: {error.msg}", path, number, error.colno, hint))
    except RecursionError:
        faults.append(Fault("nested too deeply", path, number))
    except ValidationError as error:
        for each in error.errors(include_url=False, include_input=False):
            place = ".".join(map(str, each["loc"]))
            faults.append(Fault(f"{place}: {each['msg']}" if place else each["msg"], path, number))
    except ValueError:  # what Python itself refuses to read, beside what is no JSON
        faults.append(Fault("a number of over 4,300 digits", path, number))
    return None


def _strangers(rows: list[TableRow], path: str) -> list[Fault]:
    """Rows that cannot be compared with the first."""
    if not rows:
        return [Fault("no rows", path)]
    return [
        Fault(f"row {row.order} has another {what} than the first row", path, number)
        for number, row in enumerate(rows, 1)
        for what in ("shape", "cluster")
        if getattr(row, what) != getattr(rows[0], what)
    ] + [
        Fault(f"row {row.order} has another training.{name} than the first row", path, number)
        for number, row in enumerate(rows, 1)
        for name in different_training(row.training, rows[0].training)
    ]


def different_training(one: TrainingShape, other: TrainingShape) -> list[str]:
    """The facts in which two training jobs differ, how long they measure left aside."""
    mine, theirs = facts_of(one), facts_of(other)
    return sorted(name for name in mine if mine[name] != theirs[name])


def facts_of(training: TrainingShape) -> dict[str, Any]:
    """A training job without how long it is measured."""
    return training.model_dump(exclude=set(STEP_COUNTS))
