"""The legal points of a space on one target, as a decision diagram: counted, drawn and walked without listing them.

Knobs are decided one by one. Two prefixes that no later rule or condition can tell apart have the same completions, so
they are one node: the diagram is as wide as the rules couple knobs, not as large as the space. Rules are asked lazily
(`lazy_rules`): as soon as what is decided settles the answer. A walk offers only choices that a legal point goes on
from, so what is drawn is legal by construction.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.lazy_rules import LazyRules, Node, TooManyQuestions, known_values
from search_spaces.rules import Case, Rule, Verdict
from search_spaces.shapes import Noun
from search_spaces.space import ABSENT, Knob, LeafCounter, SearchSpace
from search_spaces.walk_order import walk_order

EDGE_LIMIT = 600_000  # some 10 s on one core; `moe-full` at 512 GPUs has 140,000, with every refused one
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
    node: Node


@dataclass
class _Layer:
    """The nodes after `depth` knobs. `parents` holds one way to reach each, for examples."""

    edges: dict[Node, list[_Edge]] = field(default_factory=dict)
    legal: dict[Node, int] = field(default_factory=dict)
    ways: dict[Node, int] = field(default_factory=dict)
    parents: dict[Node, tuple[Node, object]] = field(default_factory=dict)


class LegalSpace:
    """The points of `space` that `rules` accept for the target in `facts` (whose knobs are not looked at).

    `total` points, of which `count` are legal; total == count + the counts of `refusals`. Raises InputError where the
    rules couple so many choices that the diagram would take minutes.
    """

    def __init__(self, space: SearchSpace, rules: Sequence[Rule], facts: Case) -> None:
        self.space, self.rules, self.facts = space, tuple(rules), facts
        self.order = walk_order(space, rules)
        self._rules = LazyRules(self.order, rules, facts)
        self._root = Node((), ())
        self._layers = [_Layer() for _ in range(len(self.order) + 1)]
        self._refused: dict[str, tuple[str, int, Candidate]] = {}
        self._leaves = LeafCounter(space, self.order)
        self._edges = 0
        self._grow()
        self._count()
        self.total = space.size()
        self.count = self._layers[0].legal.get(self._root, 0)

    @property
    def nodes(self) -> int:
        """How large the diagram is."""
        return sum(len(layer.ways) for layer in self._layers)

    @property
    def questions(self) -> int:
        """How often rules were asked to make it."""
        return self._rules.questions

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
        node = self._root
        for depth, knob in enumerate(self.order):
            edges = self._live(depth, node)
            edge = edges[0]
            if edge.value is not ABSENT:
                values = tuple(each.value for each in edges)
                edge = edges[values.index(choose(knob, values))]  # type: ignore[arg-type]  # ABSENT stands alone
                decided[knob.name] = edge.value  # type: ignore[assignment]
            node = edge.node
        return self.space.candidate(decided)

    def draw(self, source: random.Random) -> Candidate:
        """A legal candidate: each knob uniform among the choices still open to it."""
        return self.walk(lambda _knob, live: live[0] if len(live) == 1 else source.choice(live))

    def __contains__(self, candidate: object) -> bool:
        """Whether a canonical candidate of the space is legal."""
        if not isinstance(candidate, Candidate) or not self.count:
            return False
        values = self.space.values(candidate)
        node = self._root
        for depth, knob in enumerate(self.order):
            wanted = values.get(knob.name, ABSENT)
            found = [edge for edge in self._live(depth, node) if _same(edge.value, wanted)]
            if not found:
                return False
            node = found[0].node
        return True

    def __iter__(self) -> Iterator[Candidate]:
        """Every legal candidate, each once; the last knob of `order` changes fastest, its default first."""
        return self._below(0, self._root, {}) if self.count else iter(())

    def _below(self, depth: int, node: Node, chosen: dict[str, KnobValue]) -> Iterator[Candidate]:
        if depth == len(self.order):
            yield self.space.candidate(chosen)
            return
        knob = self.order[depth]
        for edge in sorted(self._live(depth, node), key=lambda edge: not _same(edge.value, knob.default)):
            more = chosen if edge.value is ABSENT else {**chosen, knob.name: edge.value}
            yield from self._below(depth + 1, edge.node, more)  # type: ignore[arg-type]

    def choices_alive(self) -> dict[str, tuple[KnobValue, ...]]:
        """By knob, in the order of the space: the choices that some legal point makes; knobs never active left out."""
        alive: dict[str, set[object]] = {}
        for depth, knob in enumerate(self.order):
            layer = self._layers[depth]
            alive[knob.name] = {e.value for node in layer.edges for e in self._live(depth, node)}
        found = {k.name: tuple(choice for choice in k.choices if choice in alive[k.name]) for k in self.space.knobs}
        return {name: choices for name, choices in found.items() if choices}

    def _live(self, depth: int, node: Node) -> list[_Edge]:
        """The edges of a node that lead to legal points."""
        legal = self._layers[depth + 1].legal
        return [edge for edge in self._layers[depth].edges[node] if legal[edge.node]]

    def _grow(self) -> None:
        """Layer by layer from the root: nodes, edges, and what is refused on the way."""
        root, refused = self._rules.start()
        if refused:
            self._refuse(refused, 0, (), 1)
            return
        self._root = root
        self._layers[0].ways[root] = 1
        for depth, knob in enumerate(self.order):
            for node, ways in self._layers[depth].ways.items():
                try:
                    self._branch(depth, knob, node, ways)
                except TooManyQuestions:
                    self._too_wide(depth, f"{self.questions - 1:,} questions to rules")
                if self._edges > EDGE_LIMIT:
                    self._too_wide(depth, f"{EDGE_LIMIT:,} decisions to judge")

    def _branch(self, depth: int, knob: Knob, node: Node, ways: int) -> None:
        """The edges of one node, and what is refused on them."""
        after = self._layers[depth + 1]
        self._layers[depth].edges[node] = edges = []
        for value in self._values(depth, knob, node):
            self._edges += 1
            child, refused = self._rules.decide(depth, node, value)
            if refused:
                self._refuse(refused, depth + 1, (node, value), ways)
                continue
            edges.append(_Edge(value, child))
            after.ways[child] = after.ways.get(child, 0) + ways
            after.parents.setdefault(child, (node, value))

    def _count(self) -> None:
        """From the leaves back: how many legal points lie below each node."""
        self._layers[-1].legal = dict.fromkeys(self._layers[-1].ways, 1)
        for layer, after in zip(reversed(self._layers[:-1]), reversed(self._layers[1:]), strict=True):
            legal = after.legal
            layer.legal = {node: sum(legal[edge.node] for edge in layer.edges[node]) for node in layer.ways}

    def _values(self, depth: int, knob: Knob, node: Node) -> tuple[object, ...]:
        """The knob's choices at a node; ABSENT alone where it does not exist there."""
        if not knob.when:
            return knob.choices
        return knob.choices if self.space.active(self._conditions(depth, node), knob) else (ABSENT,)

    def _conditions(self, depth: int, node: Node) -> dict[str, KnobValue]:
        return known_values(self.order, self._rules.conditions(depth, node))

    def _refuse(self, refused: Verdict, depth: int, path: tuple[()] | tuple[Node, object], ways: int) -> None:
        """`path`: the node before the last decision, and that decision; () where none was made."""
        known = self._conditions(depth - 1, path[0]) if path else {}
        if path and path[1] is not ABSENT:
            known[self.order[depth - 1].name] = path[1]  # type: ignore[assignment]
        below = self._leaves.count(depth, known)
        reason, count, example = self._refused.get(refused.rule) or self._first(refused, depth, path)
        self._refused[refused.rule] = (reason, count + ways * below, example)

    def _first(self, refused: Verdict, depth: int, path: tuple[()] | tuple[Node, object]) -> tuple[str, int, Candidate]:
        """A rule's first refusal: its words for the example (those at hand may be of another case), no points yet."""
        example = self._example(depth, path)
        case = replace(self.facts, knobs=example.knobs, env=example.env)
        words = (rule.refusal(case) for rule in self.rules if rule.id == refused.rule)
        return next(filter(None, words), refused.reason), 0, example

    def _example(self, depth: int, path: tuple[()] | tuple[Node, object]) -> Candidate:
        """A candidate with the prefix that was refused and defaults below it."""
        values: dict[str, KnobValue] = {}
        while path:
            node, value = path
            depth -= 1
            if value is not ABSENT:
                values[self.order[depth].name] = value  # type: ignore[assignment]
            path = self._layers[depth].parents.get(node, ())
        return self.space.canonical(values)

    def _too_wide(self, depth: int, work: str) -> NoReturn:
        widest = sorted(self.order[: depth + 1], key=lambda knob: -len(knob.choices))[:3]
        names = ", ".join(f"{knob.name} ({len(knob.choices)})" for knob in widest)
        message = f"space {self.space.name!r} couples too many choices (over {work})"
        raise InputError([Fault(message)], f"narrow space.choices; the knobs with most choices: {names}")


def _same(value: object, other: object) -> bool:
    """True is not 1."""
    return type(value) is type(other) and value == other
