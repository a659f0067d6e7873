"""`moetune memory`: bytes per GPU by part for explicit configurations, before anything runs. No GPU, no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, RootModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.candidate import Candidate
from search_spaces.errors import Fault
from search_spaces.explicit import Explicit, read_case
from search_spaces.explicit_knobs import CaseFault, shown
from search_spaces.memory.calibration import Calibration, stored
from search_spaces.memory.fits import MemoryJudge, State, parts_of, worst_of
from search_spaces.memory.plan import MemoryPlan, Moment, StagePlan, plan_of
from search_spaces.memory.rows import expandable
from search_spaces.memory.shape import FactError, missing_facts
from search_spaces.partial import UnknownFact
from search_spaces.rules import Case, rules_for
from search_spaces.shapes import Noun
from tuner.check_file import read_check_file
from tuner.commands.check import shown_id

GIB = 2**30


class StageBytes(Noun):
    """One pipeline stage. `moment`: when its peak is; `activations` by part of a layer, `transient` beside them."""

    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    graph_bytes: int
    total_bytes: int
    device_bytes: int
    parameters: dict[str, int]
    activations: dict[str, int]
    moment: Moment


class MemoryBytes(Noun):
    """The most loaded rank of one configuration; `total_bytes` compares with torch.cuda.max_memory_reserved().

    `error` says why there is no plan; then every number is None.
    """

    id: str
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    workspace_bytes: int | None = Field(None, description="GEMM workspaces and the allocator's slack")
    graph_bytes: int | None = None
    total_bytes: int | None = None
    per_stage: tuple[StageBytes, ...] = ()
    device_bytes: int | None = Field(None, description="with the CUDA context and communicators: what nvidia-smi shows")
    balanced_total_bytes: int | None = Field(None, description="total_bytes, were every expert rank equally loaded")
    assumed_load: float | None = Field(None, description="most loaded expert rank over the mean")
    margin_bytes: int | None = Field(None, description="the worst error seen of the calibration, at this size")
    fit: State | None = Field(None, description="None where the GPU's memory is unknown")
    reason: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None


class MemoryResult(RootModel[tuple[MemoryBytes, ...]]):
    """In the order of the file. `faults` lists the configurations without a plan."""

    _faults: tuple[Fault, ...] = ()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults


def memory(file: Path, calibration: Calibration | None = None) -> MemoryResult:
    """Plan every configuration in a JSON or YAML file. Raises InputError where the file itself cannot be read."""
    given = read_check_file(file)
    factors = stored() if calibration is None else calibration
    plans, faults = [], []
    for number, raw in enumerate(given.cases, start=1):
        found, wrong = _planned(raw, number, factors)
        plans.append(found)
        for fault in wrong:
            line = given.line_of(number, fault.key)
            faults.append(Fault(f"{shown_id(found.id)}: {fault.message}", given.path, line, hint=fault.hint))
    result = MemoryResult(tuple(plans))
    result._faults = tuple(faults)
    return result


def _planned(raw: Any, number: int, factors: Calibration) -> tuple[MemoryBytes, tuple[CaseFault, ...]]:
    """The plan; or the error, and what is wrong with which word."""
    if not isinstance(raw, Mapping):
        fault = CaseFault("", f"a configuration must be a mapping, not {shown(raw)}")
        return MemoryBytes(id=str(number), error=fault.message), (fault,)
    explicit = read_case(raw, number)
    faults = explicit.faults if explicit.case is None else _missing(explicit.case)
    if explicit.case is not None and not faults:
        try:
            return _bytes_of(explicit, explicit.case, factors), ()
        except FactError as error:
            faults = (CaseFault(error.field, str(error), "correct it in model or knobs"),)
    words = "; ".join(f"{fault.message} ({fault.hint})" if fault.hint else fault.message for fault in faults)
    return MemoryBytes(id=explicit.id, error=words, warnings=explicit.warnings), faults


def _missing(case: Case) -> tuple[CaseFault, ...]:
    """Facts that the plan needs and the configuration does not give."""
    found = [
        CaseFault(name, f"model.{name} is missing, and the plan needs it", "give it in model, or a preset's name")
        for name in missing_facts(case.model)
    ]
    try:
        _ = case.training.sequence_length
    except UnknownFact:
        found.append(CaseFault("seq_length", "seq_length is missing, and the plan needs it", "give it in knobs"))
    return tuple(found)


def _bytes_of(explicit: Explicit, case: Case, factors: Calibration) -> MemoryBytes:
    plan, grows = plan_of(case), expandable(case.env)
    worst = worst_of(plan, factors, grows)
    stages = tuple(_stage(stage, factors, grows) for stage in plan.stages)
    most = stages[worst.stage]
    broken = _broken(case)
    judged = MemoryJudge(case, factors).explain(
        Candidate(knobs=dict(case.knobs), env=dict(case.env)),
        lambda changed: _broken(changed) <= broken,  # advice may break no rule that the configuration does not
    )
    named = ("weights", "gradients", "optimizer", "activations", "workspace", "graph", "total", "device")
    return MemoryBytes.model_validate(
        {
            "id": explicit.id,
            **{f"{name}_bytes": getattr(most, f"{name}_bytes") for name in named},
            "per_stage": stages,
            "balanced_total_bytes": _balanced(case, plan, factors, grows),
            "assumed_load": plan.load,
            "margin_bytes": round(most.device_bytes * factors.margin(worst).low),
            "fit": judged.state if judged else None,
            "reason": judged.reason if judged and judged.state != "fits" else "",
            "warnings": (*_refused(broken), *explicit.warnings, *_assumed(case, plan)),
        }
    )


def _refused(broken: frozenset[str]) -> tuple[str, ...]:
    """That the configuration cannot run anyway, where `check` says so."""
    return (f"it cannot run: {', '.join(sorted(broken))} (see `moetune check`)",) if broken else ()


def _broken(case: Case) -> frozenset[str]:
    """The rules of the stack that refuse a case. One that stumbles over a word of this configuration is left out."""
    broken = set[str]()
    for rule in rules_for(case.launchers, case.stack.megatron_core if case.stack else None, worker=False):
        try:
            refused = not rule.id.startswith("DUP") and rule.refusal(case) is not None
        except (ValueError, TypeError, ArithmeticError, AttributeError):
            continue
        broken.update({rule.id} if refused else ())
    return frozenset(broken)


def _stage(stage: StagePlan, factors: Calibration, grows: bool) -> StageBytes:
    parts = parts_of(stage, factors, grows)
    return StageBytes(
        stage=stage.stage,
        weights_bytes=parts["weights"],
        gradients_bytes=parts["gradients"],
        optimizer_bytes=parts["optimizer"],
        activations_bytes=parts["activations"],
        workspace_bytes=parts["workspace"],
        graph_bytes=parts["graphs"],
        total_bytes=sum(parts.values()),
        device_bytes=factors.device(stage, grows),
        parameters=stage.parameters._asdict(),
        activations={**stage.active.saved._asdict(), "transient": stage.active.transient},
        moment=stage.active.moment,
    )


def _balanced(case: Case, plan: MemoryPlan, factors: Calibration, grows: bool) -> int:
    even = plan if plan.load == 1 else plan_of(case, load=1.0)
    return factors.reserved(worst_of(even, factors, grows), grows)


def _assumed(case: Case, plan: MemoryPlan) -> list[str]:
    """What the plan takes for granted and the configuration does not say."""
    found = []
    if case.knobs.get("micro_batch_size") is None:
        found.append("micro_batch_size is not said: 1")
    if plan.load > 1 and not case.knobs.get("moe_expert_capacity_factor"):
        found.append(f"natural routing: the most loaded expert rank is assumed to get {plan.load:.2f} times the mean")
    if case.world > 2:
        found.append("buffers of communicators were measured between two ranks only")
    return found


def render(found: MemoryResult, console: Console) -> None:
    """Print plans for people, in GiB."""
    names = ("weights", "gradients", "optimizer", "activations", "workspace", "graph", "total", "device")
    table = Table("configuration", *names, "fits", "notes")
    for plan in found.root:
        sizes = [getattr(plan, f"{name}_bytes") for name in names]
        cells = ["" if size is None else f"{size / GIB:.2f}" for size in sizes]
        notes = [plan.error or plan.reason, *plan.warnings]
        table.add_row(plan.id, *cells, plan.fit or "", Text("\n".join(filter(None, notes))))
    console.print(table)
    console.print("GiB on the most loaded GPU; total compares with torch.cuda.max_memory_reserved", highlight=False)
