"""Which configurations of a search are verified. Pure.

More than one, since single trials differ by several percent: the best of many is often one that was lucky once.
"""

from collections.abc import Sequence

from tracking.record import TrialRecord
from train_worker.outcome import Measured
from tuner.objective import Objective, score
from tuner.ranking import failed_again
from tuner.sweep_spec import SweepSpec


def most_finalists(spec: SweepSpec) -> int:
    """How many a sweep verifies at most: one where memory is the objective, which is counted and not timed.

    One too where no rounds are run, and it is named without proof.
    """
    timed = spec.verify.rounds > 0 and spec.objective.metric != "peak_memory_bytes"
    return spec.verify.finalists if timed else 1


def finalists(records: Sequence[TrialRecord], default_id: str, objective: Objective, most: int) -> list[TrialRecord]:
    """The trials of the search that beat the default, the best first, at most `most`; no two ran the same.

    Left out are those that were given up as slow, and those whose repeats failed after an earlier part of the search.
    Where nothing is left, or nothing beat the default: the best trial of all. Where the default was not measured, that
    one alone too: no other could be told to be better by it. Empty where no trial was measured.
    """
    searched = [record for record in records if record.purpose != "verify"]
    ranked = _ranked(searched, objective)
    at = next((place for place, record in enumerate(ranked) if record.candidate.id == default_id), None)
    better, most = (ranked, 1) if at is None else (ranked[:at], most)
    last = max((record.number for record in searched), default=-1)
    # Those since then are of the verification under way: one of its finalists stays one.
    earlier = [record for record in records if record.number < last]
    taken: list[TrialRecord] = []
    for record in better:
        out = _given_up(record) or failed_again(record.candidate.id, earlier) is not None
        if not out and not any(_same_run(record, each) for each in taken):
            taken.append(record)
    return taken[:most] or ranked[:1]


def _ranked(searched: Sequence[TrialRecord], objective: Objective) -> list[TrialRecord]:
    """The measured ones, the best first; the earliest on equal scores."""
    sign = 1 if objective.direction == "minimize" else -1
    scored = [(value, record) for record in searched if (value := score(record.outcome, objective)) is not None]
    return [record for _, record in sorted(scored, key=lambda each: (sign * each[0], each[1].number))]


def _same_run(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether the same was in force in both: a size that Megatron chooses may be asked for by its number too."""
    if not isinstance(one.outcome, Measured) or not isinstance(other.outcome, Measured):
        return False
    return bool(one.outcome.effective) and one.outcome.effective == other.outcome.effective


def _given_up(record: TrialRecord) -> bool:
    return isinstance(record.outcome, Measured) and record.outcome.given_up
