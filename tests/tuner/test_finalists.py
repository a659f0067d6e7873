"""Which configurations of a search are verified."""

from pathlib import Path

import pytest

from tests.end_to_end.sweeps import write_sweep
from tests.tracking.sample import candidate, finished, measured
from tracking.record import TrialRecord
from train_worker.outcome import Crashed, Diverged, OutOfMemory
from tuner.finalists import finalists, most_finalists
from tuner.objective import Objective
from tuner.sweep import load_sweep

DEFAULT = candidate()
NO_ROOM = OutOfMemory(where="device", phase="measure", detail="")


def trial(number: int, step_time_s: float, size: int | None = None) -> TrialRecord:
    """Trial `number` of a configuration with that micro-batch (its number where None)."""
    size = number if size is None else size
    ran = measured(step_time_s).model_copy(update={"effective": {"micro_batch_size": size}})
    return finished(number, candidate(micro_batch_size=number), ran)


def baseline(step_time_s: float) -> TrialRecord:
    return finished(0, DEFAULT, measured(step_time_s), "baseline")


def chosen(records: list[TrialRecord], most: int = 2, objective: Objective | None = None) -> list[int]:
    """Trial numbers."""
    return [record.number for record in finalists(records, DEFAULT.id, objective or Objective(), most)]


def test_the_best_that_beat_the_default_are_taken_the_best_first() -> None:
    records = [baseline(1.0), trial(2, 0.8), trial(3, 0.7), trial(4, 0.9), trial(5, 1.1)]
    assert chosen(records, 1) == [3]
    assert chosen(records, 2) == [3, 2]
    assert chosen(records, 9) == [3, 2, 4]
    assert chosen([*records, finished(6, candidate(micro_batch_size=6), NO_ROOM)], 9) == [3, 2, 4]


def test_more_tokens_a_second_are_better() -> None:
    records = [baseline(1.0), trial(2, 0.8), trial(3, 0.7), trial(4, 1.2)]
    assert chosen(records, 2, Objective(metric="tokens_per_s", direction="maximize")) == [3, 2]


def test_a_default_that_nothing_beat_stands_alone() -> None:
    assert chosen([baseline(1.0), trial(2, 1.0), trial(3, 2.0)], 3) == [0]
    assert chosen([finished(0, DEFAULT, NO_ROOM, "baseline")]) == []


def test_a_default_that_was_not_measured_leaves_one() -> None:
    assert chosen([finished(0, DEFAULT, NO_ROOM, "baseline"), trial(2, 0.8), trial(3, 0.7)]) == [3]


def test_no_two_finalists_ran_the_same() -> None:
    assert chosen([baseline(1.0), trial(2, 0.8, size=7), trial(3, 0.7, size=7), trial(4, 0.9)]) == [3, 4]


def test_a_trial_that_was_given_up_or_strayed_is_no_finalist() -> None:
    slow = trial(2, 0.9)
    slow = slow.model_copy(update={"outcome": slow.outcome.model_copy(update={"given_up": True})})
    strayed = finished(3, candidate(micro_batch_size=3), Diverged(step=1, reason="loss"))
    assert chosen([baseline(1.0), slow, strayed, trial(4, 0.4)]) == [4]


def test_whose_repeat_failed_before_the_budget_grew_makes_room_for_the_next() -> None:
    records = [baseline(1.0), trial(2, 0.6), trial(3, 0.7), trial(4, 0.8)]
    failed = finished(5, records[1].candidate, NO_ROOM, "verify")
    lost = finished(5, records[1].candidate, Crashed(phase="build", detail="node", infrastructure=True), "verify")
    assert chosen([*records, failed]) == [2, 3], "of the verification under way: it stays one"
    assert chosen([*records, failed, trial(6, 2.0)]) == [3, 4]
    assert chosen([*records, lost, trial(6, 2.0)]) == [2, 3]
    assert chosen([*records[:2], failed, trial(6, 2.0)]) == [2], "one is verified, as there is no other"


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ("rounds: 2", 2),
        ("rounds: 2, finalists: 3", 3),
        ("rounds: 0, finalists: 3", 1),
        ("rounds: 2, finalists: 3}\nobjective: {metric: peak_memory_bytes", 1),
    ],
)
def test_how_many_a_sweep_file_asks_for(tmp_path: Path, change: str, most: int) -> None:
    path = write_sweep(tmp_path, 3)
    path.write_text(path.read_text().replace("{rounds: 2", "{" + change))
    assert most_finalists(load_sweep(path).spec) == most
