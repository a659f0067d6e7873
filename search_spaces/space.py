"""What can be tried: knobs with their choices, in order, each existing only where its conditions hold.

Walk `space.knobs` in order and ask only those that are `active`: a condition refers to earlier knobs only. Two
mappings that mean the same give the same `canonical` candidate, so a point is never counted or run twice.
A knob in capitals is an environment variable: it goes to `Candidate.env`, and None leaves it unset.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from search_spaces.candidate import Candidate, KnobValue, modules
from search_spaces.errors import Fault, InputError

MOST_CHOICES = 64  # of one knob: what rules couple grows with their product
ABSENT = object()  # stands for the value of a knob that does not exist where it is looked for


@dataclass(frozen=True)
class Condition:
    """Holds where `knob` exists and its value is among `values` (`negated`: exists and is none of them)."""

    knob: str
    values: tuple[KnobValue, ...]
    negated: bool = False

    def holds(self, decided: Mapping[str, KnobValue]) -> bool:
        return self.knob in decided and (decided[self.knob] in self.values) is not self.negated


@dataclass(frozen=True)
class Knob:
    """One dimension, under its Megatron-Core name.

    `open_ended`: a sweep may list other positive integers too; `parts`: other lists of these words ("core_attn+moe");
    `pattern`: other texts that match this regular expression.
    """

    name: str
    choices: tuple[KnobValue, ...]
    default: KnobValue
    when: tuple[Condition, ...] = ()
    doc: str = ""
    open_ended: bool = False
    parts: tuple[str, ...] = ()
    pattern: str = ""

    @property
    def is_env(self) -> bool:
        return self.name.isupper()

    def allows(self, value: KnobValue) -> bool:
        """Whether `value` is a choice; True is not 1, and 2.0 is not 2: they would hash to other candidates."""
        if any(type(choice) is type(value) and choice == value for choice in self.choices):
            return True
        if isinstance(value, str):
            words = modules(value)
            listed = bool(words) and set(words) <= set(self.parts) and len(set(words)) == len(words)
            return listed or bool(self.pattern and re.fullmatch(self.pattern, value))
        return self.open_ended and type(value) is int and value >= 1


class ChoiceFault(NamedTuple):
    """One wrong word in a `restrict` request: `position` counts into the list of `knob`, None for the knob itself."""

    knob: str
    position: int | None
    message: str
    hint: str


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint for a misspelt word: the nearest known one, else the known ones."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


@dataclass(frozen=True)
class SearchSpace:
    """Named, ordered knobs. Conditions refer to earlier knobs only, and defaults are choices (checked at build)."""

    name: str
    knobs: tuple[Knob, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for knob in self.knobs:
            if knob.name in seen or not knob.choices or not knob.allows(knob.default):
                raise ValueError(f"{self.name}: knob {knob.name} is repeated, empty, or its default is no choice")
            if len(set(knob.choices)) < len(knob.choices):  # True is 1 to a set, and to the keys of points
                raise ValueError(f"{self.name}: two choices of {knob.name} are equal")
            if knob.is_env and not all(choice is None or isinstance(choice, str) for choice in knob.choices):
                raise ValueError(f"{self.name}: environment variable {knob.name} takes text, or null to leave it unset")
            if late := [c.knob for c in knob.when if c.knob not in seen]:
                raise ValueError(f"{self.name}: conditions of {knob.name} refer to later knobs {late}")
            seen.add(knob.name)

    @cached_property
    def by_name(self) -> dict[str, Knob]:
        return {knob.name: knob for knob in self.knobs}

    @cached_property
    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the knobs proper, and of those that are environment variables."""
        plain = tuple(knob.name for knob in self.knobs if not knob.is_env)
        return plain, tuple(knob.name for knob in self.knobs if knob.is_env)

    @cached_property
    def digest(self) -> str:
        """12 hex digits: equal for spaces with the same points and defaults, whatever their documentation."""
        rows = [[k.name, k.choices, k.default, [[c.knob, c.values, c.negated] for c in k.when]] for k in self.knobs]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()[:12]

    def active(self, decided: Mapping[str, KnobValue], knob: Knob) -> bool:
        """Whether `knob` exists given the knobs decided before it (inactive ones left out of `decided`)."""
        return all(condition.holds(decided) for condition in knob.when)

    def default(self) -> Candidate:
        """Every knob at its default."""
        return self.canonical({})

    def canonical(self, values: Mapping[str, KnobValue]) -> Candidate:
        """The candidate `values` mean: inactive knobs dropped, absent active ones at their default.

        Raises InputError, listing every unknown knob and value.
        """
        faults = self.choice_faults({name: (value,) for name, value in values.items()})
        if faults:
            raise InputError([Fault(f.message, hint=f.hint) for f in faults], "use the words of the space")
        decided: dict[str, KnobValue] = {}
        for knob in self.knobs:
            if self.active(decided, knob):
                decided[knob.name] = values.get(knob.name, knob.default)
        return self.candidate(decided)

    def candidate(self, decided: Mapping[str, KnobValue]) -> Candidate:
        """The candidate of values that are already canonical: knobs in the order of the space, environment apart."""
        plain, environment = self._names
        knobs = {name: decided[name] for name in plain if name in decided}
        env = {name: str(decided[name]) for name in environment if decided.get(name) is not None}
        # Unvalidated (30% of the screening time): the values are choices of this space, checked when it was made.
        return Candidate.model_construct(knobs=knobs, env=env)

    def values(self, candidate: Candidate) -> dict[str, KnobValue]:
        """The inverse of `canonical`: every active knob with its value, unset environment variables as None."""
        decided: dict[str, KnobValue] = {}
        for knob in self.knobs:
            if self.active(decided, knob):
                found = candidate.env.get(knob.name) if knob.is_env else candidate.knobs.get(knob.name, knob.default)
                decided[knob.name] = found
        return decided

    @cached_property
    def _size(self) -> int:
        return LeafCounter(self, self.knobs).count(0, {})

    def size(self) -> int:
        """Exact number of canonical points, by counting with memory of what later conditions read."""
        return self._size

    def choice_faults(self, choices: Mapping[str, Sequence[KnobValue]]) -> list[ChoiceFault]:
        """Every unknown knob and value in `choices`, each with a hint; empty where all is well."""
        faults: list[ChoiceFault] = []
        for name, values in choices.items():
            knob = self.by_name.get(name)
            if knob is None:
                hint = nearest(name, list(self.by_name))
                faults.append(ChoiceFault(name, None, f"no knob {name!r} in space {self.name!r}", hint))
            elif not values:
                faults.append(ChoiceFault(name, None, f"{name} has no choices", "list at least one value"))
            elif len(values) > MOST_CHOICES:
                message = f"{name} has {len(values):,} choices, more than {MOST_CHOICES}"
                faults.append(ChoiceFault(name, None, message, "narrow it to those worth a trial"))
            else:
                faults += [_value_fault(knob, i, value) for i, value in enumerate(values) if not knob.allows(value)]
        return faults

    def restrict(self, choices: Mapping[str, Sequence[KnobValue]]) -> "SearchSpace":
        """The space with the listed knobs narrowed to the given choices (one choice fixes a knob).

        The default stays where it is among the choices, else it is the first one. Raises InputError with every
        unknown word.
        """
        faults = self.choice_faults(choices)
        if faults:
            raise InputError([Fault(f.message, hint=f.hint) for f in faults], "use the words of the space")
        narrowed = []
        for knob in self.knobs:
            wanted = tuple(dict.fromkeys(choices[knob.name])) if knob.name in choices else knob.choices
            default = knob.default if knob.default in wanted else wanted[0]
            narrowed.append(replace(knob, choices=wanted, default=default))
        return SearchSpace(self.name, tuple(narrowed))


