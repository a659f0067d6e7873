"""The loop: Ray Tune over a session, one Tune trial a candidate, until the session says "done"."""

import logging
from pathlib import Path
from typing import Any, Literal

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune import FailureConfig, RunConfig, TuneConfig

from tuner.launch.trials import job_trial, no_board, slot_trial
from tuner.search import Session, TuneSearcher

TRIAL_CPUS = 0.1  # a Tune trial only waits; the workers belong to the slots


def drive(session: Session, board: Any, folder: Path, isolation: Literal["slot", "job"]) -> None:
    """Run the search. `board` is the actor of `tuner.launch.slots` (unused with isolation "job").

    `folder` takes what Ray writes of its own. Tune never stops a trial: that leaks the placement group (ray#54305).
    """
    function = tune.with_parameters(slot_trial, board=board) if isolation == "slot" else job_trial
    # Tune writes a warning a trial because its own result files are switched off; the journal has the results.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    tuner = tune.Tuner(
        tune.with_resources(function, {"cpu": TRIAL_CPUS}),
        tune_config=TuneConfig(
            search_alg=TuneSearcher(session),
            num_samples=-1,
            reuse_actors=True,
            trial_dirname_creator=_short_name,
        ),
        run_config=RunConfig(
            name="tune",
            storage_path=str(folder.resolve()),
            verbose=0,
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    tuner.fit()


def _short_name(trial: Any) -> str:
    """Tune would put the whole job into the folder's name."""
    return str(trial.trial_id)


def run_on_slot(board: Any, job_json: str) -> str:
    """One trial without Tune (verification), always on the same slot: two slots are two machines, which may differ.

    Returns a `SlotResult` as JSON.
    """
    try:
        return str(ray.get(board.run.remote(job_json, ray.get(board.steady_slot.remote()))))
    except RayError as error:
        return no_board(error)
