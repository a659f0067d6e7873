"""Whether a plan fits a GPU: refused with the part that is too big and a cure, tried last, or welcome.

Memory is no rule of the decision diagram: it is a sum over almost every knob, so no two prefixes would ever be one
node. It judges whole candidates, after they were drawn (`MemoryJudge`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, islice
from typing import Literal

from search_spaces.candidate import Candidate, KnobValue, layout_of, modules
from search_spaces.errors import InputError
from search_spaces.memory.calibration import Calibration, stored
from search_spaces.memory.plan import MemoryPlan, StagePlan, plan_of
from search_spaces.memory.rows import expandable
from search_spaces.memory.shape import FactError
from search_spaces.presets import gpu_named
from search_spaces.rules.rule import Case
from search_spaces.shapes import ClusterShape, Noun

RULE = "MEM-01"
GIB = 2**30
State = Literal["fits", "tight", "refused"]
Change = Mapping[str, KnobValue]
PARTS = ("weights", "gradients", "optimizer", "activations", "workspace", "graphs")


class Fit(Noun):
    """`device_bytes` is what the most loaded GPU would use. "tight": within the calibration's error, tried last."""

    state: State
    device_bytes: int
    capacity_bytes: int
    stage: int
    part: str
    part_bytes: int
    cures: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """In the words of a rule's refusal: what is wrong; what to do."""
        sizes = f"{self.device_bytes / GIB:.1f} GiB predicted on a GPU of {self.capacity_bytes / GIB:.1f} GiB"
        most = f"most of it {self.part}, {self.part_bytes / GIB:.1f} GiB on stage {self.stage}"
        if self.state != "refused":
            close = "so close that the error of predictions decides: tried last" if self.state == "tight" else "it fits"
            return f"{sizes}, {most}; {close}"
        cure = f"set {' or '.join(self.cures)}" if self.cures else "no two knobs would make it fit: use more GPUs"
        return f"{sizes}, {most}; {cure}"


def parts_of(stage: StagePlan, calibration: Calibration, grows: bool = False) -> dict[str, int]:
    """Reserved bytes by part: PARTS. The allocator's slack is workspace."""
    return {
        "weights": stage.states.weights,
        "gradients": stage.states.gradients,
        "optimizer": stage.states.optimizer,
        "activations": stage.activations,
        "workspace": stage.workspace + calibration.slack(stage, grows),
        "graphs": calibration.pool(stage),
    }


def worst_of(plan: MemoryPlan, calibration: Calibration, grows: bool = False) -> StagePlan:
    """The stage that reserves most."""
    return max(plan.stages, key=lambda stage: calibration.reserved(stage, grows))


def capacity_of(cluster: ClusterShape) -> int | None:
    """Bytes of one GPU: as the cluster says, else the datasheet's figure for its GPU; None where neither is known."""
    if cluster.memory_bytes is not None:
        return cluster.memory_bytes
    if cluster.gpu_arch is None:
        return None
    try:
        return gpu_named(cluster.gpu_arch).memory_bytes
    except InputError:
        return None


def fits(plan: MemoryPlan, capacity_bytes: int, calibration: Calibration, grows: bool = False) -> Fit:
    """Refused where it would not fit even if the prediction were too high by the worst error seen; tight where it
    would not if it were too low by as much."""
    stage = worst_of(plan, calibration, grows)
    device = calibration.device(stage, grows)
    sizes = parts_of(stage, calibration, grows)
    part = max(sizes, key=lambda name: sizes[name])
    margin = calibration.margin(stage)
    state: State = "fits" if device * (1 + margin.low) <= capacity_bytes else "tight"
    if device * (1 - margin.high) > capacity_bytes:
        state = "refused"
    return Fit(
        state=state, device_bytes=device, capacity_bytes=capacity_bytes, stage=stage.stage, part=part,
        part_bytes=sizes[part],
    )  # fmt: skip


