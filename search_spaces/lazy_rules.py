"""Rules asked before every knob is decided: what a rule still asks of the knobs to come, and nothing else.

After a prefix of decisions a rule is settled, or refuses whatever follows, or waits. A waiting rule is remembered as
what it would say to every combination of the knobs to come that it reads (a table, small ones are equal more often than
the values they came from: of all layouts, "EP is 1" is all that EP overlap asks), or, where these are too many, as the
values that it has read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case, Rule, Verdict
from search_spaces.space import ABSENT, Knob

TABLE_LIMIT = 1024  # combinations to come


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
IMPOSSIBLE = Values(("impossible",))  # stands in a table for an option that no point takes


class Node(NamedTuple):
    """What the future depends on: the state of each open rule, and the values that later conditions read."""

    states: tuple[State, ...]
    values: tuple[object, ...]


class _Later(Exception):
    """A knob that is not decided was read."""


class TooManyQuestions(Exception):
    """Rules have been asked as often as they may be."""


class _Questions:
    """How often rules have been asked, and may be."""

    most = 400_000  # some 6 s on one core; `moe-full` at 1024 GPUs asks 55,000

    def __init__(self) -> None:
        self.asked = 0

    def one(self) -> None:
        self.asked += 1
        if self.asked > self.most:
            raise TooManyQuestions


class _Decided(dict[str, Any]):
    """Knobs or variables decided so far; reading one in `missing` raises _Later, and so does listing them early."""

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

    def _all(self) -> "_Decided":
        if self.missing:
            raise _Later
        return self

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._all())

    def __len__(self) -> int:
        return dict.__len__(self._all())

    def keys(self) -> Any:
        return dict.keys(self._all())

    def values(self) -> Any:
        return dict.values(self._all())

    def items(self) -> Any:
        return dict.items(self._all())


class _Waiting:
    """One rule over the knobs it reads, in the order they are decided."""

    def __init__(self, rule: Rule, knobs: Sequence[Knob], facts: Case, questions: _Questions) -> None:
        self._rule, self._knobs, self._facts, self._questions = rule, tuple(knobs), facts, questions
        self._is_env = [knob.is_env for knob in knobs]
        self._missing = [frozenset(knob.name for knob in knobs[at:]) for at in range(len(knobs) + 1)]
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
        options = [self._state((*read, option)) if self._can_be(read, option) else IMPOSSIBLE
                   for option in self._options[len(read)]]  # fmt: skip
        possible = [option for option in options if option is not IMPOSSIBLE]
        if all(option is None for option in possible):
            return None
        if all(isinstance(option, Refuses) for option in possible):
            return possible[0]
        # Refusals in other words are one here: what is counted is the rule.
        key = tuple(0 if option is None else 1 if isinstance(option, Refuses) else id(option) for option in options)
        return self._tables.setdefault(key, Table(tuple(options)))

    def _can_be(self, read: tuple[object, ...], option: object) -> bool:
        """Whether the next knob can take an option (or be ABSENT), by those of its conditions that the rule reads."""
        knob, sure = self._knobs[len(read)], True
        decided = {known.name: value for known, value in zip(self._knobs, read, strict=False) if value is not ABSENT}
        reads = {known.name for known in self._knobs[: len(read)]}
        for condition in knob.when:
            if condition.knob not in reads:
                sure = False
            elif not condition.holds(decided):  # type: ignore[arg-type]
                return option is ABSENT
        return option is not ABSENT or not sure

    def _ask(self, read: tuple[object, ...]) -> State:
        self._questions.one()
        facts = self._facts
        knobs, env = _Decided(), _Decided()
        for knob, value, is_env in zip(self._knobs, read, self._is_env, strict=False):
            if value is ABSENT or (is_env and value is None):
                continue
            if is_env:
                env[knob.name] = str(value)
            else:
                knobs[knob.name] = value
        knobs.missing = env.missing = self._missing[len(read)]
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
    """The rules over knobs decided in `order`, for the target in `facts`. Raises TooManyQuestions."""

    def __init__(self, order: Sequence[Knob], rules: Sequence[Rule], facts: Case) -> None:
        self._questions = _Questions()
        place = {knob.name: at for at, knob in enumerate(order)}
        reads = [sorted(place[name] for name in rule.reads if name in place) for rule in rules]
        self._waiting = [
            _Waiting(rule, [order[p] for p in at], facts, self._questions)
            for rule, at in zip(rules, reads, strict=True)
        ]
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
            carried = tuple(number for number in before if number not in asked[p])
            opened = tuple(number for number in asked[p] if reads[number][-1] > p)
            still = tuple(q for q in (*kept, p) if until[q] > p)
            places = [(n, reads[n].index(p), before.index(n) if n in before else -1) for n in asked[p]]
            self._steps.append(_Step(places, _pick(before, carried), set(opened), _pick((*kept, p), still), still))
            before, kept = (*carried, *opened), still
        self._kept = [()] + [step.still for step in self._steps]

    @property
    def questions(self) -> int:
        """How often rules have been asked so far."""
        return self._questions.asked

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
        states, opened = node.states, []
        for number, nth, place in step.asked:
            waiting = self._waiting[number]
            state = waiting.decide(waiting.start() if place < 0 else states[place], nth, value)
            if isinstance(state, Refuses):
                return node, state.verdict
            if number in step.opened:
                opened.append(state)
        return Node((*step.carry(states), *opened), step.keep((*node.values, value))), None


Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def _pick(owners: Sequence[int], wanted: Sequence[int]) -> Pick:
    """Takes the values of `wanted` out of those of `owners`."""
    places = [owners.index(each) for each in wanted]
    if len(places) < 2:
        return lambda values: tuple([values[place] for place in places])
    return itemgetter(*places)


class _Step(NamedTuple):
    """Deciding one knob. `asked`: the rules that read it, each with which of its knobs this is and the place of its
    state (-1: it starts here); `opened`: those of them still open after it; `carry`: the states of other open rules;
    `keep`: values for later conditions, of the knobs at the places `still`."""

    asked: list[tuple[int, int, int]]
    carry: Pick
    opened: set[int]
    keep: Pick
    still: tuple[int, ...]


def known_values(order: Sequence[Knob], values: "zip[tuple[int, object]]") -> dict[str, KnobValue]:
    """Values by place as knobs; inactive ones left out."""
    return {order[at].name: value for at, value in values if value is not ABSENT}  # type: ignore[misc]
