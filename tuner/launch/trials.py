"""What runs inside a Ray Tune trial. Both kinds always report a `SlotResult`; a trial never raises for its outcome.

`slot_trial` only waits (no torch, no Train in its process, so Tune reuses one light actor a slot); `job_trial`
starts one Ray Train job for its trial (`--isolation job`).
"""

import time
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from train_worker.entry import TrialFailed, run_one
from train_worker.failures import classify, is_collateral, without_home
from train_worker.job import TrialJob
from train_worker.outcome import Crashed, Outcome
from train_worker.rank_report import NoSlot, RankReport, SlotResult, combine
from tuner.launch.board import RETRIES, worth_a_retry

START_ALLOWANCE_S = 120.0  # a cold job imports torch and Megatron in every worker first: up to 56 s seen on 2 cores


def slot_trial(config: dict[str, Any], board: Any) -> None:
    """Hand the job to a free slot, wait for the outcome, report it. A lost board is said, not raised."""
    try:
        result = ray.get(board.run.remote(config["job"]))
    except RayError as error:
        result = no_board(error)
    tune.report({"result": result})


def no_board(error: RayError) -> str:
    """What a trial gets where the board is gone, as a `SlotResult` in JSON: no outcome, it runs again on resume."""
    detail = f"the board that hands out trials was lost: {str(error).strip().splitlines()[0]}"
    return SlotResult(outcome=NoSlot(detail=detail), attempts=1, wall_s=0.0).model_dump_json()


def job_trial(config: dict[str, Any]) -> None:
    """Run the job as a Ray Train job of its own: cold workers, nothing shared with other trials."""
    tune.report({"result": run_as_job(config["job"])})


def run_as_job(job_json: str) -> str:
    """A TrialJob as JSON in, one Ray Train job (two after an infrastructure fault), a SlotResult as JSON out."""
    job, began = TrialJob.model_validate_json(job_json), time.monotonic()
    attempts, (outcome, trace) = 1, run_job(job)
    while worth_a_retry(outcome) and attempts <= RETRIES:
        attempts, (outcome, trace) = attempts + 1, run_job(job)
    wall_s = time.monotonic() - began
    return SlotResult(outcome=outcome, attempts=attempts, wall_s=wall_s, trace=trace).model_dump_json()


class Deadline(WorkerGroupCallback):
    """Ends a group that runs too long. Ray itself never stops a hung collective (its health check stays green)."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.began = limit_s, 0.0

    def after_worker_group_training_start(self, worker_group: Any) -> None:  # noqa: ARG002 - Ray's signature
        self.began = time.monotonic()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        over = self.began and time.monotonic() - self.began > self.limit_s
        if over and not worker_group_status.finished and not worker_group_status.errors:
            ranks = worker_group_status.worker_statuses
            raise WorkerGroupError(f"deadline of {self.limit_s:.0f} s", {rank: TimeoutError() for rank in ranks})


def run_job(job: TrialJob) -> tuple[Outcome, str]:
    """One TorchTrainer for one trial, to its outcome and the trace of rank 0 (empty where none was kept)."""
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpu = job.cluster.device == "cuda"
    trainer = TorchTrainer(
        run_one,
        train_loop_config={"job": job.model_dump_json()},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo", timeout_s=int(job.time_limit_s) + 1),
        scaling_config=ScalingConfig(
            num_workers=job.world_size,
            use_gpu=on_gpu,
            resources_per_worker={"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1},
        ),
        run_config=RunConfig(
            name=job.trial_id,
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=1),
            callbacks=[Deadline(job.time_limit_s + START_ALLOWANCE_S)],
            # From the start of the worker: Ray Train opens CUDA before `run_one`, and some are read only then.
            worker_runtime_env={"env_vars": dict(job.candidate.env)},
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        return _outcome_of(error, job), ""
    report = RankReport.model_validate_json(str(result.return_value))
    return combine([report], job.time_limit_s), report.trace


def _outcome_of(error: TrainingFailedError, job: TrialJob) -> Outcome:
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    reports = [_report_of(rank, each) for rank, each in failures.items()]
    if not reports:
        words = without_home(f"{type(error).__name__}: {error}")
        return Crashed(phase="unknown", detail=words, infrastructure=True)
    return combine(reports, job.time_limit_s)


def _report_of(rank: int, error: BaseException) -> RankReport:
    """What one worker's error says: our own report in a TrialFailed, a deadline, a lost worker, or any exception."""
    cause = getattr(error, "health_check_failure", None) or getattr(error, "cause", None) or error
    if isinstance(error, TrialFailed) or isinstance(cause, TrialFailed):
        text = str(cause if isinstance(cause, TrialFailed) else error)
        return RankReport.model_validate_json(text[text.index("{") : text.rindex("}") + 1])
    if isinstance(cause, TimeoutError):
        return RankReport(rank=rank, killed="deadline", phase="unknown")
    outcome = classify(cause, "unknown")
    if isinstance(cause, RayError) and isinstance(outcome, Crashed):  # a lost worker or node, not the candidate
        outcome = outcome.model_copy(update={"infrastructure": True})
    return RankReport(rank=rank, outcome=outcome, collateral=is_collateral(cause))
