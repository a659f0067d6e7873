"""One trial on one rank: build, warm up, measure, and say what happened.

Called in a process that `preload` prepared, with torch.distributed initialised (and, on cuda, the device set).
Divergence and a configuration that is not the requested one are answers; every other failure is raised, for
`train_worker.failures`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

from search_spaces.candidate import KnobValue
from search_spaces.rules import case_of
from search_spaces.rules.worker import RULES
from search_spaces.screen import verdict
from search_spaces.shapes import TrainingShape
from train_worker.cpu import megatron_on_cpu
from train_worker.environment import fingerprint, require_transformer_engine
from train_worker.evidence import evidence_of, missing
from train_worker.host import HostSettings
from train_worker.job import TrialJob
from train_worker.keep import Keeper
from train_worker.megatron.config import configs_of, refuse_unknown, virtual_stages
from train_worker.megatron.effective import (
    config_mismatch,
    effective_configuration,
    first_mismatch_of_ranks,
    mismatch,
)
from train_worker.megatron.graphs import Graphs, graphs_of, rng_arguments
from train_worker.megatron.latches import follow_environment
from train_worker.megatron.model import Built, build, parameter_count
from train_worker.megatron.observe import Observer, agreed, with_kernels
from train_worker.megatron.profiler import with_profile
from train_worker.megatron.seen import Run
from train_worker.megatron.step import Trainer, exchange, trainer_of
from train_worker.meter import PeakMemory, StepClock
from train_worker.outcome import Diverged, Evidence, Measured, PhaseTimes, Rejected, StepSample
from train_worker.progress import Progress
from train_worker.timing import enough, hopeless, step_timing


def run(job: TrialJob, progress: Progress, keeper: Keeper | None = None) -> Measured | Diverged | Rejected:
    """Run the trial. Collective: every rank calls it with the same job and gets an answer of the same kind.

    What Megatron's config objects refuse is Rejected with rule "megatron-config", what they silently change with rule
    "effective-differs", what this worker does not do yet with its own rules (`search_spaces.rules.worker`). Raises
    ValueError for a knob that does not exist or a batch that does not divide, ImportError on cuda without Transformer
    Engine, and whatever Megatron or torch raises later. `Measured.phases` holds those of this rank; the caller adds its
    own. `keeper` is given the measurement before the profiled step, and that step.
    """
    with progress.within("build"):
        refuse_unknown(job.candidate)
        if refused := refuse_inactive(job):
            return refused
        if job.cluster.device == "cuda":
            require_transformer_engine()
    follow_environment()
    host = HostSettings(job.candidate, job.cluster, torch.distributed.get_rank())
    with megatron_on_cpu() if job.cluster.device == "cpu" else nullcontext(), host, _model_parallel(job, progress):
        with progress.within("build"):
            prepared = _prepared(job)
        if isinstance(prepared, Rejected):
            return prepared
        return _trained(job, progress, keeper or Keeper(), host, *prepared)


def _prepared(job: TrialJob) -> tuple[Trainer, Graphs | None] | Rejected:
    """What is built before the first step, or why Megatron would not have it so."""
    device = torch.device("cpu" if job.cluster.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
    try:
        configs = configs_of(job)
    except (ValueError, AssertionError, NotImplementedError, ImportError) as refusal:
        # Megatron's own validation, the same on every rank and before any collective of the build.
        return Rejected(rule="megatron-config", reason=f"{type(refusal).__name__}: {refusal}")
    if changed := config_mismatch(job.candidate, configs):
        return changed
    model_parallel_cuda_manual_seed(job.seed, force_reset_rng=True, **rng_arguments(job.candidate))
    built = build(job, configs)
    trainer = trainer_of(job, configs, built, device)
    return trainer, graphs_of(job, configs, built, trainer)


def _trained(
    job: TrialJob, progress: Progress, keeper: Keeper, host: HostSettings, trainer: Trainer, graphs: Graphs | None
) -> Measured | Diverged | Rejected:
    """Warm up, see whether what was asked for ran, measure, profile. Collective."""
    built, device, observer = trainer.built, trainer.device, Observer(job, trainer, graphs)
    steps = _Steps(trainer, host, progress, StepClock(device), PeakMemory(device, built.tensors), graphs, observer)
    with progress.within("warmup"):
        diverged = steps.warm_up(job.training.warmup_steps)
    if diverged:
        return diverged
    with progress.within("build"):
        replayed = graphs is not None and (graphs.active or graphs.empty)
        seen = Run(built, tuple(trainer.seen), trainer.planned, host.effective(), replayed)
        effective, evidence, refused = _as_asked(job, seen, observer)
    if refused:
        return refused
    with progress.within("measure"):
        diverged = steps.measure(job.training, job.slow_above_s)
    if diverged:
        return diverged
    with progress.within("report"):
        measured = _measured(job, progress, steps, built, effective, evidence)
        if not job.profile or steps.slow:
            return measured
        keeper.measured(measured)
    with progress.within("profile"):
        return with_kernels(with_profile(measured, trainer, host, keeper), observer)


def refuse_inactive(job: TrialJob) -> Rejected | None:
    """What Megatron would accept and this worker leave undone, by its own rules: a job need not have been screened."""
    refused = verdict(case_of(job.candidate, job.model, job.cluster, job.training), RULES)
    return Rejected(rule=refused.rule, reason=refused.reason) if refused else None


def _as_asked(
    job: TrialJob, seen: Run, observer: Observer
) -> tuple[dict[str, KnobValue], tuple[Evidence, ...], Rejected | None]:
    """What is in force, the evidence of what ran, and the refusal where either is not what was asked. Collective."""
    effective = effective_configuration(job.candidate, seen)
    differs = first_mismatch_of_ranks(mismatch(job.candidate, effective, job.environment_knobs))
    evidence = agreed(evidence_of(job.candidate, observer.observed()))
    return effective, evidence, differs or missing(evidence)


class _Steps:
    """The steps of a trial, warm-up first; losses and grad norms of all, times of all (the first are not scored)."""

    def __init__(
        self, trainer: Trainer, host: HostSettings, progress: Progress, clock: StepClock, memory: PeakMemory,
        graphs: Graphs | None = None, observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self.trainer, self.host, self.progress, self.clock, self.memory = trainer, host, progress, clock, memory
        self.graphs, self.observer = graphs, observer
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.slow = False  # given up before there were enough
        self.times: list[list[float]] = []  # of each step: the slowest rank's wall time, and on cuda the events' time

    def warm_up(self, count: int) -> Diverged | None:
        for index in range(count):
            if self.graphs and index == self.graphs.after:
                self.graphs.capture()
            if self.graphs:
                self.graphs.start_counting()
            with self._observed() if index == count - 1 else nullcontext():
                diverged = self._one()
            if diverged:
                return diverged
        return None

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Around the last warm-up step: its memory on a CPU, and what it ran."""
        with self.memory.observe(), self.observer.watching() if self.observer else nullcontext():
            yield

    def measure(self, training: TrainingShape, slow_above_s: float | None = None) -> Diverged | None:
        """Steps until there are enough, or all are too slow (`slow`).

        Every rank has the same times of the slowest, and so stops at the same step.
        """
        warm, cap, target = len(self.times), training.measured_steps, training.target_relative_error
        times: list[float] = []
        while not (self.slow or enough(times, target, training.min_measured_steps or cap, cap)):
            if diverged := self._one():
                return diverged
            times = [wall for wall, *_ in self.times[warm:]]
            self.slow = len(times) < cap and hopeless(times, slow_above_s)
        return None

    def _one(self) -> Diverged | None:
        """One step. The exchange after it is not timed, and lets all ranks start the next one together."""
        index = len(self.losses)
        self.progress.at_step(index)
        batches = self.trainer.batches(index)
        with self.clock.step():
            losses, norm = self.trainer.step(batches)
            self.host.after_step(index + 1)
        loss, norm, times = exchange(losses, norm, self.clock.latest(), self.trainer.device)
        self.times.append(times)
        self.losses.append(loss)
        self.grad_norms.append(norm)
        if math.isfinite(loss) and math.isfinite(norm):
            return None
        shown = tuple(value if math.isfinite(value) else None for value in self.losses)
        return Diverged(step=index, reason=f"loss {loss}, grad norm {norm}", losses=shown)

    def samples(self) -> list[StepSample]:
        """All steps so far, warm-up first."""
        tokens = self.trainer.job.training.tokens_per_step
        return [
            StepSample(
                step_time_s=wall,
                gpu_time_s=gpu[0] if gpu else None,
                tokens_per_s=tokens / wall,
                loss=loss,
                grad_norm=norm,
            )
            for (wall, *gpu), loss, norm in zip(self.times, self.losses, self.grad_norms, strict=True)
        ]


