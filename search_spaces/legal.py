"""The legal points of a space on one target, as a decision diagram: counted, drawn and walked without listing them.

Knobs are decided one by one, in the order that lets rules speak early. Two prefixes that agree on everything a later
rule or condition reads have the same completions, so they are one node. The diagram is as wide as the rules couple
knobs, not as large as the space: 10^14 points take a second. A walk offers only choices that a legal point goes on
from, so what is drawn is legal by construction.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.rules import Case, Rule, Verdict
from search_spaces.shapes import Noun
from search_spaces.space import ABSENT, Knob, LeafCounter, SearchSpace

NODE_LIMIT = 2_000_000  # about 2 GB; a space that couples more is narrowed by its user
Key = tuple[object, ...]  # values of the frontier's knobs; ABSENT where a knob is inactive
Choose = Callable[[Knob, tuple[KnobValue, ...]], KnobValue]


class Refusal(Noun):
    """How many points one rule refuses, why, and one of them.

    A point that breaks several rules is counted once, under the first that the walk meets.
    """

    rule: str
    reason: str
    count: int
    example: Candidate


class _Edge(NamedTuple):
    """From a node: the knob's value (ABSENT where it is inactive) and the node it leads to."""

    value: object
    key: Key


@dataclass
class _Layer:
    """The nodes after `depth` knobs. `parents` holds one way to reach each, for examples."""

    edges: dict[Key, list[_Edge]] = field(default_factory=dict)
    legal: dict[Key, int] = field(default_factory=dict)
    ways: dict[Key, int] = field(default_factory=dict)
    parents: dict[Key, tuple[Key, object]] = field(default_factory=dict)


