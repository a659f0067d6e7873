"""Every kind of outcome provoked for real on a GPU, and the trial after it, which must inherit nothing."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from search_spaces.candidate import Candidate
from tests.gpu.conftest import Run, note
from tests.gpu.trials import QWEN, SENT, TRAINING, graphs, job
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from train_worker.outcome import Crashed, Diverged, Hung, Measured, Outcome, OutOfMemory
from train_worker.progress import read_progress
from train_worker.rank import progress_path

pytestmark = pytest.mark.gpu
Baseline = Callable[[str], Measured]
HANG_LIMIT_S = 25.0  # beyond what the first steps take on a warm machine
LONG = TRAINING.model_copy(update={"measured_steps": 100_000})
TOO_BIG = TRAINING.model_copy(update={"global_batch_size": 1024})
WIDE = QWEN.model_copy(update={"name": "wide-vocabulary", "vocab_size": 131_072})


def too_big(name: str) -> TrialJob:
    """Its logits alone are 256 GiB in bf16: 1,048,576 tokens x 131,072."""
    return job(name, Candidate(knobs=SENT | {"micro_batch_size": 1024}), WIDE, TOO_BIG)


def disturbed(gang: LocalGang, trial: TrialJob, number: signal.Signals) -> Outcome:
    """Run a trial and send its rank a signal once it measures."""
    outcomes: list[Outcome] = []
    start = time.monotonic()
    runner = threading.Thread(target=lambda: outcomes.append(gang.run(trial)))
    runner.start()
    host = gang.hosts[0]
    progress = progress_path(host.folder / trial.trial_id, 0)
    while read_progress(progress)[0] != "measure" and runner.is_alive():
        assert time.monotonic() - start < 120, "the rank never reached its measured steps"
        time.sleep(0.01)
    pid = host.rank_pid
    assert pid is not None, outcomes
    os.kill(pid, number)
    runner.join(150)
    assert not runner.is_alive()
    note(trial, outcomes[0], time.monotonic() - start)
    return outcomes[0]


def inherits_nothing(run: Run, baseline: Baseline, name: str) -> None:
    """The same losses and the same memory as in a fresh process on an empty GPU, to what its allocator rounds."""
    fresh, after = baseline("qwen"), run(job(name))
    assert isinstance(after, Measured), after
    assert after.losses == pytest.approx(fresh.losses, rel=1e-3)
    assert after.memory is not None
    assert fresh.memory is not None
    assert after.memory.allocated_bytes == pytest.approx(fresh.memory.allocated_bytes, rel=0.01)
    assert after.memory.device_used_bytes == pytest.approx(fresh.memory.device_used_bytes, rel=0.1)


def test_out_of_memory_on_the_device(run: Run, baseline: Baseline) -> None:
    baseline("qwen")  # before anything has failed
    outcome = run(too_big("too big"))
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.where == "device"
    assert outcome.phase in ("build", "warmup")
    inherits_nothing(run, baseline, "after out of memory")


def test_a_stopped_rank_is_hung(gang: LocalGang, run: Run, baseline: Baseline) -> None:
    baseline("qwen")
    outcome = disturbed(gang, job("stopped", training=LONG, time_limit_s=HANG_LIMIT_S), signal.SIGSTOP)
    assert isinstance(outcome, Hung), outcome
    assert outcome.time_limit_s == HANG_LIMIT_S
    inherits_nothing(run, baseline, "after a hang")


def test_a_killed_rank_is_crashed(gang: LocalGang, run: Run, baseline: Baseline) -> None:
    baseline("qwen")
    outcome = disturbed(gang, job("killed", training=LONG), signal.SIGKILL)
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.signal, outcome.phase) == (signal.SIGKILL, "measure")
    inherits_nothing(run, baseline, "after a crash")


def test_a_capture_that_cannot_be_is_crashed(run: Run, baseline: Baseline) -> None:
    """Without a caching allocator each allocation is a cudaMalloc, which no capture may call."""
    baseline("qwen")
    candidate = Candidate(knobs=SENT | graphs("attn"), env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    outcome = run(job("capture", candidate))
    assert isinstance(outcome, Crashed), outcome
    assert outcome.phase == "warmup"
    assert "captur" in outcome.detail
    inherits_nothing(run, baseline, "after a capture error")


def test_an_nccl_error_is_crashed(run: Run, baseline: Baseline) -> None:
    """No network interface has this name: the first communicator cannot be made, on one rank neither."""
    baseline("qwen")
    outcome = run(job("nccl", Candidate(knobs=dict(SENT), env={"NCCL_SOCKET_IFNAME": "=nosuchinterface"})))
    assert isinstance(outcome, Crashed), outcome
    assert "nccl" in outcome.detail.lower()
    inherits_nothing(run, baseline, "after an NCCL error")


def test_weights_that_overflow_are_diverged(run: Run) -> None:
    outcome = run(job("overflow", training=TRAINING.model_copy(update={"learning_rate": 1e30})))
    assert isinstance(outcome, Diverged), outcome
    assert outcome.step <= 2
    assert outcome.losses[0] is not None
