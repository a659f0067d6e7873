"""Answers from a recorded table, without a GPU: the recorded outcome, with noise as large as the recorded.

What is known of the noise. Repeats of one configuration differ from trial to trial (the host is in another mood), and
within a trial the steps scatter. Both are redrawn: the steps by resampling those of a recorded trial, the trial by a
factor from a log-normal. Its spread is that of all configurations that were measured more than once, as a function of
how long the GPU waits for the host (`train_worker.noise`). Where repeats exist only of a host-bound baseline, GPU-bound
configurations (steadier in truth) get too much of it, which makes a search look worse than it is, never better.
"""

import math
import random
from statistics import fmean, median, variance

from search_spaces.candidate import Candidate
from search_spaces.errors import Fault, InputError
from search_spaces.shapes import TrainingShape
from train_worker.job import TrialJob
from train_worker.noise import fitted, idle_share
from train_worker.outcome import Measured, Outcome, StepSample
from train_worker.recorded_table import RecordedTable, different_training
from train_worker.table import MeasuredPart
from train_worker.timing import step_timing

# The standard error of a median of n normal draws is 1.2533 s / sqrt(n), and s is 1.4826 times the median deviation.
MEDIAN_ERROR = 1.2533 * 1.4826


class NotRecorded(InputError):
    """A table was asked for what it does not hold: another candidate, model or training job. It never guesses."""


class Replay:
    """A table with its noise. Raises InputError where no configuration was measured twice, or none at all.

    `spread`: standard deviation of the log of a trial's median step time, pooled over all repeats. `noise`: the same by
    how long the GPU waits for the host. `values`: by id, the noise-adjusted step time of each that ran, seconds.
    """

    def __init__(self, table: RecordedTable) -> None:
        self.table = table
        parts = {name: found for name in table.by_id if (found := list(table.measured_of(name)))}
        self._logs = {name: [_log_median(part) for part in found] for name, found in parts.items()}
        noise = fitted(list(parts.values()))
        if noise is None:
            fault = Fault("no configuration was measured twice: the noise is unknown", table.where)
            raise InputError([fault], "record A/A repeats of the baseline")
        self.noise = noise
        self.spread = noise.pooled
        self._spreads = {name: noise.spread(idle_share(found)) for name, found in parts.items()}
        within = {name: fmean(map(_median_variance, found)) for name, found in parts.items()}
        self._between = {name: math.sqrt(max(self._spreads[name] ** 2 - within[name], 0.0)) for name in within}
        self.values = self._adjusted()

    def spread_of(self, name: str) -> float:
        """From trial to trial of the configuration with this id."""
        return self._spreads[name]

    def spread_between(self, name: str) -> float:
        """Without what the scatter of its trials' steps explains."""
        return self._between[name]

    def _adjusted(self) -> dict[str, float]:
        """The best of many noisy numbers looks better than it is. So each mean of logs is drawn towards the mean of all
        by the share of its variance that is noise (empirical Bayes, normal in the log); repeats draw it less.
        """
        means = {name: fmean(logs) for name, logs in self._logs.items()}
        errors = {name: self.spread_of(name) ** 2 / len(logs) for name, logs in self._logs.items()}
        centre = fmean(means.values())
        seen = variance(means.values()) if len(means) > 1 else 0.0
        true = max(seen - fmean(errors.values()), 0.0)
        kept = {name: true / (true + error) if true + error else 1.0 for name, error in errors.items()}
        return {name: math.exp(centre + kept[name] * (mean - centre)) for name, mean in means.items()}

    @property
    def best_s(self) -> float:
        """The lowest noise-adjusted step time of the table, seconds."""
        return min(self.values.values())

    def answer(self, candidate: Candidate, draw: random.Random, training: TrainingShape | None = None) -> Outcome:
        """One of the candidate's recorded outcomes, a measured one with redrawn step times around its adjusted value.

        Losses, memory and phases stay as recorded. Raises NotRecorded for a candidate or training job not in the table.
        """
        rows = self.table.by_id.get(candidate.id)
        if rows is None:
            raise NotRecorded([Fault(f"candidate {candidate.id} is not in the table", self.table.where)])
        if training is not None and (names := different_training(training, self.table.training)):
            fault = Fault(f"recorded with another training.{', training.'.join(names)}", self.table.where)
            raise NotRecorded([fault], "ask for the training job of the table")
        row = draw.choice(rows)
        outcome = row.recorded()
        if not isinstance(outcome, Measured):
            return outcome
        assert row.measured is not None
        shift = math.log(self.values[row.id]) - _log_median(row.measured)
        factor = math.exp(shift + draw.gauss(0.0, self.spread_between(row.id)))
        steps = tuple(_redrawn(step, draw.choice(outcome.steps), factor) for step in outcome.steps)
        return outcome.model_copy(update={"steps": steps})


def _redrawn(step: StepSample, other: StepSample, factor: float) -> StepSample:
    """The step with the times of another step of its trial; loss and grad norm are those of its own data.

    The factor is the host's: the GPU's time holds its idle time too, and so goes with it.
    """
    seconds = other.step_time_s * factor
    gpu_s = None if other.gpu_time_s is None else other.gpu_time_s * factor
    tokens = step.tokens_per_s * step.step_time_s
    return step.model_copy(update={"step_time_s": seconds, "gpu_time_s": gpu_s, "tokens_per_s": tokens / seconds})


def _log_median(part: MeasuredPart) -> float:
    return math.log(median(part.step_times_s))


def _median_variance(part: MeasuredPart) -> float:
    """Of the log of a trial's median, as far as the scatter of its steps explains it (steps taken as independent)."""
    times = part.step_times_s
    centre = median(times)
    deviation = median(abs(each - centre) for each in times)
    return (MEDIAN_ERROR * deviation / centre) ** 2 / len(times)


class ReplayRunner:
    """Runs trials out of a table, with the interface of `train_worker.gang.LocalGang`.

    What a trial answers depends on `seed` and its id only, not on what ran before.
    """

    def __init__(self, table: RecordedTable, seed: int) -> None:
        self._replay, self._seed = Replay(table), seed

    def run(self, job: TrialJob) -> Outcome:
        """The outcome of one job. Raises NotRecorded where the table has no answer."""
        table = self._replay.table
        if job.model != table.shape:
            fault = Fault(f"recorded for model {table.shape.name!r}, not {job.model.name!r} as asked", table.where)
            raise NotRecorded([fault])
        if job.world_size != table.cluster.workers_per_trial or job.cluster.gpu_arch != table.cluster.gpu_arch:
            recorded = f"{table.cluster.workers_per_trial} of {table.cluster.gpu_arch or table.cluster.device}"
            raise NotRecorded([Fault(f"recorded on {recorded}, not on what is asked", table.where)])
        outcome = self._replay.answer(job.candidate, random.Random(f"{self._seed}/{job.trial_id}"), job.training)
        if not isinstance(outcome, Measured):
            return outcome
        times = [step.step_time_s for step in outcome.steps]
        return outcome.model_copy(update={"timing": step_timing(times)})
