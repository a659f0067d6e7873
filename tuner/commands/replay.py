"""`moetune replay`: a search strategy on a table of recorded trials. No GPU, no Ray, no MLflow."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.errors import Fault, InputError, NothingAcceptable
from search_spaces.space import nearest
from train_worker.recorded_table import RecordedTable
from train_worker.replay import Replay
from tuner.replay import Reached, ReplayResult, Spread, compete
from tuner.replay_strategies import STRATEGIES

MOST_SEEDS = 10_000  # each search is kept in memory, and a search takes milliseconds (random) to seconds (tpe)


def replay(table: Path, strategy: str, trials: int, seeds: int) -> ReplayResult:
    """Play one strategy with `seeds` seeds, `trials` trials each.

    Raises InputError for wrong numbers, an unknown strategy or a table that cannot be read, NothingAcceptable where
    nothing in the table ran.
    """
    faults = [Fault(f"--{name} {n}: at least 1") for name, n in (("trials", trials), ("seeds", seeds)) if n < 1]
    if seeds > MOST_SEEDS:
        faults.append(Fault(f"--seeds {seeds}: at most {MOST_SEEDS:,}"))
    if strategy not in STRATEGIES:
        faults.append(Fault(f"no strategy {strategy!r}", hint=nearest(strategy, list(STRATEGIES))))
    if faults:
        raise InputError(faults, "moetune replay --help")
    recorded = RecordedTable.read(table)
    if not any(row.measured for row in recorded.rows):
        raise NothingAcceptable(f"no trial of {table} ran to its end", "record others")
    return compete(Replay(recorded), strategy, STRATEGIES, trials, seeds)


def render(found: ReplayResult, console: Console) -> None:
    """Print a result for people."""
    reached = found.trials_to_within_2_percent
    table = Table("", "mean", "p90", title=Text(f"{found.strategy} on {found.table}"), title_justify="left")
    table.add_row("regret", *_percents(found.regret_percent))
    table.add_row("trials to within 2%", *_counts(reached))
    console.print(table)
    lines = (
        f"{found.seeds} searches of at most {found.trials} trials over {found.configurations} configurations; "
        f"{reached.never} never came within 2%",
        f"best {found.best_id} at {found.best_step_time_s * 1000:.1f} ms a step, noise-adjusted; "
        f"the default is {found.default_regret_percent:.1f}% slower",
        f"repeats of one configuration scatter by {found.noise_percent:.1f}% (one standard deviation)",
        f"a search takes {found.seconds_spent:.0f} s of worker time, {found.seconds_wasted:.0f} s of it in trials that "
        "did not run",
    )
    for line in lines:
        console.print(Text(line))


def _percents(spread: Spread) -> tuple[str, ...]:
    return tuple("nothing ran" if n is None else f"{n:.2f}%" for n in (spread.mean, spread.p90))


def _counts(spread: Reached) -> tuple[str, ...]:
    return tuple(f"{n:.1f}" for n in (spread.mean, spread.p90) if n is not None)