def _measured(
    job: TrialJob,
    progress: Progress,
    steps: _Steps,
    built: Built,
    effective: dict[str, KnobValue],
    evidence: tuple[Evidence, ...],
) -> Measured:
    samples, warm = steps.samples(), job.training.warmup_steps
    seconds = progress.seconds
    return Measured(
        steps=tuple(samples[warm:]),
        warmup=tuple(samples[:warm]),
        peak_memory_bytes=steps.memory.largest(),
        memory=steps.memory.peaks(),
        parameter_count=parameter_count(built.models),
        effective=effective,
        fingerprint=fingerprint(job.cluster.device),
        evidence=evidence,
        phases=PhaseTimes(build_s=seconds["build"], warmup_s=seconds["warmup"], measure_s=seconds["measure"]),
        timing=step_timing([sample.step_time_s for sample in samples[warm:]]),
        given_up=steps.slow,
        work=job.work,
    )


@contextmanager
def _model_parallel(job: TrialJob, progress: Progress) -> Iterator[None]:
    """Megatron's process groups for this layout; its globals are reset afterwards, so tests can run trials in a row."""
    layout = job.candidate.layout
    try:
        with progress.within("build"):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                virtual_pipeline_model_parallel_size=virtual_stages(job.candidate),
                context_parallel_size=layout.context,
                expert_model_parallel_size=layout.expert,
                expert_tensor_parallel_size=layout.expert_tensor,
                create_gloo_process_groups=False,
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()
        destroy_moe_metrics_tracker()
