"""Every rule that a real object of megatron-core stands behind matters: without it what that refuses is accepted.

The rule's own breaking example is refused by it alone, so that leaving it out would accept the example. Where others
refuse it too, they are listed: a rule that only repeats them says more, or is to be deleted.
"""

import pytest

from search_spaces.rules import ALL_RULES, STACK_RULES, Case, rules_for
from tests.search_spaces.examples import EXAMPLES
from tests.search_spaces.oracle import Unrun
from tests.search_spaces.test_against_megatron import ENFORCED, oracle

JUDGED = {
    name: judge
    for name, rule in ENFORCED.items()
    if not isinstance(judge := oracle(rule), Unrun) and rule.level != "runtime risk"  # those refuse nothing
}
REPEATING = {
    "OVL-05": ({"OVL-06", "OVL-07"}, "full recompute has a method and a number of layers, and each is refused"),
    "RCP-14": ({"OFF-01"}, "OFF-01 tells all that layer-wise offload cannot be with"),
    "CGR-11": ({"CGR-12"}, "the configuration sees half of what CGR-12 says fails at the first step"),
}


def refusing(case: Case) -> set[str]:
    """All rules of the stack, of the example's release and launchers, that refuse a case."""
    rules = rules_for(case.launchers, case.stack.megatron_core if case.stack else None, worker=False)
    return {rule.id for rule in rules if rule.refusal(case)}


OF_THE_WORKER = {rule.id for rule in ALL_RULES} - {rule.id for rule in STACK_RULES}


@pytest.mark.parametrize("name", JUDGED)
def test_without_the_rule_its_breaking_example_would_be_accepted(name: str) -> None:
    breaking = EXAMPLES[name][0]
    judge = JUDGED[name]
    assert callable(judge)
    assert judge(breaking) is not None, "the real object accepts it"
    others, _ = REPEATING.get(name, (set[str](), ""))
    assert refusing(breaking) == {name} - OF_THE_WORKER | others


def test_there_is_a_rule_with_an_oracle_to_ask() -> None:
    assert len(JUDGED) > 100
    assert REPEATING.keys() <= JUDGED.keys()
