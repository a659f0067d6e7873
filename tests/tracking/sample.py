"""A small sweep as events, made by hand: what the tests of stores and reports feed in."""

import math
from typing import Literal

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import StackVersions
from tracking.record import (
    Compared,
    Event,
    Proposed,
    Purpose,
    RuleCount,
    RunnerUp,
    Screened,
    SweepStarted,
    TrialRecord,
    Versus,
)
from train_worker.kernels import GpuEvent, StepTrace
from train_worker.outcome import (
    Crashed,
    Diverged,
    Fingerprint,
    Hung,
    Measured,
    Outcome,
    OutOfMemory,
    PhaseTimes,
    StepSample,
)
from train_worker.profile import profile_of

FINGERPRINT = Fingerprint(
    stack=StackVersions(megatron_core="0.19.2", torch="2.11.0"), python="3.12.1", device="cpu", device_name="test"
)
DEFAULT: dict[str, KnobValue] = {"moe_token_dispatcher_type": "allgather", "micro_batch_size": 1}


def candidate(**changes: KnobValue) -> Candidate:
    return Candidate(knobs=DEFAULT | changes)


def head(resumed: bool = False, started_at: str = "2026-01-02T03:04:05+00:00") -> SweepStarted:
    return SweepStarted(
        sweep_name="laptop",
        run_name="001",
        sweep_digest="abc",
        space_digest="def",
        sweep_text="name: laptop # <b>&\n",
        seed=1,
        started_at=started_at,
        resumed=resumed,
    )


def screened() -> Screened:
    return Screened(
        total=40,
        accepted=30,
        rejected=(
            RuleCount(rule="fp8-needs-sm89", reason="no FP8 <here>", count=8, example=candidate(fp8="e4m3")),
            RuleCount(rule="ep-divides", reason="8 experts, EP 3", count=2, example=candidate(ep=3)),
        ),
    )


def measured(step_time_s: float, loss: float = 4.0, memory: int = 10_000_000, steps: int = 8) -> Measured:
    def sample(step: int) -> StepSample:
        seconds = step_time_s * (1 + 0.01 * math.sin(step * 7))
        return StepSample(step_time_s=seconds, tokens_per_s=512 / seconds, loss=loss - 0.1 * step, grad_norm=1.5)

    return Measured(
        warmup=(sample(0), sample(1)),
        steps=tuple(sample(step) for step in range(2, 2 + steps)),
        peak_memory_bytes=memory,
        parameter_count=123_456,
        effective={**DEFAULT, "sequence_parallel": False},
        fingerprint=FINGERPRINT,
        phases=PhaseTimes(launch_s=0.2, import_s=0.01, process_group_s=0.3, build_s=0.4, warmup_s=0.5, measure_s=1.0),
    )


def profiled(step_time_s: float, busy: float = 0.6, device: Literal["cpu", "cuda"] = "cuda") -> Measured:
    """A trial on a GPU that computes for the share `busy` of its steps."""
    events = (
        GpuEvent("nvjet_sm90_tst_128x256", 0.0, busy * step_time_s * 0.75e6, 7),
        GpuEvent("vectorized_elementwise_kernel", busy * step_time_s * 0.75e6, busy * step_time_s * 0.25e6, 7),
    )
    trace = StepTrace(events, step_time_s * 1.5e6, {"cudaLaunchKernel": 2})
    fingerprint = FINGERPRINT.model_copy(update={"device": device})
    profile = profile_of(trace, step_time_s, device)
    return measured(step_time_s).model_copy(update={"profile": profile, "fingerprint": fingerprint})


def proposed(number: int, what: Candidate, purpose: Purpose = "search") -> Proposed:
    at = f"2026-01-02T03:{number % 60:02}:00+00:00"
    return Proposed(number=number, trial_id=f"t{number:04}", purpose=purpose, candidate=what, at=at)


def finished(number: int, what: Candidate, outcome: Outcome, purpose: Purpose = "search") -> TrialRecord:
    return TrialRecord(
        number=number,
        trial_id=f"t{number:04}",
        purpose=purpose,
        candidate=what,
        outcome=outcome,
        wall_s=2.5,
        attempts=2 if number == 4 else 1,
        started_at=f"2026-01-02T03:{number % 60:02}:00+00:00",
        ended_at=f"2026-01-02T03:{number % 60:02}:02.500000+00:00",
    )


def trials() -> list[TrialRecord]:
    default, fast = candidate(), candidate(moe_token_dispatcher_type="alltoall")
    return [
        finished(0, default, measured(0.2), "baseline"),
        finished(1, fast, measured(0.15)),
        finished(2, candidate(micro_batch_size=4), OutOfMemory(where="device", phase="measure", detail="CUDA out <x>")),
        finished(3, candidate(micro_batch_size=2), Diverged(step=3, reason="loss is nan", losses=(4.0, None))),
        finished(4, candidate(recompute_granularity="full"), Crashed(phase="build", detail="boom\n" * 50, exit_code=1)),
        finished(5, candidate(overlap_grad_reduce=True), Hung(phase="warmup", time_limit_s=30)),
        finished(6, candidate(micro_batch_size=8), measured(0.1505, memory=30_000_000)),
        finished(7, default, measured(0.201), "verify"),
        finished(8, fast, measured(0.151), "verify"),
    ]


def compared(verdict: str = "faster") -> Compared:
    default, fast = candidate(), candidate(moe_token_dispatcher_type="alltoall")
    ratio, low, high = {"faster": (0.75, 0.70, 0.80), "tie": (0.99, 0.95, 1.04)}[verdict]
    return Compared.model_validate(
        {
            "finalist_id": fast.id,
            "default_id": default.id,
            "rounds": 4,
            "ratio": ratio,
            "ratio_low": low,
            "ratio_high": high,
            "verdict": verdict,
        }
    )


def two_finalists(**changes: Versus) -> Compared:
    """The finalist of `compared`, with micro_batch_size=8 behind it."""
    default = Versus(rounds=4, ratio=0.76, ratio_low=0.75, ratio_high=0.77, verdict="faster")
    named = Versus(rounds=4, ratio=1.003, ratio_low=0.98, ratio_high=1.03, verdict="tie")
    other = RunnerUp(finalist_id=candidate(micro_batch_size=8).id, against_default=default, against_named=named)
    return compared().model_copy(update={"runners_up": (other.model_copy(update=changes),)})


def sweep(verdict: str = "faster") -> list[Event]:
    events: list[Event] = [head(), screened()]
    for record in trials():
        events += [proposed(record.number, record.candidate, record.purpose), record]
    return [*events, compared(verdict)]
