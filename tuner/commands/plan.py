"""`moetune plan`: what a sweep would try, and why the rest is refused. No GPU, no worker, no torch."""

import math
import random
from collections import Counter
from itertools import islice

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.blocking import Blocking, by_fact, most_blocking
from search_spaces.candidate import Candidate
from search_spaces.legal import LegalSpace
from search_spaces.memory.fits import RULE, Fit, MemoryJudge
from search_spaces.rules import case_of
from search_spaces.screen import Refusal, screen, verdict
from search_spaces.shapes import Noun
from tuner.cpu_memory import shortage_of
from tuner.finalists import most_finalists
from tuner.sweep import LoadedSweep
from tuner.sweep_warnings import warnings_of

FIRST_SHOWN, FACTS_SHOWN = 10, 5
DRAWS, DRAW_SEED = 1000, 0


class PlannedMemory(Noun):
    """Whether legal points fit a GPU: a sample of them, drawn with a fixed seed; the default's verdict and cure."""

    drawn: int
    fits: int
    tight: int = Field(description="within the error of predictions: tried last")
    refused: int
    too_big: dict[str, int] = Field(description="of the refused, by the largest part")
    capacity_bytes: int
    error: float = Field(description="worst error of the calibration on rows it had not seen")
    default: Fit | None


class PlanResult(Noun):
    """The space before any worker starts. `rejected` by count, largest first; `first` with the default ahead."""

    sweep: str
    space: str
    model: str
    total: int = Field(description="points of the space")
    accepted: int = Field(description="of them legal")
    rejected: tuple[Refusal, ...]
    blocking: tuple[Blocking, ...] = Field(description="the ten rules that refuse most, and the facts they look at")
    by_fact: dict[str, int] = Field(description="points refused by rules that look at a fact of the target")
    default: Candidate
    default_refused: str | None = Field(description="why the default cannot run; None where it can")
    first: tuple[Candidate, ...]
    memory: PlannedMemory | None = Field(None, description="None on CPU, and where the GPU is not known")
    trials: int = Field(description="the budget, or all legal points where they are fewer")
    warnings: tuple[str, ...] = Field(description="releases that only the nearest rule set could judge, rounds, memory")
    worker_hours_at_most: float = Field(
        description="trials x time limit x ranks, or budget.worker_hours where less; the search usually takes far less"
    )
    finalists_at_most: int = Field(description="that are verified")
    verify_hours_at_most: float = Field(description="the same for finalists and default, verify.rounds times each")


def plan(loaded: LoadedSweep) -> PlanResult:
    """Screen the space of a sweep. Raises InputError where it has more legal points than a search can hold."""
    spec = loaded.spec
    screening = screen(loaded.space, loaded.model, spec.cluster, spec.training, spec.stack)
    default = loaded.space.default()
    refused = verdict(case_of(default, loaded.model, spec.cluster, spec.training, spec.stack))
    trials = min(spec.budget.trials, screening.count)
    hours = spec.budget.trial_time_limit_s * spec.cluster.workers_per_trial / 3600
    finalists = min(most_finalists(spec), max(trials - 1, 1))  # one trial is the default's
    judge = MemoryJudge(screening.facts)
    scanned = islice(screening, DRAWS)
    return PlanResult(
        sweep=spec.name,
        space=loaded.space.name,
        model=loaded.model.name,
        total=screening.total,
        accepted=screening.count,
        rejected=screening.refusals,
        blocking=most_blocking(screening),
        by_fact=by_fact(screening),
        default=default,
        default_refused=f"{refused.reason} [{refused.rule}]" if refused else None,
        first=tuple(islice((each for each in scanned if judge.state(each) != "refused"), FIRST_SHOWN)),
        memory=_memory(screening, judge, default),
        trials=trials,
        warnings=warnings_of(spec, spec.stack, shortage_of(loaded, spec.launch.address)),
        worker_hours_at_most=min(trials * hours, spec.budget.worker_hours or math.inf),
        finalists_at_most=finalists,
        verify_hours_at_most=(1 + finalists) * spec.verify.rounds * hours,
    )


