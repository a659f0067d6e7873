"""A sweep as a user runs it: real Ray, Optuna, Megatron-Core and MLflow, stopped, killed and resumed."""

import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.sweeps import (
    answer,
    descendants,
    finished,
    gone,
    journal_of,
    kill,
    moetune,
    proposed,
    start,
    wait_until,
    write_sweep,
)
from tracking.journal import fold, read_events
from tracking.record import Compared, TrialRecord
from train_worker.outcome import Measured

TRIALS = 9


@pytest.mark.timeout(600)
def test_a_sweep_interrupted_killed_and_resumed_loses_and_repeats_nothing(tmp_path: Path) -> None:
    sweep, journal = write_sweep(tmp_path, TRIALS), journal_of(tmp_path)

    # After two trials: a second driver is refused, resuming or not; Ctrl-C is a clean stop with the right exit code,
    # and nothing is left running.
    process = start("run", sweep)
    wait_until(lambda: len(finished(journal)) >= 2, process)
    below = descendants(process.pid)
    assert answer(moetune("status", tmp_path / "runs", "--json"))["runs"][0]["state"] == "running"
    for second in (moetune("run", sweep), moetune("run", sweep, "--resume")):
        assert second.returncode == 4
        assert f"run 001 (process {process.pid} on " in second.stderr
    assert not journal_of(tmp_path, "002").exists()
    kill(process, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "--resume" in err
    assert "Traceback" not in err
    assert not gone(below)
    before = finished(journal)
    assert len(before) >= 2
    status = answer(moetune("status", tmp_path / "runs", "--json"))["runs"][0]
    assert (status["state"], status["finished"]) == ("resumable", len(before))
    assert moetune("stop", sweep).returncode == 2  # nothing runs

    # kill -9 of the driver in the middle of a trial: whatever was finished is in the journal, Ray is gone.
    process = start("run", sweep, "--resume")
    wait_until(lambda: len(finished(journal)) >= len(before) + 2, process)
    wait_until(lambda: len(proposed(journal)) > len(finished(journal)), process)
    below = descendants(process.pid)
    kill(process, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not gone(below, 60)
    assert finished(journal)[: len(before)] == before

    # The rest, with JSON alone on stdout.
    killed = finished(journal)
    done = moetune("run", sweep, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    report = answer(done)
    state = fold(read_events(journal))
    searched = [record for record in state.finished if record.purpose != "verify"]
    assert list(state.finished[: len(killed)]) == killed
    assert len(searched) == TRIALS
    assert [record.number for record in searched] == list(range(TRIALS))
    assert len({record.candidate.id for record in searched}) == TRIALS
    assert searched[0].purpose == "baseline"
    assert not state.in_flight
    assert all(isinstance(record.outcome, Measured) for record in searched)
    verdict = state.compared[-1]
    assert verdict.verdict in ("faster", "slower", "tie", "same")
    _each_finalist_ran_in_both_rounds(verdict, state.finished)
    assert report["leaderboard"]["verdict"]["kind"] == verdict.verdict
    # MLflow got everything, from three drivers, once each: nothing is left for the report to fill in.
    assert report["mlflow"]["failed"] == 0
    _mlflow_has_each_trial_once(tmp_path, len(state.finished))
    # Overhead outside training is known for every trial.
    assert all(record.outcome.phases.fixed_s > 0 for record in searched if isinstance(record.outcome, Measured))
    _once_more_is_the_same_answer(sweep, journal, report)


def _each_finalist_ran_in_both_rounds(compared: Compared, records: Sequence[TrialRecord]) -> None:
    verified = [record.candidate.id for record in records if record.purpose == "verify"]
    sides = {compared.default_id, compared.finalist_id, *(each.finalist_id for each in compared.runners_up)}
    assert Counter(verified) == Counter({} if compared.verdict == "same" else dict.fromkeys(sides, 2))
    assert verified[:1] in ([], [compared.default_id])


def _once_more_is_the_same_answer(sweep: Path, journal: Path, report: Any) -> None:
    """From the journal alone."""
    written = journal.read_bytes()
    again = moetune("run", sweep, "--resume", "--json")
    assert again.returncode == 0, again.stderr
    assert f"nothing is left to run (budget: {TRIALS} trials" in again.stderr
    assert "starting Ray" not in again.stderr
    assert answer(again)["leaderboard"]["verdict"] == report["leaderboard"]["verdict"]
    assert journal.read_bytes() == written


def _mlflow_has_each_trial_once(folder: Path, trials: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=1000)
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(runs) - len(children) == 1
    assert len(children) == trials
    assert len({run.info.run_name for run in children}) == trials
    assert all(run.data.tags["outcome"] == "measured" for run in children)
