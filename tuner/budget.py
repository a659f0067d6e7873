"""Whether a search has used up its budget. Pure: of what its records say and of how long it took."""

from collections.abc import Sequence

from search_spaces.shapes import ClusterShape
from tracking.record import TrialRecord
from tuner.sweep_spec import Budget


def spent(budget: Budget, cluster: ClusterShape, records: Sequence[TrialRecord], running: int, took_s: float) -> str:
    """The limit that is reached, in words, or "". `running`: trials under way; `took_s`: seconds of search."""
    searched = sum(record.purpose != "verify" for record in records)
    hours = sum(record.wall_s for record in records) * cluster.workers_per_trial / 3600
    if searched + running >= budget.trials:
        return f"budget: {budget.trials} trials"
    if budget.wall_time_s is not None and took_s > budget.wall_time_s:
        return f"budget: {budget.wall_time_s:g} s of wall time"
    if budget.worker_hours is not None and hours > budget.worker_hours:
        return f"budget: {budget.worker_hours:g} worker-hours"
    return ""


def searched_s(records: Sequence[TrialRecord], cluster: ClusterShape) -> float:
    """Seconds of search as a resumed sweep counts them: what its trials took on the slots they had."""
    return sum(record.wall_s for record in records if record.purpose != "verify") / cluster.slots
