"""What our rules accept, the real objects of megatron-core accept; what these refuse, we refuse."""

import random

import pytest

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.named_spaces import LAPTOP, MOE_CORE
from search_spaces.rules import ALL_RULES, STACK_RULES, case_of
from search_spaces.rules.rule import Rule
from search_spaces.screen import screen, verdict
from search_spaces.shapes import ClusterShape, TrainingShape
from search_spaces.space import SearchSpace
from tests.search_spaces.cases import LAPTOP_RANKS, STACK, TINY, TRAINING, gpus
from tests.search_spaces.examples import EXAMPLES, ORACLE
from tests.search_spaces.oracle import CONFIG_FILES, Oracle, Unrun, config_refusal

ENFORCED = {rule.id: rule for rule in ALL_RULES if rule.source.startswith("core/")}


def oracle(rule: Rule) -> Oracle | None:
    """What judges a rule: named in its area's table, else the configuration where its source is there."""
    return ORACLE.get(rule.id) or (config_refusal if rule.source.startswith(CONFIG_FILES) else None)


@pytest.mark.parametrize("name", ENFORCED)
def test_every_rule_that_megatron_enforces_has_an_oracle_that_agrees(name: str) -> None:
    judge = oracle(ENFORCED[name])
    assert judge is not None, f"{name} quotes {ENFORCED[name].source}: name its oracle"
    breaking, satisfying = EXAMPLES[name]
    if isinstance(judge, Unrun):
        assert judge.why
        return
    assert judge(breaking) is not None, "the real stack accepts what we refuse"
    assert judge(satisfying) is None, f"the real stack refuses what we accept: {judge(satisfying)}"


def test_every_legal_point_of_the_laptop_builds_a_real_configuration() -> None:
    accepted = screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING)
    refused = {c.id: why for c in accepted if (why := config_refusal(case_of(c, TINY, LAPTOP_RANKS, TRAINING)))}
    assert not refused


def test_legal_points_of_a_gpu_space_build_real_configurations() -> None:
    training = TrainingShape(sequence_length=128, global_batch_size=64)
    legal = screen(MOE_CORE, TINY, gpus(2), training, rules=STACK_RULES)
    source = random.Random(1)
    sample = [legal.draw(source) for _ in range(500)]
    refused = {c.id: why for c in sample if (why := config_refusal(case_of(c, TINY, gpus(2), training)))}
    assert not refused


def drawn(space: SearchSpace, source: random.Random) -> Candidate:
    decided: dict[str, KnobValue] = {}
    for knob in space.knobs:
        if space.active(decided, knob):
            decided[knob.name] = source.choice(knob.choices)
    return space.candidate(decided)


@pytest.mark.parametrize(
    ("space", "cluster", "training"),
    [
        (LAPTOP, LAPTOP_RANKS, TRAINING),
        (MOE_CORE, gpus(8), TrainingShape(sequence_length=128, global_batch_size=64)),
        (MOE_CORE, gpus(8, "B200 sm_100"), TrainingShape(sequence_length=128, global_batch_size=64)),
        (MOE_CORE, gpus(2), TrainingShape(sequence_length=128, global_batch_size=64, params_dtype="fp32")),
    ],
    ids=["laptop", "h200", "b200", "h200-fp32"],
)
def test_what_the_real_configuration_refuses_is_refused(
    space: SearchSpace, cluster: ClusterShape, training: TrainingShape
) -> None:
    source, refused = random.Random(1), 0
    for _ in range(600):
        case = case_of(drawn(space, source), TINY, cluster, training, STACK)
        why = config_refusal(case)
        refused += why is not None
        assert why is None or verdict(case, STACK_RULES), f"{dict(case.knobs)}: {why}"
    assert refused > 100, "the draw must reach what is refused"
