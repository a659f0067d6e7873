"""What a worker is asked to do: one trial, complete in itself, sent as JSON."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from search_spaces.candidate import Candidate
from search_spaces.flops import as_trained, flops_per_token
from search_spaces.shapes import ClusterShape, ModelShape, Noun, TrainingShape
from train_worker.outcome import Work


class TrialJob(Noun):
    """One trial. Every rank of the gang gets the same job; what differs per rank is in `RankPlace`."""

    trial_id: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    candidate: Candidate
    model: ModelShape
    cluster: ClusterShape
    training: TrainingShape
    seed: int
    environment_knobs: tuple[str, ...] = Field(
        (), description="variables that the sweep's space searches over: a rank has them only as its candidate says"
    )
    profile: bool = Field(True, description="run one more step under the profiler, after the measured ones")
    keep_trace: bool = Field(False, description="bring the profiled step back as a trace that Chrome opens")
    slow_above_s: PositiveFloat | None = Field(
        None, description="a step time: where the first measured steps are all slower, no others are run"
    )
    time_limit_s: PositiveFloat = Field(description="from fork to report, all phases; then the rank is killed: Hung")

    @property
    def world_size(self) -> int:
        return self.cluster.workers_per_trial

    @property
    def work(self) -> Work:
        """What a step of this job does. ValueError where the model lacks a size that its FLOPs need."""
        return Work(
            ranks=self.world_size,
            tokens_per_step=self.training.tokens_per_step,
            flops_per_token=flops_per_token(as_trained(self.model), self.training.sequence_length),
            routing=self.training.routing,
        )


class RankPlace(Noun):
    """Where one rank process stands in its gang, and how the gang meets (a torch TCPStore at host:port)."""

    rank: int = Field(ge=0)
    local_rank: int = Field(ge=0)
    world_size: PositiveInt
    master_host: str
    master_port: int = Field(ge=0, description="0 on rank 0: pick a free one and announce it")
    first_on_gpu: bool = Field(True, description="false: a rank of the same trial is on its GPU already")


class Order(Noun):
    """What a waiting rank is told: run this attempt, ask again, or stop serving."""

    verb: Literal["run", "wait", "stop"]
    attempt_id: str = ""
    job: TrialJob | None = None


Phase = Literal["fork", "import", "process_group", "build", "warmup", "measure", "report", "profile"]