class MemoryJudge:
    """Judges candidates of one target. `facts` as for `LegalSpace`: its knobs are not looked at.

    Silent (None) where the capacity is unknown, on CPU, and where a candidate lacks a fact or makes no sense: other
    rules speak about those.
    """

    def __init__(self, facts: Case, calibration: Calibration | None = None) -> None:
        self.facts = facts
        self.calibration = stored() if calibration is None else calibration
        self.capacity_bytes = None if facts.on_cpu else capacity_of(facts.cluster)

    def judge(self, candidate: Candidate) -> Fit | None:
        """Whether it fits; without cures, which cost some dozens of plans."""
        return self._judge(replace(self.facts, knobs=candidate.knobs, env=candidate.env))

    def state(self, candidate: Candidate) -> State | None:
        """What `judge` says, in one word."""
        found = self.judge(candidate)
        return found.state if found else None

    def explain(self, candidate: Candidate, legal: Callable[[Case], bool] = lambda _: True) -> Fit | None:
        """`judge`, with the two cheapest changes that would make it fit. `legal` says which are allowed."""
        found = self.judge(candidate)
        if found is None or found.state != "refused":
            return found
        case = replace(self.facts, knobs=candidate.knobs, env=candidate.env)
        cures = self._cures(case, _singly_or_in_pairs(tuple(cures_of(case))), legal)
        return found.model_copy(update={"cures": tuple(islice(cures, 2))})

    def _cures(self, case: Case, changes: Iterable[Change], legal: Callable[[Case], bool]) -> Iterator[str]:
        for change in changes:
            changed = replace(case, knobs={**case.knobs, **change})
            better = self._judge(changed)
            if better is not None and better.state != "refused" and legal(changed):
                yield " with ".join(f"{name}={value}" for name, value in change.items())

    def _judge(self, case: Case) -> Fit | None:
        if self.capacity_bytes is None:
            return None
        try:
            plan = plan_of(case)
        except FactError:
            return None
        return fits(plan, self.capacity_bytes, self.calibration, expandable(case.env))


def _singly_or_in_pairs(changes: tuple[Change, ...]) -> list[Change]:
    """Changes and pairs of them by cost, taken as the place in `changes`; of two that cost as much, the single one."""
    ranked = [(place, 0, change) for place, change in enumerate(changes)]
    for (first, one), (second, two) in combinations(enumerate(changes), 2):
        if not set(one) & set(two):
            ranked.append((first + second + 1, 1, {**one, **two}))
    return [change for _, _, change in sorted(ranked, key=lambda each: each[:2])]


def cures_of(case: Case) -> Iterator[Change]:
    """Changes that save memory, the cheapest in time first (what each costs: the paper's tables, facts 1.3)."""
    knobs, layout = case.knobs, layout_of(case.knobs)
    if not knobs.get("use_distributed_optimizer"):
        yield {"use_distributed_optimizer": True}
    if knobs.get("recompute_granularity") != "full":
        chosen = modules(knobs.get("recompute_modules")) if knobs.get("recompute_granularity") == "selective" else ()
        for module in ("moe_act", "layernorm", "mla_up_proj", "moe"):
            wanted = "+".join(dict.fromkeys((*chosen, module)))
            if module not in chosen and (module != "moe_act" or knobs.get("moe_grouped_gemm")):
                yield {"recompute_granularity": "selective", "recompute_modules": wanted}
    size = case.integer("micro_batch_size", 1)
    while size > 1:
        size //= 2
        yield {"micro_batch_size": size}
    expert = layout.expert
    while case.world % (2 * expert * layout.expert_tensor * layout.pipeline) == 0:
        expert *= 2
        yield {"expert_model_parallel_size": expert}
    if knobs.get("recompute_granularity") != "full":
        yield {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    stages = layout.pipeline
    while case.world % (2 * stages * layout.tensor * layout.context) == 0:
        stages *= 2
        yield {"pipeline_model_parallel_size": stages}
    yield {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
