"""The space before any worker starts: which points are legal, and for the others how many each rule refuses."""

from collections.abc import Sequence

from search_spaces.legal import LegalSpace, Refusal
from search_spaces.rules import Case, Rule, Verdict, rules_for
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions, TrainingShape
from search_spaces.space import SearchSpace

__all__ = ["LegalSpace", "Refusal", "screen", "verdict"]


def verdict(case: Case, rules: Sequence[Rule] | None = None) -> Verdict | None:
    """The first rule that refuses one explicit case, with its reason; None where it is legal.

    `rules` None: those of the case's launchers and release, this project's worker included.
    """
    for rule in _rules_of(case) if rules is None else rules:
        if reason := rule.refusal(case):
            return Verdict(rule.id, reason, rule.level)
    return None


def screen(
    space: SearchSpace,
    model: ModelShape,
    cluster: ClusterShape,
    training: TrainingShape,
    stack: StackVersions | None = None,
    rules: Sequence[Rule] | None = None,
) -> LegalSpace:
    """The legal points of a space, and what the rules (None: all that concern the target) refuse of it."""
    facts = Case({}, model, cluster, training, {}, stack)
    return LegalSpace(space, _rules_of(facts) if rules is None else rules, facts)


def _rules_of(case: Case) -> tuple[Rule, ...]:
    return rules_for(case.launchers, case.stack.megatron_core if case.stack else None)
