"""Rules asked before every knob is decided: what a rule still asks of the knobs to come, and nothing else.

After a prefix of decisions a rule is settled, or refuses whatever follows, or waits. A waiting rule is remembered as
what it would say to every combination of the knobs to come that it reads (a table, small ones are equal more often than
the values they came from: of all layouts, "EP is 1" is all that EP overlap asks), or, where these are too many, as the
values that it has read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case, Rule, Verdict
from search_spaces.space import ABSENT, Knob

TABLE_LIMIT = 1024  # combinations to come
UNDECIDED = object()


class Refuses(NamedTuple):
    """A rule that refuses whatever follows, in the words it found for one case of it."""

    verdict: Verdict


@dataclass(frozen=True, eq=False)
class Table:
    """What a rule says by the option of the next knob that it reads. Equal tables of a rule are one object."""

    options: tuple["State", ...]


class Values(NamedTuple):
    """Values of the decided knobs that a rule reads, in their order."""

    read: tuple[object, ...]


State = Refuses | Table | Values | None  # None: settled, it accepts whatever follows


class Node(NamedTuple):
    """What the future depends on: the state of each open rule, and the values that later conditions read."""

    states: tuple[State, ...]
    values: tuple[object, ...]


class _Later(Exception):
    """A knob that is not decided was read."""


class _Decided(dict[str, Any]):
    """Knobs or variables decided so far; reading one in `missing` raises _Later."""

    missing: frozenset[str] = frozenset()

    def get(self, key: str, default: Any = None) -> Any:
        if key in self.missing:
            raise _Later
        return dict.get(self, key, default)

    def __getitem__(self, key: str) -> Any:
        if key in self.missing:
            raise _Later
        return dict.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        if key in self.missing:
            raise _Later
        return dict.__contains__(self, key)


class _Waiting:
    """One rule over the knobs it reads, in the order they are decided."""

    def __init__(self, rule: Rule, knobs: Sequence[Knob], facts: Case) -> None:
        self._rule, self._knobs, self._facts = rule, tuple(knobs), facts
        self._options = [(*knob.choices, ABSENT) if knob.when else knob.choices for knob in knobs]
        self._index = [{_typed(option): at for at, option in enumerate(options)} for options in self._options]
        self._to_come = [1] * (len(knobs) + 1)
        for at in range(len(knobs) - 1, -1, -1):
            self._to_come[at] = self._to_come[at + 1] * len(self._options[at])
        self._known: dict[tuple[object, ...], State] = {}
        self._tables: dict[tuple[int, ...], Table] = {}

    def start(self) -> State:
        """Before any knob is decided."""
        return self._state(())

    def decide(self, state: State, at: int, value: object) -> State:
        """After the `at`-th of the knobs it reads takes `value` (ABSENT: it does not exist)."""
        if isinstance(state, Table):
            return state.options[self._index[at][_typed(value)]]
        return self._state((*state.read, value)) if isinstance(state, Values) else state

    def _state(self, read: tuple[object, ...]) -> State:
        if read not in self._known:
            self._known[read] = self._worked_out(read)
        return self._known[read]

    def _worked_out(self, read: tuple[object, ...]) -> State:
        answer = self._ask(read)
        if not isinstance(answer, Values) or self._to_come[len(read)] > TABLE_LIMIT:
            return answer
        options = tuple(self._state((*read, option)) for option in self._options[len(read)])
        if all(option is None for option in options):
            return None
        if all(isinstance(option, Refuses) for option in options):
            return options[0]
        # Refusals in other words are one here: what is counted is the rule.
        key = tuple(0 if option is None else 1 if isinstance(option, Refuses) else id(option) for option in options)
        return self._tables.setdefault(key, Table(options))

    def _ask(self, read: tuple[object, ...]) -> State:
        facts = self._facts
        knobs, env = _Decided(), _Decided()
        for knob, value in zip(self._knobs, read, strict=False):
            if value is not ABSENT and not (knob.is_env and value is None):
                (env if knob.is_env else knobs)[knob.name] = str(value) if knob.is_env else value
        knobs.missing = env.missing = frozenset(knob.name for knob in self._knobs[len(read) :])
        case = Case(knobs, facts.model, facts.cluster, facts.training, env, facts.stack, facts.launchers)
        try:
            reason = self._rule.refusal(case)
        except _Later:
            return Values(read)
        return Refuses(Verdict(self._rule.id, reason, self._rule.level)) if reason else None


def _typed(value: object) -> tuple[type, object]:
    """True is not 1, as a key."""
    return type(value), value


class LazyRules:
    """The rules over knobs decided in `order`, for the target in `facts`."""

    def __init__(self, order: Sequence[Knob], rules: Sequence[Rule], facts: Case) -> None:
        place = {knob.name: at for at, knob in enumerate(order)}
        reads = [sorted(place[name] for name in rule.reads if name in place) for rule in rules]
        self._waiting = [_Waiting(rule, [order[p] for p in at], facts) for rule, at in zip(rules, reads, strict=True)]
        self._always = [number for number, at in enumerate(reads) if not at]
        asked: list[list[int]] = [[] for _ in order]
        for number, at in enumerate(reads):
            for p in at:
                asked[p].append(number)
        until = [0] * len(order)  # the last knob whose condition reads this one
        for p, knob in enumerate(order):
            for condition in knob.when:
                until[place[condition.knob]] = max(until[place[condition.knob]], p)
        self._steps: list[_Step] = []
        before: tuple[int, ...] = ()
        kept: tuple[int, ...] = ()
        for p in range(len(order)):
            after = tuple(number for number, at in enumerate(reads) if at and at[0] <= p < at[-1])
            still = tuple(q for q in range(p + 1) if until[q] > p)
            self._steps.append(_Step(p, before, after, kept, still, [(n, reads[n].index(p)) for n in asked[p]]))
            before, kept = after, still
        self._kept = [()] + [step.still for step in self._steps]

    def start(self) -> tuple[Node, Verdict | None]:
        """The root, and the refusal of a rule that reads no knob of the space, if there is one."""
        for number in self._always:
            if isinstance(state := self._waiting[number].start(), Refuses):
                return Node((), ()), state.verdict
        return Node((), ()), None

    def conditions(self, depth: int, node: Node) -> "zip[tuple[int, object]]":
        """(place in the order, value) of the decided knobs that later conditions read."""
        return zip(self._kept[depth], node.values, strict=True)

    def decide(self, at: int, node: Node, value: object) -> tuple[Node, Verdict | None]:
        """The node after knob number `at` takes `value` (ABSENT: it does not exist), or the first refusal."""
        step = self._steps[at]
        changed: dict[int, State] = {}
        for number, nth in step.asked:
            waiting = self._waiting[number]
            state = waiting.start() if nth == 0 else node.states[step.place[number]]
            state = waiting.decide(state, nth, value)
            if isinstance(state, Refuses):
                return node, state.verdict
            changed[number] = state
        states = tuple([changed[n] if n in changed else node.states[step.place[n]] for n in step.after])
        known = dict(zip(step.kept, node.values, strict=True)) | {at: value}
        return Node(states, tuple([known[q] for q in step.still])), None


class _Step:
    """Deciding one knob: which rules are open before and after, and which values conditions still want."""

    def __init__(
        self, at: int, before: tuple[int, ...], after: tuple[int, ...], kept: tuple[int, ...], still: tuple[int, ...],
        asked: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.at, self.after, self.kept, self.still, self.asked = at, after, kept, still, asked
        self.place = {number: index for index, number in enumerate(before)}


def known_values(order: Sequence[Knob], values: "zip[tuple[int, object]]") -> dict[str, KnobValue]:
    """Values by place as knobs; inactive ones left out."""
    return {order[at].name: value for at, value in values if value is not ABSENT}  # type: ignore[misc]