def _value_fault(knob: Knob, index: int, value: KnobValue) -> ChoiceFault:
    words = {json.dumps(choice) if not isinstance(choice, str) else choice: choice for choice in knob.choices}
    message = f"{json.dumps(value)} is no choice of {knob.name}"
    return ChoiceFault(knob.name, index, message, nearest(str(value), list(words)))


class LeafCounter:
    """Counts the points below a prefix of `order` without listing them.

    The count depends only on the decided knobs that later conditions read, so it is remembered under those.
    `order` must put every knob after the knobs its conditions refer to.
    """

    def __init__(self, space: SearchSpace, order: Sequence[Knob]) -> None:
        self._space, self._order = space, tuple(order)
        self._known: dict[tuple[object, ...], int] = {}
        self._read = [
            tuple(sorted({c.knob for later in self._order[i:] for c in later.when} - {k.name for k in self._order[i:]}))
            for i in range(len(self._order) + 1)
        ]

    def count(self, depth: int, decided: dict[str, KnobValue]) -> int:
        """Points that agree with `decided`, which holds the active ones of the first `depth` knobs."""
        if depth == len(self._order):
            return 1
        key = (depth, *(decided.get(name, ABSENT) for name in self._read[depth]))
        if key not in self._known:
            self._known[key] = self._count_below(depth, decided)
        return self._known[key]

    def _count_below(self, depth: int, decided: dict[str, KnobValue]) -> int:
        knob = self._order[depth]
        if not self._space.active(decided, knob):
            return self.count(depth + 1, decided)
        total = 0
        for value in knob.choices:
            total += self.count(depth + 1, {**decided, knob.name: value})
        return total