class LegalSpace:
    """The points of `space` that `rules` accept for the target in `facts` (whose knobs are not looked at).

    `total` points, of which `count` are legal; total == count + the counts of `refusals`. Raises InputError where the
    rules couple so many choices that the diagram outgrows memory.
    """

    def __init__(self, space: SearchSpace, rules: Sequence[Rule], facts: Case) -> None:
        self.space, self.facts = space, facts
        self.order = walk_order(space, rules)
        self._steps = _steps(space, self.order, rules)
        self._layers = [_Layer() for _ in range(len(self.order) + 1)]
        self._refused: dict[str, tuple[str, int, Candidate]] = {}
        self._leaves = LeafCounter(space, self.order)
        self._grow()
        self._count()
        self.total = space.size()
        self.count = self._layers[0].legal.get((), 0)

    @property
    def nodes(self) -> int:
        """How large the diagram is."""
        return sum(len(layer.ways) for layer in self._layers)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """By count, largest first."""
        found = [Refusal(rule=r, reason=w, count=n, example=e) for r, (w, n, e) in self._refused.items()]
        return tuple(sorted(found, key=lambda refusal: (-refusal.count, refusal.rule)))

    def walk(self, choose: Choose) -> Candidate:
        """The legal candidate that `choose` decides, knob by knob in `order`; it is given the choices still open.

        Raises ValueError where no point is legal.
        """
        if not self.count:
            raise ValueError(f"space {self.space.name!r} has no legal point here")
        decided: dict[str, KnobValue] = {}
        key: Key = ()
        for depth, knob in enumerate(self.order):
            edges = self._live(depth, key)
            edge = edges[0]
            if edge.value is not ABSENT:
                values = tuple(each.value for each in edges)
                edge = edges[values.index(choose(knob, values))]  # type: ignore[arg-type]  # ABSENT stands alone
                decided[knob.name] = edge.value  # type: ignore[assignment]
            key = edge.key
        return self.space.candidate(decided)

    def draw(self, source: random.Random) -> Candidate:
        """A legal candidate: each knob uniform among the choices still open to it."""
        return self.walk(lambda _knob, live: live[0] if len(live) == 1 else source.choice(live))

    def __contains__(self, candidate: object) -> bool:
        """Whether a canonical candidate of the space is legal."""
        if not isinstance(candidate, Candidate) or not self.count:
            return False
        values = self.space.values(candidate)
        key: Key = ()
        for depth, knob in enumerate(self.order):
            wanted = values.get(knob.name, ABSENT)
            found = [edge for edge in self._live(depth, key) if _same(edge.value, wanted)]
            if not found:
                return False
            key = found[0].key
        return True

    def __iter__(self) -> Iterator[Candidate]:
        """Every legal candidate, each once; the last knob of `order` changes fastest, its default first."""
        return self._below(0, (), {}) if self.count else iter(())

    def _below(self, depth: int, key: Key, decided: dict[str, KnobValue]) -> Iterator[Candidate]:
        if depth == len(self.order):
            yield self.space.candidate(decided)
            return
        knob = self.order[depth]
        for edge in sorted(self._live(depth, key), key=lambda edge: not _same(edge.value, knob.default)):
            more = decided if edge.value is ABSENT else {**decided, knob.name: edge.value}
            yield from self._below(depth + 1, edge.key, more)  # type: ignore[arg-type]

    def choices_alive(self) -> dict[str, tuple[KnobValue, ...]]:
        """By knob, in the order of the space: the choices that some legal point makes; knobs never active left out."""
        alive: dict[str, set[object]] = {}
        for depth, knob in enumerate(self.order):
            layer = self._layers[depth]
            alive[knob.name] = {e.value for key in layer.edges if layer.legal[key] for e in self._live(depth, key)}
        found = {k.name: tuple(choice for choice in k.choices if choice in alive[k.name]) for k in self.space.knobs}
        return {name: choices for name, choices in found.items() if choices}

    def _live(self, depth: int, key: Key) -> list[_Edge]:
        """The edges of a node that lead to legal points."""
        legal = self._layers[depth + 1].legal
        return [edge for edge in self._layers[depth].edges[key] if legal[edge.key]]

    def _grow(self) -> None:
        """Layer by layer from the root: nodes, edges, and what is refused on the way."""
        self._layers[0].ways[()] = 1
        start = self._steps[0]
        if refused := start.refusal((), self.facts):
            self._refuse(refused, 0, (), 1)
            self._layers[0].ways.clear()
        total = 0
        for depth, step in enumerate(self._steps[1:]):
            layer, after = self._layers[depth], self._layers[depth + 1]
            for key, ways in layer.ways.items():
                layer.edges[key] = edges = []
                for value in step.values(key):
                    full = (*key, value)
                    if refused := step.refusal(full, self.facts):
                        self._refuse(refused, depth + 1, full, ways)
                        continue
                    child = step.project(full)
                    edges.append(_Edge(value, child))
                    after.ways[child] = after.ways.get(child, 0) + ways
                    after.parents.setdefault(child, (key, value))
            total += len(after.ways)
            if total > NODE_LIMIT:
                self._too_wide(depth)

    def _count(self) -> None:
        """From the leaves back: how many legal points lie below each node."""
        self._layers[-1].legal = dict.fromkeys(self._layers[-1].ways, 1)
        for layer, after in zip(reversed(self._layers[:-1]), reversed(self._layers[1:]), strict=True):
            legal = after.legal
            layer.legal = {key: sum(legal[edge.key] for edge in layer.edges[key]) for key in layer.ways}

    def _refuse(self, refused: Verdict, depth: int, full: Key, ways: int) -> None:
        below = self._leaves.count(depth, self._steps[depth].decided(full))
        reason, count, example = self._refused.get(refused.rule) or (refused.reason, 0, self._example(depth, full))
        self._refused[refused.rule] = (reason, count + ways * below, example)

    def _example(self, depth: int, full: Key) -> Candidate:
        """A candidate with the prefix that was refused and defaults below it."""
        if not depth:
            return self.space.default()
        values = {self.order[depth - 1].name: full[-1]}
        key = full[:-1]
        for above in range(depth - 1, 0, -1):
            key, value = self._layers[above].parents[key]
            values[self.order[above - 1].name] = value
        return self.space.canonical({n: v for n, v in values.items() if v is not ABSENT})  # type: ignore[misc]

    def _too_wide(self, depth: int) -> None:
        widest = sorted(self.order[: depth + 1], key=lambda knob: -len(knob.choices))[:3]
        names = ", ".join(f"{knob.name} ({len(knob.choices)})" for knob in widest)
        message = f"space {self.space.name!r} couples too many choices (over {NODE_LIMIT:,} states)"
        raise InputError([Fault(message)], f"narrow space.choices; the knobs with most choices: {names}")


