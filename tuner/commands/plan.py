"""`moetune plan`: what a sweep would try, and why the rest is refused. No GPU, no worker, no torch."""

from itertools import islice

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.blocking import Blocking, by_fact, most_blocking
from search_spaces.candidate import Candidate
from search_spaces.rules import case_of
from search_spaces.screen import Refusal, screen, verdict
from search_spaces.shapes import Noun
from tuner.sweep import LoadedSweep, stack_warnings

FIRST_SHOWN, FACTS_SHOWN = 10, 5


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
    trials: int = Field(description="the budget, or all legal points where they are fewer")
    warnings: tuple[str, ...] = Field(description="what could be judged only by the nearest rule set")
    worker_hours_at_most: float = Field(description="trials x time limit x ranks; the search usually takes far less")


def plan(loaded: LoadedSweep) -> PlanResult:
    """Screen the space of a sweep. Raises InputError where it has more legal points than a search can hold."""
    spec = loaded.spec
    screening = screen(loaded.space, loaded.model, spec.cluster, spec.training, spec.stack)
    default = loaded.space.default()
    refused = verdict(case_of(default, loaded.model, spec.cluster, spec.training, spec.stack))
    trials = min(spec.budget.trials, screening.count)
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
        first=tuple(islice(screening, FIRST_SHOWN)),
        trials=trials,
        warnings=stack_warnings(spec),
        worker_hours_at_most=trials * spec.budget.trial_time_limit_s * spec.cluster.workers_per_trial / 3600,
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
    console.print(f"First of the {found.accepted:,} legal ones:", highlight=False)
    for candidate in found.first:
        console.print(f"  {candidate.id}  {candidate.label(found.default)}", markup=False, highlight=False)
    console.print(
        f"Budget: {found.trials} trials, at most {found.worker_hours_at_most:.2f} worker-hours if each took its limit",
        highlight=False,
    )


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
