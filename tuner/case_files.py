"""Files of explicit configurations, for `check` and `memory`: JSON or YAML, one or a list, faults with their lines."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from search_spaces.errors import Fault, InputError
from search_spaces.explicit_knobs import CaseFault
from tuner.positions import case_lines


class CaseFile:
    """The configurations in a file. Raises InputError where the file itself cannot be read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._text = _read(file)
        self.cases = _cases(file, self._text)
        self._lines: list[int] | None = None

    def located(self, number: int, name: str, faults: Sequence[CaseFault] | None) -> list[Fault]:
        """The faults of configuration `number` (from 1), each at the line of the word it is about; None: no mapping."""
        if self._lines is None:
            self._lines = case_lines(self._text, len(self.cases))
        return _located(self.file, self._text, self._lines, number, name, faults)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise InputError([Fault(f"cannot read it: {error.strerror}", str(file))], "give a JSON or YAML file") from error
    except UnicodeDecodeError as error:
        raise InputError([Fault("it is no text in UTF-8", str(file))], "give a JSON or YAML file") from error


def _cases(file: Path, text: str) -> Sequence[Any]:
    """One configuration, a list of them, or {"cases": [...]}."""
    found = _parsed(file, text)
    if isinstance(found, Mapping) and "cases" in found:
        found = found["cases"]
    elif isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, list) or not found:
        what = "no configuration in it" if found in (None, [], "") else "neither a configuration nor a list of them"
        raise InputError(
            [Fault(what, str(file), 1)], 'give one mapping with world_size, model, knobs; or {"cases": [...]}'
        )
    return found


def _parsed(file: Path, text: str) -> Any:
    """JSON where it starts like it: fast. YAML otherwise."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if file.suffix == ".json":
                fault = Fault(f"no JSON: {error.msg}", str(file), error.lineno, error.colno)
                raise InputError([fault], "correct the file") from error
        except RecursionError as error:
            raise InputError([Fault("nested too deep", str(file))], "correct the file") from error
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError([Fault(f"no YAML: {what}", str(file), line, column)], "correct the file") from error
    except RecursionError as error:
        raise InputError([Fault("nested too deep", str(file))], "correct the file") from error


def _located(
    file: Path, text: str, lines: list[int], number: int, name: str, found: Sequence[CaseFault] | None
) -> list[Fault]:
    start = lines[number - 1] if number <= len(lines) else 0
    if found is None:
        return [Fault(f"configuration {number} is no mapping", str(file), start)]
    rows = text.splitlines()
    end = lines[number] if number < len(lines) else len(rows)
    faults = []
    for fault in found:
        key = re.compile(rf"[\"']?{re.escape(fault.key)}[\"']?\s*:")
        line = next(
            (n for n, row in enumerate(rows[max(start - 1, 0) : end], start=max(start, 1)) if key.search(row)), start
        )
        faults.append(Fault(f"{name}: {fault.message}", str(file), line, hint=fault.hint))
    return faults