def _same(value: object, other: object) -> bool:
    """True is not 1."""
    return type(value) is type(other) and value == other


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


class _Step:
    """Deciding one knob: from the frontier before it (`names`) to the one after it.

    A "full" key is the frontier's values and the knob's own. Rules and conditions are asked once for each combination
    of the values they read.
    """

    def __init__(
        self, space: SearchSpace, knob: Knob | None, names: tuple[str, ...], after: tuple[str, ...], rules: list[Rule]
    ) -> None:
        self._space, self._knob, self._rules = space, knob, rules
        self._names = (*names, knob.name) if knob else names
        place = {name: index for index, name in enumerate(self._names)}
        self._kept = tuple(place[name] for name in after)
        self._read = tuple(sorted(place[name] for name in place if any(name in rule.reads for rule in rules)))
        self._when = tuple(place[condition.knob] for condition in (knob.when if knob else ()))
        self._answers: dict[Key, Verdict | None] = {}

    def values(self, key: Key) -> tuple[object, ...]:
        """The knob's choices after `key`; ABSENT alone where it does not exist there."""
        assert self._knob is not None
        conditions = zip(self._knob.when, self._when, strict=True)
        active = all(
            key[at] is not ABSENT and (key[at] in condition.values) is not condition.negated
            for condition, at in conditions
        )
        return self._knob.choices if active else (ABSENT,)

    def project(self, full: Key) -> Key:
        return tuple([full[at] for at in self._kept])

    def decided(self, full: Key) -> dict[str, KnobValue]:
        """The frontier as knobs; inactive ones left out."""
        pairs = zip(self._names, full, strict=True)
        return {name: value for name, value in pairs if value is not ABSENT}  # type: ignore[misc]

    def refusal(self, full: Key, facts: Case) -> Verdict | None:
        """The first refusal among the rules that can speak once this knob is decided."""
        if not self._rules:
            return None
        asked = tuple([None if full[at] is ABSENT else full[at] for at in self._read])
        if asked not in self._answers:
            self._answers[asked] = self._ask(full, facts)
        return self._answers[asked]

    def _ask(self, full: Key, facts: Case) -> Verdict | None:
        candidate = self._space.candidate(self.decided(full))
        case = Case(
            candidate.knobs, facts.model, facts.cluster, facts.training, candidate.env, facts.stack, facts.launchers
        )
        for rule in self._rules:
            if reason := rule.refusal(case):
                return Verdict(rule.id, reason, rule.level)
        return None


def _steps(space: SearchSpace, order: Sequence[Knob], rules: Sequence[Rule]) -> list[_Step]:
    """One for each depth; the first decides nothing and asks the rules that read no knob of the space."""
    depth_of = {knob.name: depth for depth, knob in enumerate(order, start=1)}
    ready: list[list[Rule]] = [[] for _ in range(len(order) + 1)]
    needed_until = dict.fromkeys(depth_of, 0)  # the last depth at which a knob is looked at
    for rule in rules:
        at = max((depth_of[name] for name in rule.reads if name in depth_of), default=0)
        ready[at].append(rule)
        for name in rule.reads & depth_of.keys():
            needed_until[name] = max(needed_until[name], at)
    for knob in order:
        for condition in knob.when:
            needed_until[condition.knob] = max(needed_until[condition.knob], depth_of[knob.name])
    frontiers = [
        tuple(knob.name for knob in order[:depth] if needed_until[knob.name] > depth) for depth in range(len(order) + 1)
    ]
    first = _Step(space, None, (), (), ready[0])
    return [first] + [
        _Step(space, knob, frontiers[depth - 1], frontiers[depth], ready[depth])
        for depth, knob in enumerate(order, start=1)
    ]
