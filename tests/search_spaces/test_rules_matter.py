"""Every rule that a real configuration stands behind matters: without it something that Megatron refuses is accepted.

The rule's own breaking example is that something, where no other rule refuses it. Where one does, it is listed: a rule
that only repeats others is either a better message or to be deleted, and the list says which.
"""

from dataclasses import replace

import pytest

from search_spaces.rules import Case, Rule, rules_for
from tests.search_spaces.examples import EXAMPLES
from tests.search_spaces.test_against_megatron import ENFORCED, oracle
from tests.search_spaces.test_drawn_cases import CONFIGURATIONS

JUDGED = {name: judge for name, rule in ENFORCED.items() if (judge := oracle(rule)) in CONFIGURATIONS}


def others(name: str, case: Case) -> set[str]:
    """The other rules, of the example's release and launchers, that refuse a case."""
    release = case.stack.megatron_core if case.stack else None
    rules: tuple[Rule, ...] = rules_for(case.launchers, release)
    return {rule.id for rule in rules if rule.id != name and rule.refusal(case)}


if __name__ == "__main__":
    for name in JUDGED:
        print(name, sorted(others(name, EXAMPLES[name][0])))
