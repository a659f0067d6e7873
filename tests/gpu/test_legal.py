"""What the GPU tests run is what a sweep on such a GPU would run: its rules and Megatron's configuration accept it.

Needs no GPU: the presence of Transformer Engine's kernels is pretended.
"""

from collections.abc import Iterator

import pytest

from search_spaces.rules import Case, case_of
from search_spaces.screen import verdict
from search_spaces.shapes import StackVersions
from tests.gpu.test_guard import HONEST
from tests.gpu.trials import (
    FAMILIES,
    NEEDS_BLACKWELL,
    ONE_GPU,
    REFUSED,
    SENT,
    TRAINING,
    TWO_GPUS,
    Trial,
    candidate_of,
    cluster,
)
from tests.search_spaces.oracle_worker import Judge, worker

STACK = StackVersions(
    megatron_core="0.19.2", torch="2.11.0+cu130", transformer_engine="2.20.2", nccl="2.28.9", cuda="13.0", apex="0.1"
)
ARCH = "H200 sm_90"
ALL = ONE_GPU | TWO_GPUS | {f"guard {name}": Trial(knobs, env=env) for name, (knobs, env) in HONEST.items()}


def case(trial: Trial) -> Case:
    model = FAMILIES[trial.family].model
    return case_of(candidate_of(trial), model, cluster(trial.ranks, ARCH), TRAINING, STACK)


@pytest.fixture(scope="module")
def configurations() -> Iterator[Judge]:
    with worker() as judge:
        yield judge


@pytest.mark.parametrize("name", ALL)
def test_a_setting_is_legal(configurations: Judge, name: str) -> None:
    assert verdict(case(ALL[name])) is None
    assert configurations(case(ALL[name])) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_seen_to_go_wrong_is_not(name: str) -> None:
    rule, trial = REFUSED[name]
    refused = verdict(case(trial))
    assert refused is not None
    assert refused.rule == rule


@pytest.mark.parametrize("name", NEEDS_BLACKWELL)
def test_a_recipe_of_a_newer_gpu_is_not(name: str) -> None:
    refused = verdict(case(Trial(SENT | NEEDS_BLACKWELL[name])))
    assert refused is not None
    assert "needs compute capability 10" in refused.reason
