"""The nouns of a rule: what it sees (`Case`) and what it is (`Rule`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from search_spaces.candidate import Candidate, KnobValue, Layout, layout_of, modules
from search_spaces.partial import PartialModel, UnknownFact
from search_spaces.rules.versions import older
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions, TrainingShape

Launcher = Literal["megatron-core", "megatron-lm", "megatron-bridge"]
# Where the stack itself notices. "runtime risk": it may or may not fail there, so the case is valid, with a warning.
Level = Literal["config", "build", "first step", "runtime risk"]

WORLD = frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"})
EXPERT_GRID = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    }
)


@dataclass(frozen=True)
class Case:
    """One candidate on one cluster. `knobs` and `env` hold what is decided; an absent knob is at Megatron's default.

    `stack` None: the target's versions are unknown, and rules about versions keep silent. Rules of one launcher only
    speak where it is among `launchers`. `model` and `training` may be partial: reading an absent fact raises
    UnknownFact, and the rule that wanted it keeps silent.
    """

    knobs: Mapping[str, KnobValue]
    model: ModelShape
    cluster: ClusterShape
    training: TrainingShape
    env: Mapping[str, str] = field(default_factory=dict)
    stack: StackVersions | None = None
    launchers: frozenset[Launcher] = frozenset()

    @property
    def dense(self) -> bool:
        """A model without experts: only explicit cases (`check`) can have one."""
        return isinstance(self.model, PartialModel) and self.model.dense

    @cached_property
    def layout(self) -> Layout:  # 40 rules ask for it: a third of the time of `check`
        return layout_of(self.knobs)

    @property
    def world(self) -> int:
        """Ranks of one trial."""
        return self.cluster.workers_per_trial

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks of the dense part; 0 where TP x CP x PP does not divide the world."""
        return self.layout.data(self.world)

    @property
    def expert_data_parallel(self) -> int:
        """Data-parallel ranks of the experts; 0 where ETP x EP x PP does not divide the world."""
        layout = self.layout
        ranks = layout.expert_tensor * layout.expert * layout.pipeline
        return 0 if self.world % ranks else self.world // ranks

    @property
    def microbatches(self) -> int:
        """Micro-batches a rank runs per step; 0 where the global batch does not divide."""
        if (given := self.knobs.get("num_microbatches")) is not None:
            return int(given)
        per_wave = self.integer("micro_batch_size", 1) * self.data_parallel
        return 0 if not per_wave or self.training.global_batch_size % per_wave else (
            self.training.global_batch_size // per_wave
        )  # fmt: skip

    @cached_property
    def compute_capability(self) -> tuple[int, int] | None:
        """(9, 0) for "H100 sm_90"; None without a GPU."""
        return compute_capability(self.cluster.gpu_arch)

    @property
    def on_cpu(self) -> bool:
        return self.cluster.device == "cpu"

    def integer(self, knob: str, default: int) -> int:
        """An integer knob; `default` where it is absent or None."""
        value = self.knobs.get(knob)
        return default if value is None else int(value)

    def text(self, knob: str, default: str = "") -> str:
        """A word knob; `default` where it is absent or None."""
        value = self.knobs.get(knob)
        return default if value is None else str(value)

    def number(self, knob: str, default: float) -> float:
        """A numeric knob; `default` where it is absent or None."""
        value = self.knobs.get(knob)
        return default if value is None else float(value)

    def on(self, knob: str) -> bool:
        """A switch; off where absent."""
        return bool(self.knobs.get(knob))

    def parts(self, knob: str) -> tuple[str, ...]:
        """A list-valued knob, split; () where absent."""
        return modules(self.knobs.get(knob))


def compute_capability(gpu_arch: str | None) -> tuple[int, int] | None:
    """Major and minor out of "H100 sm_90" or "RTX PRO 6000 sm_120"; None where the text names none."""
    digits = (gpu_arch or "").rpartition("sm_")[2].rstrip("af")
    return (int(digits[:-1]), int(digits[-1])) if digits.isdecimal() and len(digits) > 1 else None


@dataclass(frozen=True)
class Rule:
    """One reason to refuse. `check` is pure, reads only the knobs (and environment variables) in `reads`, and says what
    is wrong or None; `fix` says what to do; `source` is where the reason was found.

    It holds for the launchers named (none named: for all, and for this project's own worker), and for megatron-core
    from release `since` up to, not including, release `until` ("": no bound).
    """

    id: str
    reads: frozenset[str]
    check: Callable[[Case], str | None]
    source: str
    fix: str
    level: Level = "config"
    launchers: frozenset[Launcher] = frozenset()
    since: str = ""
    until: str = ""

    def refusal(self, case: Case) -> str | None:
        """What is wrong and the cure, or None. Also None where the case lacks a fact that the rule needs."""
        try:
            what = self.check(case)
        except UnknownFact:
            return None
        return f"{what}; {self.fix}" if what else None

    def concerns(self, launchers: frozenset[Launcher], megatron_core: str | None) -> bool:
        """Whether it belongs to one of the launchers and to this release ("0.19.2"; None: the newest known)."""
        if self.launchers and not self.launchers & launchers:
            return False
        if megatron_core is None:
            return not self.until
        since, until = self.since, self.until
        return not (since and older(megatron_core, since)) and not (until and not older(megatron_core, until))


class Verdict(NamedTuple):
    """Why one candidate is refused."""

    rule: str
    reason: str
    level: Level = "config"


def case_of(
    candidate: Candidate,
    model: ModelShape,
    cluster: ClusterShape,
    training: TrainingShape,
    stack: StackVersions | None = None,
) -> Case:
    """The case of one explicit candidate."""
    return Case(candidate.knobs, model, cluster, training, candidate.env, stack)
