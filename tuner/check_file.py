"""The file of `moetune check`: one configuration, a list, or {"cases": [...]}, in JSON or YAML, and where things stand.

JSON is fast; where a fault is, its line is looked for afterwards. YAML brings its places along.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from search_spaces.errors import Fault, InputError
from tuner.file_text import file_text
from tuner.json_text import read_json, refuse_halves
from tuner.sweep_yaml import PlacedData, parse

NEXT_STEP = 'give one mapping with world_size, model, knobs; a list of them; or {"cases": [...]}, in JSON or YAML'
MOST_BYTES = 20_000_000  # 20,000 configurations
MOST_VALUES = 300_000  # of a YAML file, an alias counted as often as it is used
_KEY = re.compile(r'"((?:[^"\\]|\\.)+)"\s*:')
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class CheckFile:
    """What the file holds. `cases` are not looked at yet. `placed`: the places in YAML; None for JSON."""

    path: str
    text: str
    cases: Sequence[Any]
    prefix: tuple[str | int, ...]  # where in the file the list of cases is; a single case has no number in it
    placed: PlacedData | None = None
    _found: dict[int, dict[str, int]] = field(default_factory=dict)

    def line_of(self, number: int, key: str) -> int:
        """The line on which the `number`-th case (from 1) says `key`, else where it begins; 0 where unknown."""
        if self.placed is not None:
            case = self._case(number)
            return self._yaml_keys.get((case, key)) or self.placed.values.get(case, (0, 0))[0]
        lines = self._json_lines(number)
        return lines.get(key) or lines.get("", 0)

    def _json_lines(self, number: int) -> dict[str, int]:
        """Key anywhere inside the `number`-th case -> the first line with it; "" -> where the case begins."""
        if number not in self._found:
            start = self._starts[number - 1] if number <= len(self._starts) else 0
            end = self._starts[number] if number < len(self._starts) else None
            lines = self._found[number] = {"": start}
            for line, row in enumerate(self._rows[max(start - 1, 0) : end], start=max(start, 1)):
                for name in _KEY.findall(row):
                    lines.setdefault(name, line)
        return self._found[number]

    def _case(self, number: int) -> tuple[str | int, ...]:
        """Where in the data the `number`-th case is."""
        single = self.placed is not None and not self.prefix and not isinstance(self.placed.data, list)
        return () if single else (*self.prefix, number - 1)

    @cached_property
    def _yaml_keys(self) -> dict[tuple[tuple[str | int, ...], str], int]:
        """(place of a case, key anywhere inside it) -> the first line with it."""
        depth, lines = len(self._case(1)), dict[tuple[tuple[str | int, ...], str], int]()
        for path, (line, _) in self.placed.keys.items() if self.placed else ():
            lines.setdefault((path[:depth], str(path[-1])), line)
        return lines

    @cached_property
    def _starts(self) -> list[int]:
        return _starts(self.text, len(self.cases))

    @cached_property
    def _rows(self) -> list[str]:
        return self.text.split("\n")


def read_check_file(path: Path) -> CheckFile:
    """Raises InputError where the file cannot be read, is neither JSON nor YAML, or holds no configuration."""
    text = file_text(path, MOST_BYTES, "give a JSON or YAML file")
    data, placed = _parsed(path, text)
    inside = isinstance(data, dict) and "cases" in data
    cases = data["cases"] if inside else [data] if isinstance(data, dict) and data else data
    if not isinstance(cases, list) or not cases:
        nothing = (
            "no configuration in it" if cases in (None, [], {}, "") else "neither a configuration nor a list of them"
        )
        raise InputError([Fault(nothing, str(path), 1)], NEXT_STEP)
    return CheckFile(str(path), text, cases, ("cases",) if inside else (), placed)


def _parsed(path: Path, text: str) -> tuple[Any, PlacedData | None]:
    """JSON where the file begins like it, or is named so; else YAML."""
    if not text.strip():
        return None, None
    if text.lstrip()[0] in "{[" or path.suffix == ".json":
        try:
            data = read_json(text, str(path))
            refuse_halves(data, text, str(path), pairs=True)
            return data, None
        except json.JSONDecodeError as error:
            if path.suffix == ".json":
                fault = Fault(f"not JSON: {error.msg}", str(path), error.lineno, error.colno)
                raise InputError([fault], "mend the file at this place") from error
    try:
        placed = parse(text, str(path), MOST_VALUES)
    except InputError as error:
        raise InputError(list(error.faults), "mend the file at this place") from error
    if placed.faults:
        raise InputError(placed.faults, "mend the file at these places")
    refuse_halves(placed.data, text, str(path), pairs=False)
    return placed.data, placed


def _starts(text: str, count: int) -> list[int]:
    """The line (from 1) at which each of `count` JSON configurations begins; [] where it cannot be told."""
    offsets = _offsets(text)
    if len(offsets) != count:
        return [1] if count == 1 else []
    lines, line, last = list[int](), 1, 0
    for offset in offsets:
        line += text.count("\n", last, offset)
        last = offset
        lines.append(line)
    return lines


def _offsets(text: str) -> list[int]:
    """Where the elements of the top list, or of the list under "cases", begin."""
    at = len(text) - len(text.lstrip())
    if text[at] == "{":
        key = re.search(r'"cases"\s*:\s*\[', text)
        at = key.end() - 1 if key else -1
        if at < 0:
            return []
    decoder, offsets = json.JSONDecoder(), list[int]()
    at = _skip(text, at + 1)
    while at < len(text) and text[at] != "]":
        offsets.append(at)
        at = _skip(text, decoder.raw_decode(text, at)[1])
        if at < len(text) and text[at] == ",":
            at = _skip(text, at + 1)
    return offsets


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
