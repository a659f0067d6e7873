"""Tables of recorded trials made by hand: 30 configurations of one model on one GPU, with conditional knobs."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from search_spaces.candidate import Candidate, KnobValue
from tests.search_spaces.cases import GPU_TRAINING, TINY, gpus
from train_worker.outcome import (
    Evidence,
    Fingerprint,
    Measured,
    MemoryPeaks,
    Outcome,
    OutOfMemory,
    PhaseTimes,
    StepSample,
    Work,
)
from train_worker.profile import StepProfile
from train_worker.table import MeasuredPart, TableRow

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
DISPATCHERS = ("alltoall", "allgather")
RECIPES: tuple[dict[str, KnobValue], ...] = ({"fp8": None}, {"fp8": "hybrid", "fp8_recipe": "blockwise"})
RECOMPUTES: tuple[dict[str, KnobValue], ...] = (
    {"recompute_granularity": None},
    {"recompute_granularity": "selective", "recompute_modules": "moe"},
    {"recompute_granularity": "selective", "recompute_modules": "moe_act"},
)
FINGERPRINT = Fingerprint(
    stack={"megatron_core": "0.19.2", "torch": "2.11.0"}, python="3.12.1", device="cuda", device_name="H200"
)

PROFILE = StepProfile(
    step_time_s=0.25,
    profiled_step_time_s=0.3,
    gpu_busy_s=0.2,
    compute_s=0.19,
    exposed_communication_s=0.0,
    hidden_communication_s=0.0,
    exposed_copy_s=0.01,
    exposed_host_s=0.05,
    categories_s={"gemm": 0.15},
    kernel_count=1200,
    launches={"cudaLaunchKernel": 1200},
    top_kernels=(),
    wall="compute",
    why="the GPU works 80% of the step",
    suggested=("fp8_recipe",),
)


def _all() -> tuple[Candidate, ...]:
    found = []
    for dispatcher, size, recipe, recompute in product(DISPATCHERS, (4, 8), RECIPES, RECOMPUTES):
        knobs: dict[str, KnobValue] = {"moe_token_dispatcher_type": dispatcher, "moe_grouped_gemm": True}
        found.append(Candidate(knobs=knobs | {"micro_batch_size": size} | recompute | recipe))
    plain = [each for each in found if each.knobs["fp8"] is None and each.knobs["micro_batch_size"] == 8]
    return (*found, *(Candidate(knobs=each.knobs, env={CUTLASS: "1"}) for each in plain))


CANDIDATES = _all()
BASELINE = CANDIDATES[0]


def measured(step_times_s: tuple[float, ...], warmup: int = 2) -> Measured:
    samples = tuple(
        StepSample(
            step_time_s=seconds,
            gpu_time_s=seconds / 2,
            tokens_per_s=GPU_TRAINING.tokens_per_step / seconds,
            loss=9 - number,
            grad_norm=1.5,
        )
        for number, seconds in enumerate((*(1.0,) * warmup, *step_times_s))
    )
    memory = MemoryPeaks(allocated_bytes=10, reserved_bytes=20, device_used_bytes=30, static_bytes=5)
    return Measured(
        steps=samples[warmup:],
        warmup=samples[:warmup],
        peak_memory_bytes=10,
        memory=memory,
        parameter_count=7,
        effective={"micro_batch_size": 4},
        fingerprint=FINGERPRINT,
        phases=PhaseTimes(build_s=1.0, measure_s=2.5, profile_s=0.5),
        evidence=(Evidence(knob="moe_grouped_gemm", requested=True, seen="16 grouped GEMMs", active=True),),
        profile=PROFILE,
        work=Work(ranks=1, tokens_per_step=GPU_TRAINING.tokens_per_step, flops_per_token=2.5e9, routing="natural"),
    )


def row(candidate: Candidate, outcome: Outcome, order: int = 1, repeat: int | None = None) -> TableRow:
    ran = isinstance(outcome, Measured)
    return TableRow(
        id=candidate.id,
        order=order,
        repeat=repeat,
        started_at="2026-01-02T03:04:05+00:00",
        wall_s=4.0,
        outcome=outcome.kind,
        knobs=candidate.knobs,
        env=candidate.env,
        shape=TINY,
        cluster=gpus(1),
        training=GPU_TRAINING,
        measured=MeasuredPart.of(outcome) if ran else None,
        failure=None if ran else outcome,
    )


def rows(medians_s: Mapping[str, float | None], repeats: int = 3) -> list[TableRow]:
    """A row a candidate, by id: the time of each of its steps, None: out of memory. The baseline again `repeats` times,
    always with the same times, so that there is no noise."""
    by_id = {each.id: each for each in CANDIDATES}
    found = [
        row(
            by_id[name], measured((seconds,) * 5) if seconds else OutOfMemory(where="device", phase="warmup", detail="")
        )
        for name, seconds in medians_s.items()
    ]
    again = medians_s[BASELINE.id]
    assert again is not None
    found += [row(BASELINE, measured((again,) * 5), repeat=number + 1) for number in range(repeats)]
    return [each.model_copy(update={"order": number}) for number, each in enumerate(found, start=1)]


def write(path: Path, found: list[TableRow]) -> Path:
    path.write_text("".join(each.line() for each in found))
    return path
