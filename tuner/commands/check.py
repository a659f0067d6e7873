"""`moetune check`: a verdict for explicit configurations, one or a list. No GPU, no torch."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import Field, RootModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.candidate import KnobValue
from search_spaces.errors import Fault
from search_spaces.explicit import Explicit, read_case
from search_spaces.explicit_knobs import CaseFault, shown
from search_spaces.rules import STACK_RULES, Case, Launcher, Rule, Verdict
from search_spaces.rules.rule import Level
from search_spaces.shapes import Noun
from tuner.check_file import read_check_file
from tuner.terminal import escaped

UNREADABLE = "UNK-00"
_HALF = re.compile(r"(?<=\d)[a-z]$")
LONGEST_ID = 60  # characters
LEVELS: tuple[Level, ...] = ("config", "build", "first step", "runtime risk")


class UnreadableValue(Exception):
    """A value that a rule can make nothing of."""

    def __init__(self, fault: CaseFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


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
    found = read_check_file(file)
    verdicts, faults, seen = list[CheckVerdict](), list[Fault](), set[str]()
    for number, raw in enumerate(found.cases, start=1):
        verdict, wrong = answer(raw, number)
        if verdict.id in seen:
            again = f"another configuration of this file has the id {shown_id(verdict.id)}"
            verdict = verdict.model_copy(update={"warnings": (*verdict.warnings, again)})
        seen.add(verdict.id)
        verdicts.append(verdict)
        for fault in wrong:
            line = found.line_of(number, fault.key)
            faults.append(Fault(f"{shown_id(verdict.id)}: {fault.message}", found.path, line, hint=fault.hint))
    result = CheckResult(tuple(verdicts))
    result._faults = tuple(faults)
    return result


def shown_id(name: str) -> str:
    """An id in a message, short, and with escapes for what would reach a terminal as a command."""
    name = escaped(name)
    return name if len(name) <= LONGEST_ID else name[: LONGEST_ID - 3] + "..."


def answer(raw: object, number: int) -> tuple[CheckVerdict, tuple[CaseFault, ...]]:
    """The verdict on the `number`-th configuration of a file, and what keeps it from being judged."""
    if not isinstance(raw, Mapping):
        fault = CaseFault("", f"a configuration must be a mapping, not {shown(raw)}")
        return _unread(Explicit(str(number), None, {}, (), (fault,))), (fault,)
    try:
        explicit = read_case(raw, number)
        if explicit.case is not None:
            return judge(explicit), ()
    except UnreadableValue as error:
        explicit = Explicit(str(raw.get("id") or number), None, {}, (), (error.fault,))
    except RecursionError:
        explicit = Explicit(str(number), None, {}, (), (CaseFault("", "a configuration nested too deeply"),))
    return _unread(explicit), explicit.faults


def _unread(explicit: Explicit) -> CheckVerdict:
    words = "; ".join(f"{fault.message} ({fault.hint})" if fault.hint else fault.message for fault in explicit.faults)
    return CheckVerdict(id=explicit.id, valid=False, rule=UNREADABLE, reason=words, warnings=explicit.warnings)


def judge(explicit: Explicit) -> CheckVerdict:
    """The verdict on a configuration that could be read."""
    case = explicit.case
    assert case is not None
    refused, risks = _verdicts(case)
    warnings = (*explicit.warnings, *(f"{risk.reason} [{catalogued(risk.rule)}]" for risk in risks))
    found = refused or (risks[0] if risks else None)
    return CheckVerdict(
        id=explicit.id,
        valid=refused is None,
        rule=catalogued(found.rule) if found else None,
        reason=found.reason if found else "",
        effective=dict(explicit.effective),
        level=found.level if found else "config",
        warnings=warnings,
    )


def catalogued(rule: str) -> str:
    """The catalogue's id: rules that tell another half of a row have a letter behind it (PAR-06b)."""
    return _HALF.sub("", rule)


def _verdicts(case: Case) -> tuple[Verdict | None, list[Verdict]]:
    """What the stack would notice first, else every risk.

    What only doubles another candidate (DUP) is nothing a user must hear.
    """
    rules = _rules(case.launchers, case.stack.megatron_core if case.stack else None)
    found = [Verdict(rule.id, reason, rule.level) for rule in rules if (reason := _refusal(rule, case))]
    refused = [verdict for verdict in found if verdict.level != "runtime risk"]
    first = min(refused, key=lambda verdict: LEVELS.index(verdict.level), default=None)
    return first, [verdict for verdict in found if verdict.level == "runtime risk"]


def _refusal(rule: Rule, case: Case) -> str | None:
    """A rule's answer. Raises UnreadableValue for a value that is no number, list or word where the rule wants one."""
    try:
        return rule.refusal(case)
    except (ValueError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        read = {name: case.knobs[name] for name in sorted(rule.reads) if case.knobs.get(name) is not None}
        values = ", ".join(f"{name} {shown(value)}" for name, value in read.items())
        texts = [name for name, value in read.items() if isinstance(value, str)]
        key = next(iter(texts or read), "knobs")
        raise UnreadableValue(CaseFault(key, f"rule {rule.id} can make nothing of {values}")) from error


@cache
def _rules(launchers: frozenset[Launcher], megatron_core: str | None) -> tuple[Rule, ...]:
    held = (rule for rule in STACK_RULES if rule.concerns(launchers, megatron_core))
    return tuple(rule for rule in held if not rule.id.startswith("DUP"))


def render(result: CheckResult, console: Console) -> None:
    """Print verdicts for people."""
    table = Table("configuration", "verdict", "rule", "why")
    for found in result.root:
        verdict = "invalid" if not found.valid else "risky" if found.level == "runtime risk" else "valid"
        effective = [f"effective {name}={value}" for name, value in found.effective.items()]
        notes = [note for note in found.warnings if found.reason not in note or not found.reason]
        why = Text("\n".join(filter(None, [found.reason, *effective, *notes])))
        table.add_row(Text(shown_id(found.id)), verdict, found.rule or "", why)  # text: "[/x]" would be markup
    console.print(table)
    valid = sum(found.valid for found in result.root)
    console.print(f"{valid} of {len(result.root)} can run", highlight=False)
