"""On drawn candidates our rules and Megatron's own configurations say the same, in both directions.

What is accepted is built from the candidate by the worker's own mapping. Exceptions are listed with their reasons, and
a listed one that no longer occurs fails.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from search_spaces.candidate import KnobValue
from search_spaces.full_space import MOE_FULL
from search_spaces.presets import load_model
from search_spaces.rules import Case, Rule, case_of, rules_for
from search_spaces.screen import screen
from search_spaces.shapes import TrainingShape
from tests.search_spaces import oracle, oracle_fsdp, oracle_fusions, oracle_overlap, oracle_precision
from tests.search_spaces.cases import SHORT, STACK, case, gpus
from tests.search_spaces.drawn import cases, changed
from tests.search_spaces.examples.clusters import MLA
from tests.search_spaces.oracle_worker import Judge, worker
from tests.search_spaces.test_against_megatron import oracle as oracle_of

DRAWN = 2500
CONFIGURATIONS = {
    oracle.config_refusal, oracle_fusions.config_refusal, oracle_overlap.torch_refusal,
    oracle_precision.optimizer_refusal, oracle_precision.data_parallel_refusal, oracle_fsdp.bucket_config_refusal,
    oracle_fsdp.optimizer_refusal,
}  # fmt: skip
RULES = rules_for(frozenset(), "0.19.2")
CONFIG_RULES = tuple(rule for rule in RULES if oracle_of(rule) in CONFIGURATIONS)


class Listed(NamedTuple):
    """Where rules and configuration differ on purpose: why, and a case that shows it."""

    why: str
    shown_by: Case


def on_gpus(**knobs: KnobValue) -> Case:
    return replace(case(gpus(8), stack={}), knobs={SHORT.get(name, name): value for name, value in knobs.items()})


# Megatron's words, and the rules that refuse the same though their oracle is another object than the configuration.
ELSEWHERE: dict[tuple[str, frozenset[str]], Listed] = {
    (
        r"number of middle layers|num_layers: \d+ after|number of layers on each pipeline rank",
        frozenset({"PAR-10", "PAR-12", "PAR-13"}),
    ): Listed(
        "layers counted with embedding and loss: get_num_layers_to_build checks the same of every split, groups of VPP",
        on_gpus(pp=2, account_for_loss_in_pipeline_split=True),
    ),
    (r"apply_rope_fusion for MLA only works with YARN", frozenset({"RUN-13"})): Listed(
        "rope_type is the worker's choice, no knob: a rule of the worker",
        case(gpus(8), stack={}, model=MLA, apply_rope_fusion=True),
    ),
}
# Rules of a configuration that refuse what it takes.
STRICTER: dict[str, Listed] = {
    "PAR-14": Listed(
        "more uneven ends than stages are accepted, and another number of layers is built than the model has",
        on_gpus(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
    ),
    "PRC-05": Listed(
        "the data-parallel configuration does not know whether there is FP8 at all",
        on_gpus(fp8_param_gather=True),
    ),
    "DSP-03": Listed(
        "moe_enable_deepep overwrites the backend ncclep without a word",
        on_gpus(dispatcher="flex", backend="ncclep", moe_enable_deepep=True),
    ),
}


def refusing(rules: tuple[Rule, ...], drawn: Case) -> set[str]:
    return {rule.id for rule in rules if rule.refusal(drawn)}


def elsewhere(why: str) -> frozenset[str]:
    """The rules that refuse what these words of Megatron are about; none where no exception is listed."""
    return next((rules for words, rules in ELSEWHERE if re.search(words, why)), frozenset())


@pytest.fixture(scope="module")
def configurations() -> Iterator[Judge]:
    with worker() as judge:
        yield judge


def test_rules_and_real_configurations_agree_on_drawn_candidates(configurations: Judge) -> None:
    seen, alone = Counter[str](), Counter[str]()

    @seed(1)
    @settings(
        max_examples=DRAWN, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases())
    def agree(drawn: Case) -> None:
        why, ours = configurations(drawn), refusing(CONFIG_RULES, drawn)
        seen["refused" if why else "accepted"] += 1
        if why and not ours:
            covering = elsewhere(why)
            assert covering, f"only the real configuration refuses {changed(drawn)}: {why}"
            assert refusing(RULES, drawn) & covering, f"{covering} accept {changed(drawn)}: {why}"
        elif ours and not why:
            assert ours <= STRICTER.keys(), f"only {ours} refuse {changed(drawn)}"
        alone.update(ours if len(ours) == 1 else ())

    agree()
    assert min(seen.values()) > DRAWN // 4, f"one side is hardly drawn: {seen}"
    assert len(alone) > 50, f"only {len(alone)} rules decided a case alone"


@pytest.mark.parametrize("listed", ELSEWHERE.values(), ids=["+".join(sorted(rules)) for _, rules in ELSEWHERE])
def test_a_listed_refusal_of_other_rules_still_occurs(configurations: Judge, listed: Listed) -> None:
    why = configurations(listed.shown_by)
    assert why is not None
    assert refusing(RULES, listed.shown_by) & elsewhere(why)
    assert not refusing(CONFIG_RULES, listed.shown_by)


@pytest.mark.parametrize("name", STRICTER)
def test_a_listed_stricter_rule_is_still_stricter(configurations: Judge, name: str) -> None:
    assert configurations(STRICTER[name].shown_by) is None
    assert name in refusing(CONFIG_RULES, STRICTER[name].shown_by)


@pytest.mark.parametrize(
    ("model", "ranks", "arch"),
    [("tiny-moe", 8, "H200 sm_90"), ("deepseek-v3", 64, "B200 sm_100"), ("gpt-oss-20b", 4, "A100 sm_80")],
)
def test_legal_points_break_no_rule_and_build(configurations: Judge, model: str, ranks: int, arch: str) -> None:
    training = TrainingShape(sequence_length=4096, global_batch_size=256)
    shape, cluster = load_model(model), gpus(ranks, arch)
    legal = screen(MOE_FULL, shape, cluster, training, STACK)
    source = random.Random(ranks)
    for _ in range(700):
        drawn = case_of(legal.draw(source), shape, cluster, training, STACK)
        assert not refusing(RULES, drawn), changed(drawn)
        assert configurations(drawn) is None, changed(drawn)
