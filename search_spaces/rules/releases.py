"""Fields that the named release of megatron-core does not have yet: its classes raise TypeError on them."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from search_spaces.candidate import KnobValue
from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import NEWEST, older, release
from search_spaces.shapes import StackVersions

TABLE = Path(__file__).parents[1] / "first_releases.json"
OFF = (None, False, "", "none", "[]")


class First(NamedTuple):
    """`since`: the first release with the field; `default`: what it means not to say it."""

    since: str
    default: KnobValue


@cache
def first_releases() -> Mapping[str, First]:
    """The fields that 0.15 lacks (scripts/first_releases.py). A renamed field is not among them."""
    return {name: First(row["since"], row["default"]) for name, row in json.loads(TABLE.read_text()).items()}


def lacking(knobs: Mapping[str, KnobValue], megatron_core: str, asking: bool) -> Iterator[str]:
    """Knobs that the release lacks. `asking`: those that ask for something, else those that are off or at default."""
    table = first_releases()
    for name in sorted(table.keys() & knobs.keys()):
        idle = knobs[name] in (*OFF, table[name].default)
        if idle is not asking and older(megatron_core, table[name].since):
            yield name


def idle_words(knobs: Mapping[str, KnobValue], stack: StackVersions | None) -> list[str]:
    """Warnings about fields that the stack's release lacks and that ask for nothing."""
    core = stack.megatron_core if stack else NEWEST
    return [f"megatron-core {short(core)} has no {name}: leave it out" for name in lacking(knobs, core, asking=False)]


def short(version: str) -> str:
    """ "0.16.0" -> "0.16"."""
    return ".".join(str(part) for part in release(version)[:2])


def _unknown(case: Case) -> str | None:
    core = case.stack.megatron_core if case.stack else NEWEST
    names = ", ".join(lacking(case.knobs, core, asking=True))
    return f"megatron-core {short(core)} has no {names}" if names else None


RULES = (
    Rule(
        "UNK-03", frozenset(first_releases()), _unknown, "wheels of 0.15 to 0.19 (scripts/first_releases.py)",
        "leave it out, or take a newer release", until="0.19.0",
    ),
)  # fmt: skip
