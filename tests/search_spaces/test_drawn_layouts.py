"""On drawn layouts our rules say what a trial meets first: groups, configuration, stages, model, batch, schedule, step.

The first step that refuses is named by one of its rules, and no rule of a step that the trial came past refuses it.
"""

from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from search_spaces.rules import Case
from tests.search_spaces import oracle_parallelism as real
from tests.search_spaces.drawn import changed
from tests.search_spaces.drawn_layouts import layouts
from tests.search_spaces.examples import ORACLE
from tests.search_spaces.oracle_trial import STEPS, first_refusal
from tests.search_spaces.test_drawn_cases import CONFIG_RULES, RULES, refusing

DRAWN = 250


def judged_by(*judges: object) -> set[str]:
    return {name for name, judge in ORACLE.items() if judge in judges}


# Rank 0 builds its own stage: a layer that only other ranks have is built at the first step.
_LAYERS = judged_by(real.layer_refusal, real.dense_mlp_refusal)
# A rule of two steps may be met at either: what the configuration overlooks of a split, the stages show.
RULES_OF = {
    "groups": judged_by(real.groups_refusal),
    "config": {rule.id for rule in CONFIG_RULES} | judged_by(real.stages_refusal) | {"RUN-13"},
    "stages": judged_by(real.stages_refusal) | {"PAR-10", "PAR-14"},
    "model": _LAYERS,
    "batch": judged_by(real.batch_refusal),
    "schedule": judged_by(real.schedule_refusal),
    "first step": judged_by(real.forward_refusal, real.scatter_refusal) | _LAYERS | {"PAR-18"},
}


def test_rules_say_what_a_trial_meets_first() -> None:
    assert [*RULES_OF] == ["groups", "config", *STEPS]
    met = Counter[str]()

    @seed(2)
    @settings(
        max_examples=DRAWN, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(layouts())
    def agree(drawn: Case) -> None:
        step, why = first_refusal(drawn) or ("", "")
        met[step] += 1
        ours, steps = refusing(RULES, drawn), list(RULES_OF)
        past = steps[: steps.index(step)] if step else steps
        to_come = set().union(*(RULES_OF[later] for later in steps[len(past) :]))
        for name in past:
            wrong = ours & RULES_OF[name] - to_come
            assert not wrong, f"{wrong} refuse what came past {name}: {changed(drawn)}"
        assert not step or ours & RULES_OF[step], f"only the real {step} refuses {changed(drawn)}: {why}"

    agree()
    assert met[""] > DRAWN // 20, f"too few begin to compute: {met}"
    assert met.keys() == {"", *RULES_OF}, f"a step was never the first to refuse: {met}"
