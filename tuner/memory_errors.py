"""What the memory plan said of the trials of a run, beside what they took."""

from collections.abc import Sequence
from pathlib import Path

from search_spaces.errors import MoetuneError
from search_spaces.memory.calibration import Errors, Sample, errors, stored
from search_spaces.memory.plan import plan_of
from search_spaces.memory.rows import expandable
from search_spaces.memory.shape import FactError
from search_spaces.rules import case_of
from tracking.record import TrialRecord
from train_worker.outcome import Measured
from tuner.sweep import LoadedSweep, load_sweep


def memory_errors(run_folder: Path, records: Sequence[TrialRecord]) -> Errors | None:
    """Predicted against measured reserved memory over a run's trials on GPUs; None where there is nothing to compare.

    The sweep file is the copy in the run's folder; one that cannot be read any more is nothing to compare with.
    """
    if not any(isinstance(record.outcome, Measured) and record.outcome.memory for record in records):
        return None
    try:
        samples = samples_of(load_sweep(run_folder / "sweep.yaml"), records)
    except MoetuneError:
        return None
    return errors(stored().factors, samples) if samples else None


def samples_of(sweep: LoadedSweep, records: Sequence[TrialRecord]) -> list[Sample]:
    """The measured trials of a run, each beside its plan."""
    return [sample for record in records if (sample := _sample(record, sweep))]


def _sample(record: TrialRecord, sweep: LoadedSweep) -> Sample | None:
    outcome = record.outcome
    if not isinstance(outcome, Measured) or outcome.memory is None:
        return None
    spec = sweep.spec
    case = case_of(record.candidate, sweep.model, spec.cluster, spec.training, spec.stack)
    grows = expandable(record.candidate.env)
    try:
        stage = plan_of(case).worst
    except FactError:
        return None
    peaks = outcome.memory
    return Sample(
        record.trial_id, sweep.model.name, stage, grows, peaks.reserved_bytes, peaks.device_used_bytes
    )  # fmt: skip


def said(found: Errors) -> str:
    """For people: this run's errors, and those of the rows that the factors had not seen when they were fitted."""
    unseen = stored().held_out
    mean, worst = f"{found.mean:.1%} in the mean", f"{found.worst:.1%} at worst"
    return (
        f"Memory: predictions of what was reserved were off by {mean}, {worst}, over {found.rows} trials "
        f"(held-out rows of the calibration: {unseen.mean:.1%} and {unseen.worst:.1%})"
    )
