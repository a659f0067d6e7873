"""`--isolation job`: one plain Ray Train job a trial, with the same outcomes as a slot gives."""

from collections.abc import Iterator

import pytest
from ray.util import placement_group_table

from search_spaces.shapes import ClusterShape
from tests.train_worker.test_gang import job
from train_worker.outcome import Diverged, Hung, Measured
from tuner.launch import cluster as joining
from tuner.launch import trials


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with joining.joined(None, ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=2)):
        yield


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    assert [group for group in placement_group_table().values() if group["state"] != "REMOVED"] == []


@pytest.mark.timeout(300)
def test_a_job_measures() -> None:
    outcome, _ = trials.run_job(job("measured"))
    assert isinstance(outcome, Measured)
    assert len(outcome.steps) == 2
    assert outcome.phases.fixed_s > 0


@pytest.mark.timeout(300)
def test_a_job_that_diverges_says_so_although_both_ranks_raise() -> None:
    assert isinstance(trials.run_job(job("diverged", learning_rate=1e18, steps=8))[0], Diverged)


@pytest.mark.timeout(300)
def test_a_job_past_its_deadline_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "START_ALLOWANCE_S", 5.0)
    outcome, _ = trials.run_job(job("hung", steps=1_000_000, limit_s=5))
    assert isinstance(outcome, Hung)
