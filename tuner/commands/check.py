"""`moetune check`: a verdict for explicit configurations, one or a list. No GPU, no torch."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, RootModel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from search_spaces.candidate import KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.explicit import Explicit, read_case
from search_spaces.rules import STACK_RULES, Case, Launcher, Rule, Verdict
from search_spaces.rules.rule import Level
from search_spaces.shapes import Noun
from tuner.positions import case_lines

UNREADABLE = "UNK-00"
LEVELS: tuple[Level, ...] = ("config", "build", "first step", "runtime risk")


class CheckVerdict(Noun):
    """Whether one configuration can run. `rule` and `reason` say why not; of a valid one with a risk, which.

    `effective`: knobs that the stack sets otherwise than requested. `level`: where the stack itself notices.
    `warnings`: what the stack ignores, what is only a risk, what could not be judged.
    """

    id: str
    valid: bool
    rule: str | None = None
    reason: str = ""
    effective: dict[str, KnobValue] = Field(default_factory=dict)
    level: Level = "config"
    warnings: tuple[str, ...] = ()


class CheckResult(RootModel[tuple[CheckVerdict, ...]]):
    """In the order of the file. `faults` lists the configurations that could not be read."""

    _faults: tuple[Fault, ...] = ()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults


def check(file: Path) -> CheckResult:
    """Judge every configuration in a JSON or YAML file. Raises InputError where the file itself cannot be read."""
    text = _read(file)
    cases = _cases(file, text)
    lines: list[int] | None = None
    verdicts, faults = [], []
    for number, raw in enumerate(cases, start=1):
        explicit = read_case(raw, number) if isinstance(raw, Mapping) else None
        if explicit is None or explicit.case is None:
            lines = case_lines(text, len(cases)) if lines is None else lines
            faults += _located(file, text, lines, number, explicit)
        verdicts.append(_judged(explicit, number))
    result = CheckResult(tuple(verdicts))
    result._faults = tuple(faults)
    return result


def judge(explicit: Explicit) -> CheckVerdict:
    """The verdict on a configuration that could be read."""
    case = explicit.case
    assert case is not None
    refused, risks = _verdicts(case)
    warnings = (*explicit.warnings, *(f"{risk.reason} [{risk.rule}]" for risk in risks))
    found = refused or (risks[0] if risks else None)
    return CheckVerdict(
        id=explicit.id,
        valid=refused is None,
        rule=found.rule if found else None,
        reason=found.reason if found else "",
        effective=dict(explicit.effective),
        level=found.level if found else "config",
        warnings=warnings,
    )


def _verdicts(case: Case) -> tuple[Verdict | None, list[Verdict]]:
    """What the stack would notice first, else every risk.

    What only doubles another candidate (DUP) is nothing a user must hear.
    """
    rules = _rules(case.launchers, case.stack.megatron_core if case.stack else None)
    found = [Verdict(rule.id, reason, rule.level) for rule in rules if (reason := rule.refusal(case))]
    refused = [verdict for verdict in found if verdict.level != "runtime risk"]
    first = min(refused, key=lambda verdict: LEVELS.index(verdict.level), default=None)
    return first, [verdict for verdict in found if verdict.level == "runtime risk"]


@cache
def _rules(launchers: frozenset[Launcher], megatron_core: str | None) -> tuple[Rule, ...]:
    held = (rule for rule in STACK_RULES if rule.concerns(launchers, megatron_core))
    return tuple(rule for rule in held if not rule.id.startswith("DUP"))


def _judged(explicit: Explicit | None, number: int) -> CheckVerdict:
    if explicit is None:
        return CheckVerdict(id=str(number), valid=False, rule=UNREADABLE, reason="a configuration must be a mapping")
    if explicit.case is None:
        words = "; ".join(
            f"{fault.message} ({fault.hint})" if fault.hint else fault.message for fault in explicit.faults
        )
        return CheckVerdict(id=explicit.id, valid=False, rule=UNREADABLE, reason=words, warnings=explicit.warnings)
    return judge(explicit)


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


def _located(file: Path, text: str, lines: list[int], number: int, explicit: Explicit | None) -> list[Fault]:
    """The faults of one configuration, each at the line of the word it is about."""
    start = lines[number - 1] if number <= len(lines) else 0
    if explicit is None:
        return [Fault(f"configuration {number} is no mapping", str(file), start)]
    rows = text.splitlines()
    end = lines[number] if number < len(lines) else len(rows)
    faults = []
    for fault in explicit.faults:
        key = re.compile(rf"[\"']?{re.escape(fault.key)}[\"']?\s*:")
        line = next(
            (n for n, row in enumerate(rows[max(start - 1, 0) : end], start=max(start, 1)) if key.search(row)), start
        )
        faults.append(Fault(f"{explicit.id}: {fault.message}", str(file), line, hint=fault.hint))
    return faults


def render(result: CheckResult, console: Console) -> None:
    """Print verdicts for people."""
    table = Table("configuration", "verdict", "rule", "why")
    for found in result.root:
        verdict = "invalid" if not found.valid else "risky" if found.level == "runtime risk" else "valid"
        effective = [f"effective {name}={value}" for name, value in found.effective.items()]
        notes = [note for note in found.warnings if found.reason not in note or not found.reason]
        table.add_row(
            found.id, verdict, found.rule or "", Text("\n".join(filter(None, [found.reason, *effective, *notes])))
        )
    console.print(table)
    valid = sum(found.valid for found in result.root)
    console.print(f"{valid} of {len(result.root)} can run", highlight=False)
