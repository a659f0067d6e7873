"""The space before any worker starts: which points are legal, and for the others how many each rule refuses.

The space is walked as a prefix tree. A rule is asked as soon as every knob it reads is decided; where it refuses,
the points below are counted without listing them. So 2.7 million points take well under a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.rules import Case, Rule, Verdict, rules_for
from search_spaces.shapes import ClusterShape, ModelShape, Noun, StackVersions, TrainingShape
from search_spaces.space import Knob, LeafCounter, SearchSpace

ACCEPTED_LIMIT = 200_000


class Refusal(Noun):
    """How many points one rule refuses, why, and one of them.

    A point that breaks several rules is counted once, under the first that the walk meets.
    """

    rule: str
    reason: str
    count: int
    example: Candidate


@dataclass(frozen=True)
class Screening:
    """`total` == len(accepted) + the counts of `rejected`. Accepted in the order of the space, rejected by count."""

    total: int
    accepted: list[Candidate]
    rejected: tuple[Refusal, ...]


def verdict(case: Case, rules: Sequence[Rule] | None = None) -> Verdict | None:
    """The first rule that refuses one explicit case, with its reason; None where it is legal.

    `rules` None: those of the case's launchers and release, this project's worker included.
    """
    for rule in _rules_of(case) if rules is None else rules:
        if reason := rule.refusal(case):
            return Verdict(rule.id, reason, rule.level)
    return None


def _rules_of(case: Case) -> tuple[Rule, ...]:
    return rules_for(case.launchers, case.stack.megatron_core if case.stack else None)


def screen(
    space: SearchSpace,
    model: ModelShape,
    cluster: ClusterShape,
    training: TrainingShape,
    stack: StackVersions | None = None,
    rules: Sequence[Rule] | None = None,
    limit: int = ACCEPTED_LIMIT,
) -> Screening:
    """Screen every point. Raises InputError where more than `limit` points are legal: the space must be narrowed."""
    facts = Case({}, model, cluster, training, {}, stack)
    walk = _Walk(space, _rules_of(facts) if rules is None else rules, facts, limit)
    walk.descend(0)
    rejected = sorted(walk.refusals(), key=lambda refusal: (-refusal.count, refusal.rule))
    return Screening(
        space.size(), [space.candidate(decided) for decided in _sorted(space, walk.accepted)], tuple(rejected)
    )


def walk_order(space: SearchSpace, rules: Sequence[Rule]) -> tuple[Knob, ...]:
    """The knobs, those that let most rules speak first; a knob never comes before the ones its conditions read."""
    names = set(space.by_name)
    waiting = [rule.reads & names for rule in rules]
    left, decided, order = list(space.knobs), set[str](), list[Knob]()
    while left:
        ready = [knob for knob in left if all(condition.knob in decided for condition in knob.when)]
        # max keeps the first of equals, so the order of the space breaks ties.
        best = max(ready, key=lambda knob: _spoken(waiting, decided | {knob.name}) / len(knob.choices))
        decided.add(best.name)
        waiting = [reads for reads in waiting if not reads <= decided]
        left.remove(best)
        order.append(best)
    return tuple(order)


def _spoken(waiting: Sequence[frozenset[str]], decided: set[str]) -> int:
    return sum(1 for reads in waiting if reads <= decided)


def _sorted(space: SearchSpace, found: list[dict[str, KnobValue]]) -> list[dict[str, KnobValue]]:
    """In the order of the space: the first knob's choices change slowest; where a knob is inactive comes first."""
    ranks = [(k.name, {choice: i for i, choice in enumerate(k.choices)}) for k in space.knobs]
    return sorted(found, key=lambda decided: [rank[decided[k]] if k in decided else -1 for k, rank in ranks])


class _Walk:
    """One pass over the prefix tree. `_knobs` and `_env` change in place as the walk goes; the case looks into them."""

    def __init__(self, space: SearchSpace, rules: Sequence[Rule], facts: Case, limit: int) -> None:
        self._space, self._limit = space, limit
        self._order = walk_order(space, rules)
        self._counter = LeafCounter(space, self._order)
        self._ready = _ready_rules(self._order, rules)
        self._decided: dict[str, KnobValue] = {}
        self._env: dict[str, str] = {}
        self._case = Case(self._decided, facts.model, facts.cluster, facts.training, self._env, facts.stack)
        self._counts: dict[str, tuple[str, int, Candidate]] = {}
        self.accepted: list[dict[str, KnobValue]] = []

    def descend(self, depth: int) -> None:
        """Visit the subtree under what is decided so far, the first `depth` knobs of the order."""
        if refused := self._refusal(depth):
            return self._count(refused, self._counter.count(depth, self._decided))
        if depth == len(self._order):
            return self._accept()
        knob = self._order[depth]
        if not self._space.active(self._decided, knob):
            return self.descend(depth + 1)
        for value in knob.choices:
            self._decide(knob, value)
            self.descend(depth + 1)
        self._undo(knob)
        return None

    def _decide(self, knob: Knob, value: KnobValue) -> None:
        self._decided[knob.name] = value
        if knob.is_env and value is not None:
            self._env[knob.name] = str(value)
        elif knob.is_env:
            self._env.pop(knob.name, None)

    def _undo(self, knob: Knob) -> None:
        del self._decided[knob.name]
        self._env.pop(knob.name, None)

    def _refusal(self, depth: int) -> Verdict | None:
        """The first refusal among the rules whose last knob was decided at `depth`, remembered by what they read."""
        rules, reads, answers = self._ready[depth]
        if not rules:
            return None
        key = tuple(map(self._decided.get, reads))  # absent and None are one to a rule: Megatron's default
        if key not in answers:
            answers[key] = verdict(self._case, rules)
        return answers[key]

    def _count(self, refused: Verdict, points: int) -> None:
        reason, count, example = self._counts.get(refused.rule) or (refused.reason, 0, self._example())
        self._counts[refused.rule] = (reason, count + points, example)

    def _example(self) -> Candidate:
        return self._space.canonical(self._decided)

    def _accept(self) -> None:
        self.accepted.append(dict(self._decided))
        if len(self.accepted) > self._limit:
            widest = sorted(self._space.knobs, key=lambda knob: -len(knob.choices))[:3]
            names = ", ".join(f"{knob.name} ({len(knob.choices)})" for knob in widest)
            message = f"space {self._space.name!r} has more than {self._limit:,} legal points"
            raise InputError([Fault(message)], f"narrow space.choices; the knobs with most choices: {names}")

    def refusals(self) -> list[Refusal]:
        return [
            Refusal(rule=rule, reason=reason, count=count, example=example)
            for rule, (reason, count, example) in self._counts.items()
        ]


class _Ready(NamedTuple):
    """The rules that can speak first at one depth, the knobs they read, and their answers by the values of these."""

    rules: tuple[Rule, ...]
    reads: tuple[str, ...]
    answers: dict[tuple[KnobValue, ...], Verdict | None]


def _ready_rules(order: Sequence[Knob], rules: Sequence[Rule]) -> list[_Ready]:
    """By depth: 0 for the rules that read no knob of the space."""
    depth_of = {knob.name: depth for depth, knob in enumerate(order, start=1)}
    at: list[list[Rule]] = [[] for _ in range(len(order) + 1)]
    for rule in rules:
        at[max((depth_of[name] for name in rule.reads if name in depth_of), default=0)].append(rule)
    reads = [sorted(name for name in depth_of if any(name in rule.reads for rule in ready)) for ready in at]
    return [_Ready(tuple(ready), tuple(names), {}) for ready, names in zip(at, reads, strict=True)]
