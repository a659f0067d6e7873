"""What happened to a trial. A failed trial is a value: stored, shown, and learned from.

`kind` is the discriminator in JSON. Times are seconds, memory is bytes, a step is one optimizer step.
"""

from typing import Annotated, Literal

from pydantic import Field

from search_spaces.candidate import KnobValue
from search_spaces.shapes import STACK_ADDED_LATER, Noun, Routing, StackVersions
from train_worker.profile import StepProfile
from train_worker.timing import StepTiming


class Fingerprint(Noun):
    """Stack and hardware as seen on the worker. Holds no host name and no user name."""

    stack: StackVersions
    python: str
    device: Literal["cpu", "cuda"]
    device_name: str = Field(description="GPU name, or the CPU's model name")
    driver: str | None = None
    compute_capability: str | None = None
    gpu_arch: str | None = Field(None, description='as a sweep file says it: "H200 sm_90"')
    unusable: dict[str, str] = Field(
        default_factory=dict, description="packages that are installed and cannot be used, with the reason"
    )

    @property
    def digest(self) -> str:
        """12 hex digits: equal for equal stacks and hardware; also to one that an earlier release of this project saw,
        unless there is a package that it did not ask for."""
        import hashlib

        newer = {name for name in STACK_ADDED_LATER if getattr(self.stack, name) is None}
        seen = self.model_dump_json(exclude={"unusable": True, "stack": newer})
        return hashlib.sha256(seen.encode()).hexdigest()[:12]


class StepSample(Noun):
    """One optimizer step. `loss` is the mean over the global batch; `tokens_per_s` is over all ranks.

    Times are the slowest rank's. `gpu_time_s` is between two CUDA events around the step on the current stream, so it
    holds the GPU's idle time too, but not the host's wait for the device to drain; None on a CPU.
    """

    step_time_s: float
    gpu_time_s: float | None = None
    tokens_per_s: float
    loss: float
    grad_norm: float


class Work(Noun):
    """What one step of a trial does, whatever the candidate: makes tokens/s and TFLOP/s of a step time."""

    ranks: int
    tokens_per_step: int
    flops_per_token: float = Field(description="model FLOPs (search_spaces.flops), of the model as it is trained")
    routing: Routing = Field(description="forced: the experts were balanced by force")

    def tokens_per_s_per_rank(self, step_time_s: float) -> float:
        return self.tokens_per_step / step_time_s / self.ranks

    def tflops_per_rank(self, step_time_s: float) -> float:
        """Model TFLOP/s of one rank: one GPU, where ranks have GPUs."""
        return self.tokens_per_s_per_rank(step_time_s) * self.flops_per_token / 1e12


class PhaseTimes(Noun):
    """Where a trial's wall time went on rank 0, seconds. All but `warmup_s` and `measure_s` is fixed cost.

    `launch_s` is what the launcher spent around the rank (hand-over, fork, collecting reports), seen from outside.
    """

    launch_s: float = 0.0
    import_s: float = 0.0
    process_group_s: float = 0.0
    build_s: float = 0.0
    warmup_s: float = 0.0
    measure_s: float = 0.0
    report_s: float = 0.0
    profile_s: float = 0.0

    @property
    def fixed_s(self) -> float:
        return self.launch_s + self.import_s + self.process_group_s + self.build_s + self.report_s + self.profile_s


class MemoryPeaks(Noun):
    """Peaks on a GPU, bytes, each the largest over the ranks: what torch handed out, what it holds, what the device has
    in use (the CUDA context, NCCL and other libraries included)."""

    allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int
    static_bytes: int = Field(description="allocated between steps: weights, gradients, optimizer state")


class Evidence(Noun):
    """One knob that was asked for, and what the run showed of it (`train_worker.evidence`)."""

    knob: str
    requested: KnobValue
    seen: str = Field(description="with the numbers")
    active: bool | None = Field(description="None: cannot be told here; `seen` says why")


class Measured(Noun):
    """The trial ran. `warmup` steps are kept for the guard (their losses) and are never timed into a score."""

    kind: Literal["measured"] = "measured"
    steps: tuple[StepSample, ...]
    warmup: tuple[StepSample, ...] = ()
    peak_memory_bytes: int = Field(description="largest over the ranks; on cpu the peak of live tensor bytes")
    memory: MemoryPeaks | None = Field(None, description="on cuda only")
    parameter_count: int = Field(description="of the whole model, each parameter once")
    effective: dict[str, KnobValue] = Field(description="read back from the objects that were built")
    fingerprint: Fingerprint
    phases: PhaseTimes
    evidence: tuple[Evidence, ...] = Field((), description="of what ran, by the whole gang; none in old records")
    profile: StepProfile | None = Field(None, description="of one step of rank 0, run after the measured ones")
    profile_error: str | None = Field(None, description="why there is no profile although one was asked for")
    timing: StepTiming | None = Field(None, description="of the measured steps' step_time_s; None in older records")
    given_up: bool = Field(False, description="slower than `TrialJob.slow_above_s` in each of its few steps")
    work: Work | None = Field(None, description="None in older records")

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(sample.loss for sample in self.warmup + self.steps)


class OutOfMemory(Noun):
    """`where`: device memory (torch, NCCL's disguises) or host memory (allocator, kernel OOM killer, Ray's monitor)."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    where: Literal["device", "host"]
    phase: str
    detail: str
    peak_memory_bytes: int | None = None


class Rejected(Noun):
    """Refused before it cost anything, or because what ran was not what was asked for. `rule` is a rule id."""

    kind: Literal["rejected"] = "rejected"
    rule: str
    reason: str
    evidence: tuple[Evidence, ...] = Field((), description='what the run showed, where the rule is "not-active"')


class Hung(Noun):
    """No end within the time limit; the gang was killed. `detail` holds the Python stacks where they could be had."""

    kind: Literal["hung"] = "hung"
    phase: str
    time_limit_s: float
    detail: str = ""


class Diverged(Noun):
    """NaN or infinite loss, or a loss away from the baseline on the same data."""

    kind: Literal["diverged"] = "diverged"
    step: int
    reason: str
    losses: tuple[float | None, ...] = ()


class Crashed(Noun):
    """Anything else. `infrastructure`: a lost node or a network fault, retried and never told to the sampler."""

    kind: Literal["crashed"] = "crashed"
    phase: str
    detail: str
    exit_code: int | None = None
    signal: int | None = None
    infrastructure: bool = False


Outcome = Annotated[
    Measured | OutOfMemory | Rejected | Hung | Diverged | Crashed,
    Field(discriminator="kind"),
]
