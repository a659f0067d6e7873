"""When garbage is collected and which cores are used, asked of the process itself."""

import gc
import os
from collections.abc import Iterator

import pytest

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import ClusterShape
from train_worker.host import HostSettings, share

TWO = ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=2)


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection, automatic ones too."""
    found: list[int] = []

    def note(phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            found.append(facts["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def settings(rank: int = 0, cluster: ClusterShape = TWO, **knobs: KnobValue) -> HostSettings:
    return HostSettings(Candidate(knobs=knobs), cluster, rank)


def test_garbage_is_collected_between_steps_and_only_there(collections: list[int]) -> None:
    with settings(manual_gc=True, manual_gc_interval=2) as host:
        assert host.effective()["manual_gc"] is True
        assert collections == [2]
        rings: list[list[object]] = [[] for _ in range(5000)]  # more than the automatic threshold
        for ring in rings:
            ring.append(ring)
        for step in range(1, 6):
            host.after_step(step)
    assert collections == [2, 2, 2]
    assert gc.isenabled()


@pytest.mark.parametrize("interval", [None, 0])
def test_without_an_interval_nothing_is_collected(collections: list[int], interval: int | None) -> None:
    with settings(manual_gc=True, manual_gc_interval=interval) as host:
        host.after_step(100)
    assert collections == [2]


def test_left_alone_the_collector_stays_as_it_is() -> None:
    with settings(manual_gc=False, manual_gc_interval=5) as host:
        found = host.effective()
    assert found == {"manual_gc": False, "manual_gc_interval": None, "cpu_affinity": None}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_a_node_share_its_cores_and_give_them_back() -> None:
    before = os.sched_getaffinity(0)
    seen = []
    for rank in (0, 1):
        with settings(rank, cpu_affinity="exclusive") as host:
            seen.append(os.sched_getaffinity(0))
            assert host.effective()["cpu_affinity"] == "exclusive"
        assert os.sched_getaffinity(0) == before
    assert len(seen[0]) == len(seen[1]) == len(before) // 2
    assert not seen[0] & seen[1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_that_somebody_else_changed_are_told() -> None:
    before = os.sched_getaffinity(0)
    with settings() as host:
        os.sched_setaffinity(0, {min(before)})
        try:
            assert host.effective()["cpu_affinity"] == f"cores {min(before)}"
        finally:
            os.sched_setaffinity(0, before)


def test_shares_are_equal_and_what_is_left_over_is_nobodys() -> None:
    assert share({0, 1, 2, 3, 8, 9, 10}, 0, 3) == {0, 1}
    assert share({0, 1, 2, 3, 8, 9, 10}, 2, 3) == {8, 9}


def test_less_cores_than_ranks_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="2 cores are allowed here, for 4 ranks"):
        share({0, 1}, 3, 4)
