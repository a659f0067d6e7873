"""`moetune check`: a verdict for explicit configurations, one or a list. No GPU, no torch."""

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
from search_spaces.rules import STACK_RULES, Case, Launcher, Rule, Verdict
from search_spaces.rules.rule import Level
from search_spaces.shapes import Noun
from tuner.case_files import CaseFile

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
    given = CaseFile(file)
    verdicts, faults = [], []
    for number, raw in enumerate(given.cases, start=1):
        explicit = read_case(raw, number) if isinstance(raw, Mapping) else None
        if explicit is None:
            faults += given.located(number, str(number), None)
        elif explicit.case is None:
            faults += given.located(number, explicit.id, explicit.faults)
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