def _memory(screening: LegalSpace, judge: MemoryJudge, default: Candidate) -> PlannedMemory | None:
    if judge.capacity_bytes is None or not screening.count:
        return None
    source = random.Random(DRAW_SEED)
    drawn = [screening.draw(source) for _ in range(DRAWS)]
    judged = [fit for each in drawn if (fit := judge.judge(each))]
    states = Counter(fit.state for fit in judged)
    factors = judge.calibration
    unseen = [factors.held_out, factors.other_shapes, factors.other_runs]
    if factors.exchanging and any(each.layout.expert > 1 for each in (default, *drawn)):
        unseen.append(factors.exchanging)
    return PlannedMemory(
        drawn=len(judged),
        fits=states["fits"],
        tight=states["tight"],
        refused=states["refused"],
        too_big=dict(Counter(fit.part for fit in judged if fit.state == "refused").most_common()),
        capacity_bytes=judge.capacity_bytes,
        error=max(part.worst for part in unseen),
        default=judge.explain(default, lambda case: verdict(case, screening.rules) is None),
    )


def render(found: PlanResult, console: Console) -> None:
    """Print a plan for people."""
    share = found.accepted / found.total
    console.print(
        f"Sweep {found.sweep}: space {found.space} of {found.total:,} points on {found.model}; "
        f"{found.accepted:,} can run here ({share:.2%})",
        highlight=False,
    )
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)
    if found.rejected:
        _render_refused(found, console)
    settings = " ".join(f"{name}={value}" for name, value in found.default.knobs.items())
    state = "can run" if found.default_refused is None else f"cannot run: {found.default_refused}"
    console.print(f"Default configuration ({state}): {settings}", markup=False, highlight=False)
    if found.memory is not None:
        _render_memory(found.memory, console)
    console.print(f"First of the {found.accepted:,} legal ones:", highlight=False)
    for candidate in found.first:
        console.print(f"  {candidate.id}  {candidate.label(found.default)}", markup=False, highlight=False)
    console.print(
        f"Budget: {found.trials} trials, at most {found.worker_hours_at_most:.2f} worker-hours if each took its limit, "
        f"and {found.verify_hours_at_most:.2f} to verify {_count(found.finalists_at_most)}",
        highlight=False,
    )


def _count(finalists: int) -> str:
    return "the winner" if finalists == 1 else f"the best {finalists}"


def _render_memory(memory: PlannedMemory, console: Console) -> None:
    share = memory.fits / memory.drawn if memory.drawn else 0.0
    parts = ", ".join(f"{part} {count}" for part, count in memory.too_big.items())
    refused = f"{memory.refused} refused [{RULE}] (largest part: {parts})" if memory.refused else "none refused"
    console.print(
        f"Memory: of {memory.drawn:,} legal points drawn {memory.fits:,} fit ({share:.1%}), {memory.tight} are tight, "
        f"{refused}; predictions were off by {memory.error:.1%} at worst",
        markup=False,
        highlight=False,
    )
    if memory.default is not None:
        console.print(f"Default's memory: {memory.default.reason}", markup=False, highlight=False)


def _render_refused(found: PlanResult, console: Console) -> None:
    """The rules that take most away; "alone" is what would become legal if only that rule were lifted."""
    table = Table("points", "alone", "rule", "why, and what to do", title="Most blocking", title_justify="left")
    for blocking in found.blocking:
        alone = "" if blocking.alone is None else f"{blocking.alone:,}"
        facts = ", ".join(f"{name}={value}" for name, value in blocking.facts.items())
        words = f"{blocking.reason}\n{facts}" if facts else blocking.reason
        table.add_row(f"{blocking.count:,}", alone, blocking.rule, Text(words))
    console.print(table)
    if more := found.rejected[len(found.blocking) :]:
        points = sum(refusal.count for refusal in more)
        console.print(f"{len(more)} more rules refuse {points:,} points; --json lists them", highlight=False)
    facts = "; ".join(f"{fact}: {count:,}" for fact, count in list(found.by_fact.items())[:FACTS_SHOWN])
    if facts:
        console.print(f"Points refused because of a fact: {facts}", markup=False, highlight=False)
