"""Which rules take most of a space away, which facts of the target they look at, and what lifting one would free."""

from typing import Any, cast

from pydantic import Field

from search_spaces.candidate import KnobValue
from search_spaces.legal import LegalSpace, Refusal
from search_spaces.rules import Case, Rule
from search_spaces.shapes import Noun

# A recount costs as much as the count; ten of them, on a larger diagram, over a second.
ALONE_NODES, ALONE_QUESTIONS = 3_000, 30_000


class Blocking(Noun):
    """One rule that refuses points.

    `alone`: how many points would be legal if this rule were lifted and no other (None: not worked out, the space
    couples too much). `facts`: what it looks at beside knobs, such as "cluster.gpu_arch".
    """

    rule: str
    reason: str
    count: int
    alone: int | None
    facts: dict[str, KnobValue] = Field(default_factory=dict)


def most_blocking(legal: LegalSpace, limit: int = 10) -> tuple[Blocking, ...]:
    """The `limit` rules that refuse most points, largest first."""
    by_id = {rule.id: rule for rule in legal.rules}
    return tuple(_blocking(legal, refusal, by_id[refusal.rule]) for refusal in legal.refusals[:limit])


def by_fact(legal: LegalSpace) -> dict[str, int]:
    """Points refused by rules that look at a fact, such as "cluster.workers_per_trial=2", largest first.

    A rule that looks at two facts counts under both.
    """
    by_id = {rule.id: rule for rule in legal.rules}
    counts: dict[str, int] = {}
    for refusal in legal.refusals:
        for name, value in facts_read(by_id[refusal.rule], _case(legal.facts, refusal)).items():
            key = f"{name}={value}"
            counts[key] = counts.get(key, 0) + refusal.count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _blocking(legal: LegalSpace, refusal: Refusal, rule: Rule) -> Blocking:
    alone = None
    if legal.nodes <= ALONE_NODES and legal.questions <= ALONE_QUESTIONS:
        others = [other for other in legal.rules if other.id != rule.id]
        alone = LegalSpace(legal.space, others, legal.facts).count - legal.count
    facts = facts_read(rule, _case(legal.facts, refusal))
    return Blocking(rule=refusal.rule, reason=refusal.reason, count=refusal.count, alone=alone, facts=facts)


def _case(facts: Case, refusal: Refusal) -> Case:
    example = refusal.example
    return Case(example.knobs, facts.model, facts.cluster, facts.training, example.env, facts.stack, facts.launchers)


def facts_read(rule: Rule, case: Case) -> dict[str, KnobValue]:
    """The facts of cluster, stack, training and model that a rule reads while it judges `case`, with their values."""
    read: dict[str, KnobValue] = {}
    parts = {
        name: _Watched(name, part, read)
        for name in ("cluster", "stack", "training", "model")
        if (part := getattr(case, name)) is not None
    }
    watched: dict[str, Any] = {"stack": case.stack, **parts}
    rule.refusal(Case(case.knobs, env=case.env, launchers=case.launchers, **watched))
    return read


class _Watched:
    """Stands for a noun and notes which of its fields are read."""

    def __init__(self, name: str, noun: Noun, read: dict[str, KnobValue]) -> None:
        self._name, self._noun, self._read = name, noun, read

    def __getattr__(self, field: str) -> Any:
        value = getattr(self._noun, field)
        if field in type(self._noun).model_fields:
            self._read[f"{self._name}.{field}"] = cast(KnobValue, value)
        return value
