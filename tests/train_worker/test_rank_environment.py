"""The environment of a real rank, forked from a real parent that inherited some variables."""

from collections.abc import Iterator

import pytest

from search_spaces.candidate import Candidate
from search_spaces.named_spaces import ENVIRONMENT_KNOBS
from search_spaces.shapes import ClusterShape
from tests.train_worker.megatron_trials import MODEL, SHORT
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from train_worker.outcome import Measured, Rejected

SEARCHED, OTHER = "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"
EXPANDABLE = "expandable_segments:True"


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGang]:
    """One rank. Whoever started its worker had set a variable that the sweep searches over, and another one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT_KNOBS:
            patch.delenv(name, raising=False)
        patch.setenv(SEARCHED, "max_split_size_mb:64")
        patch.setenv(OTHER, "0")
        with LocalGang(1, "cpu", tmp_path_factory.mktemp("gang")) as running:
            yield running


def job(name: str, searched: tuple[str, ...], **env: str) -> TrialJob:
    return TrialJob(
        trial_id=name,
        candidate=Candidate(knobs={"micro_batch_size": 2}, env=env),
        model=MODEL,
        cluster=ClusterShape(device="cpu", workers=1, workers_per_trial=1, workers_per_node=1),
        training=SHORT,
        seed=1,
        environment_knobs=searched,
        time_limit_s=60,
    )


def variables(outcome: object) -> dict[str, object]:
    assert isinstance(outcome, Measured), outcome
    return {name: value for name, value in outcome.effective.items() if name.isupper()}


def test_a_rank_starts_without_what_the_sweep_searches_over_and_keeps_the_rest(gang: LocalGang) -> None:
    assert variables(gang.run(job("default", (SEARCHED,)))) == {OTHER: "0"}


def test_a_sweep_that_does_not_search_over_it_runs_with_what_was_inherited(gang: LocalGang) -> None:
    assert variables(gang.run(job("untouched", ()))) == {SEARCHED: "max_split_size_mb:64", OTHER: "0"}


def test_a_candidate_that_sets_it_has_its_own_value(gang: LocalGang) -> None:
    outcome = gang.run(job("set", ("NVTE_DEBUG_LEVEL",), NVTE_DEBUG_LEVEL="0"))
    assert variables(outcome) == {"NVTE_DEBUG_LEVEL": "0", SEARCHED: "max_split_size_mb:64", OTHER: "0"}
    refused = gang.run(job("no-gpu", (SEARCHED,), **{SEARCHED: EXPANDABLE}))
    assert isinstance(refused, Rejected)
    assert refused.rule == "RUN-11"
