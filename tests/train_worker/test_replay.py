"""Answers from a table: what was recorded, with the noise that was recorded, by a seed; and never a guess."""

import math
import random
from statistics import median, stdev

import pytest

from search_spaces.candidate import Candidate
from search_spaces.errors import InputError
from tests.search_spaces.cases import GPU_TRAINING, LAPTOP_RANKS, TINY, gpus
from tests.train_worker.recorded import BASELINE, CANDIDATES, measured, row, rows
from train_worker.job import TrialJob
from train_worker.outcome import Measured, Outcome, OutOfMemory
from train_worker.recorded_table import RecordedTable
from train_worker.replay import NotRecorded, Replay, ReplayRunner
from train_worker.table import TableRow

TIMES: dict[str, float | None] = {each.id: 0.2 + number / 100 for number, each in enumerate(CANDIDATES)}
QUIET = RecordedTable(rows(TIMES), "table.jsonl")


def job(candidate: Candidate = BASELINE, **changes: object) -> TrialJob:
    facts = {"model": TINY, "cluster": gpus(1), "training": GPU_TRAINING, "seed": 1, "time_limit_s": 10.0}
    return TrialJob.model_validate({"trial_id": "t1", "candidate": candidate, **facts, **changes})


def time_of(outcome: Outcome) -> float:
    assert isinstance(outcome, Measured)
    return median(step.step_time_s for step in outcome.steps)


def noisy(between: float, within: float, repeats: int) -> RecordedTable:
    """The baseline again and again, with log-normal noise between trials and between the steps of one."""
    chance = random.Random(7)
    found: list[TableRow] = rows(TIMES, repeats=0)
    for number in range(repeats):
        trial = 0.2 * math.exp(chance.gauss(0, between))
        steps = tuple(trial * math.exp(chance.gauss(0, within)) for _ in range(9))
        found.append(row(BASELINE, measured(steps), 100 + number, repeat=number + 1))
    return RecordedTable(found, "noisy.jsonl")


def test_without_noise_every_candidate_answers_what_was_recorded() -> None:
    replay = Replay(QUIET)
    assert replay.spread == 0
    for candidate in CANDIDATES:
        assert time_of(replay.answer(candidate, random.Random(1))) == pytest.approx(TIMES[candidate.id])
    assert replay.best_s == pytest.approx(0.2)


def test_the_noise_of_repeats_is_split_into_trials_and_steps() -> None:
    replay = Replay(noisy(between=0.08, within=0.06, repeats=200))
    assert replay.spread_between(BASELINE.id) == pytest.approx(0.08, rel=0.15)
    assert replay.spread == pytest.approx(math.hypot(0.08, 1.2533 * 0.06 / 3), rel=0.15)


def test_answers_scatter_as_the_repeats_did_around_the_adjusted_value() -> None:
    replay = Replay(noisy(between=0.08, within=0.06, repeats=200))
    drawn = [math.log(time_of(replay.answer(BASELINE, random.Random(seed)))) for seed in range(400)]
    assert stdev(drawn) == pytest.approx(replay.spread, rel=0.15)
    assert math.exp(median(drawn)) == pytest.approx(replay.values[BASELINE.id], rel=0.02)


def test_the_adjusted_value_of_a_single_trial_is_drawn_to_the_middle_and_repeats_hold_it() -> None:
    replay = Replay(noisy(between=0.08, within=0.0, repeats=50))
    lowest, highest = CANDIDATES[1].id, CANDIDATES[-1].id
    assert replay.values[lowest] > TIMES[lowest]
    assert replay.values[highest] < TIMES[highest]
    pull = {name: abs(math.log(replay.values[name] / TIMES[name])) for name in (lowest, BASELINE.id)}
    assert pull[BASELINE.id] < pull[lowest]
    assert sorted(TIMES, key=replay.values.__getitem__)[1:] == sorted(TIMES, key=TIMES.__getitem__)[1:]


def test_what_waits_for_the_host_is_noisier() -> None:
    """Both were repeated: the baseline waits half its time and scatters, the other neither waits nor scatters."""
    found, steady = noisy(between=0.08, within=0.0, repeats=60), CANDIDATES[1]
    rows = []
    for each in found.rows:
        assert each.measured is not None
        busy = median(each.measured.step_times_s) * (0.5 if each.id == BASELINE.id else 1.0)
        rows.append(each.model_copy(update={"measured": each.measured.model_copy(update={"gpu_busy_s": busy})}))
    first = next(each for each in rows if each.id == steady.id)
    rows += [first.model_copy(update={"sweep": sweep}) for sweep in (1, 2)]
    replay = Replay(RecordedTable(rows, "t"))
    assert replay.spread_of(BASELINE.id) == pytest.approx(0.08, rel=0.25)
    assert replay.spread_of(steady.id) < 0.001
    assert replay.values[steady.id] == pytest.approx(TIMES[steady.id], rel=1e-3)


def test_the_seed_alone_decides() -> None:
    table = noisy(between=0.08, within=0.06, repeats=10)
    first, again, other = (ReplayRunner(table, seed) for seed in (1, 1, 2))
    for candidate in CANDIDATES[1:4]:
        again.run(job(candidate))  # what ran before does not matter
    assert first.run(job()) == again.run(job())
    assert first.run(job()) != other.run(job())
    assert first.run(job()) != first.run(job(trial_id="t2"))


def test_tokens_and_losses_go_with_the_redrawn_steps() -> None:
    answer = Replay(noisy(between=0.08, within=0.06, repeats=10)).answer(BASELINE, random.Random(3))
    assert isinstance(answer, Measured)
    for step in answer.steps:
        assert step.gpu_time_s == pytest.approx(step.step_time_s / 2, rel=1e-4)
        assert step.tokens_per_s * step.step_time_s == pytest.approx(GPU_TRAINING.tokens_per_step)
    assert answer.losses == measured((0.2,) * len(answer.steps)).losses


def test_a_runner_says_what_the_redrawn_times_say() -> None:
    answer = ReplayRunner(noisy(between=0.08, within=0.06, repeats=10), 1).run(job())
    assert isinstance(answer, Measured)
    assert answer.timing is not None
    assert answer.timing.median_s == time_of(answer)


def test_a_failure_is_answered_as_it_was() -> None:
    times = TIMES | {CANDIDATES[3].id: None}
    answer = ReplayRunner(RecordedTable(rows(times), "t"), 1).run(job(CANDIDATES[3]))
    assert isinstance(answer, OutOfMemory)


@pytest.mark.parametrize(
    "asked",
    [
        job(Candidate(knobs=BASELINE.knobs | {"micro_batch_size": 2})),
        job(model=TINY.model_copy(update={"num_layers": 1, "name": "other"})),
        job(training=GPU_TRAINING.model_copy(update={"sequence_length": 64})),
        job(cluster=LAPTOP_RANKS),
    ],
    ids=["candidate", "model", "training", "cluster"],
)
def test_what_is_not_in_the_table_is_an_error(asked: TrialJob) -> None:
    with pytest.raises(NotRecorded, match=r"table\.jsonl"):
        ReplayRunner(QUIET, 1).run(asked)


def test_how_long_is_measured_may_differ() -> None:
    longer = GPU_TRAINING.model_copy(update={"measured_steps": 20})
    assert isinstance(ReplayRunner(QUIET, 1).run(job(training=longer)), Measured)


def test_without_repeats_the_noise_is_unknown() -> None:
    with pytest.raises(InputError, match="measured twice"):
        Replay(RecordedTable(rows(TIMES, repeats=0), "t"))
