"""The leaderboard on a terminal: the verdict first, in words; then the ranking, the failures, the costs."""

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tuner.leaderboard import Costs, Leaderboard
from tuner.proof import proof_table
from tuner.ranking import Failure, Row
from tuner.walls import wall_line

MOST_ROWS = 20
MOST_FAILURES = 15
WIDE = 100  # columns of the terminal
TIGHT = (0, 1, 0, 0)  # top, right, bottom, left: seven columns fit a plain terminal of 80
PHASES = {
    "launch_s": "launch",
    "import_s": "import",
    "process_group_s": "process group",
    "build_s": "build",
    "warmup_s": "warm-up",
    "measure_s": "measured steps",
    "report_s": "report",
    "profile_s": "profiled step",
}


def render(board: Leaderboard, console: Console) -> None:
    """Print a leaderboard. Everything that came from a file or a trial is printed as it is, never as markup."""
    colour = {"faster": "bold green", "none": "bold red", "slower": "yellow"}.get(board.verdict.kind, "bold")
    console.print(Text(board.verdict.words, style=colour))
    for line in board.verdict.others:
        console.print(Text(line))
    console.print(Text(heading(board), style="dim"))
    if board.rows:
        console.print(_ranking(board, console.width))
        console.print(Text(legend(board), style="dim"))
        for line in [*remark_lines(board), *map(wall_line, board.walls)]:
            console.print(Text(line))
    if board.evidence:
        console.print(proof_table(board.evidence))
        console.print(Text(unwatched_line(board), style="dim"))
    if board.failures:
        console.print(_failures(board))
    if board.rejected:
        console.print(_rejections(board))
    for line in cost_lines(board.costs):
        console.print(Text(line))


def unwatched_line(board: Leaderboard) -> str:
    """Knobs of the winner that no counter and no kernel speaks of; "" where there is none."""
    seen = {row.knob for row in board.evidence}
    winner = next((row for row in board.rows if row.winner), None)
    left = [name for name in (winner.differs if winner else ()) if name not in seen]
    return f"Not watched as it ran, read back from what was built: {', '.join(left)}." if left else ""


def heading(board: Leaderboard) -> str:
    """Which sweep this is and what it tried."""
    measured, failed = len(board.rows), len(board.failures)
    text = f"{board.sweep_name}/{board.run_name}: configurations measured: {measured}, trials failed: {failed}"
    if board.space_total is not None:
        text += f"; {board.space_accepted} of {board.space_total} points of the space can run here"
    routing = sorted({row.routing for row in board.rows if row.routing})
    text += f"; {' and '.join(routing)} routing in the search" if routing else ""
    return f"{text}; seed {board.seed}"


def legend(board: Leaderboard) -> str:
    """How to read the ranking."""
    floor = "No configuration was repeated, so the noise floor is unknown"
    if board.noise_floor is not None:
        floor = f"Noise floor {board.noise_floor:.1%} (two trials of one configuration differ by less in 95% of cases)"
    text = (
        "Intervals: 95%, of the median step. Ranks with = cannot be told from the leader by these single trials; "
        f"the verdict rests on the interleaved rounds. {floor}."
    )
    if len(board.fingerprints) > 1:
        text += f" CAUTION: trials ran on {len(board.fingerprints)} different stacks; they are not comparable."
    return text


def remark_lines(board: Leaderboard) -> list[str]:
    """What is odd about the step times of the leader, the winner and the default."""
    shown = [row for row in board.rows if row.remarks and (row.rank == 1 or row.winner or row.default)]
    lines = [f"Step times of {row.label}: {remark}" for row in shown for remark in row.remarks]
    others = sum(bool(row.remarks) for row in board.rows) - len(shown)
    noun = "another row has" if others == 1 else f"{others} other rows have"
    return [*lines, f"Step times: {noun} outliers, drift or two speeds; see `remarks` in --json."] if others else lines


def cost_lines(costs: Costs) -> list[str]:
    """What the trials cost, most of all outside training."""
    if not costs.trials:
        return ["No trial was run."]
    lines = [
        f"{costs.trials} trials in {seconds(costs.elapsed_s)} ({seconds(costs.wall_s)} summed, "
        f"{seconds(costs.training_s)} of it training steps), retries: {costs.retries}"
    ]
    if costs.fixed_median_s is not None:
        training = ("warmup_s", "measure_s")
        parts = [f"{PHASES[k]} {v:.2f}" for k, v in costs.phase_medians_s.items() if k not in training]
        lines.append(f"Per trial outside training: {costs.fixed_median_s:.2f} s in the median ({', '.join(parts)} s)")
    return lines


def seconds(value: float) -> str:
    """Seconds for people: "4.2 s", "3 min 05 s", "2 h 10 min"."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def milliseconds(value_s: float) -> str:
    """Seconds as milliseconds with four digits, or all before the point: "148.6", "4,588"."""
    value = value_s * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


def per_rank(row: Row) -> tuple[str, str]:
    """Tokens/s and model TFLOP/s of one rank; empty where a record does not tell."""
    tokens, tflops = row.tokens_per_s_per_rank, row.tflops_per_rank
    if tokens is None or tflops is None:
        return "", ""
    return f"{tokens:,.0f}", f"{tflops:,.0f}" if tflops >= 100 else f"{tflops:.3g}"


def place(row: Row) -> str:
    """Rank as shown: "1", "=2" where tied with the leader, with a star for the winner."""
    return f"{'=' if row.tied and row.rank > 1 else ''}{row.rank}{' *' if row.winner else ''}"


def _ranking(board: Leaderboard, width: int) -> Table:
    """A wide terminal gets the throughput of one rank too."""
    wide = width >= WIDE and any(row.tflops_per_rank is not None for row in board.rows)
    table = Table(title="Ranking (* what to use)", title_justify="left", box=SIMPLE_HEAD, padding=TIGHT)
    table.add_column("#", justify="right")
    table.add_column("differs from the default by", overflow="fold", min_width=18)
    throughput = (f"tokens/s/{board.unit}", f"TFLOP/s/{board.unit}") if wide else ("tokens/s",)
    for name in ("step ms", "95% interval", *throughput, "peak MiB", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = [row for row in board.rows if row.rank <= MOST_ROWS or row.default or row.winner]
    for row in shown:
        table.add_row(
            place(row),
            Text(row.shown),
            milliseconds(row.step_time_s),
            f"{milliseconds(row.step_time_low_s)}-{milliseconds(row.step_time_high_s)}",
            *(per_rank(row) if wide else (f"{row.tokens_per_s:,.0f}",)),
            f"{row.peak_memory_bytes / 2**20:,.1f}",
            f"{row.speed:.3f}x" if row.speed else "",
            style="bold" if row.winner else None,
        )
    if len(shown) < len(board.rows):
        table.caption = f"{len(board.rows) - len(shown)} slower rows left out; all are in --json and in the HTML report"
    return table


def _failures(board: Leaderboard) -> Table:
    """One line a reason: forty trials out of memory are one fact, not forty."""
    table = Table(title="Failed trials", title_justify="left", box=SIMPLE_HEAD, padding=TIGHT)
    table.add_column("trials", justify="right")
    table.add_column("kind", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    table.add_column("reason", overflow="fold")
    groups = alike(board.failures)
    for group in groups[:MOST_FAILURES]:
        first, others = group[0], len(group) - 1
        label = f"{first.label} (trial {first.number}) and {others} more" if others else first.label
        number = f"{len(group)} x" if others else str(first.number)
        table.add_row(number, first.kind.replace("_", " "), Text(label), Text(shortened(first.reason)))
    if len(groups) > MOST_FAILURES:
        left_out = sum(len(group) for group in groups[MOST_FAILURES:])
        table.caption = f"{left_out} more in --json and in the HTML report"
    return table


def alike(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Failures of one kind whose reasons differ in numbers only (sizes, steps, processes), the largest group first."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.kind, re.sub(r"\d+(\.\d+)?", "0", failure.reason)), []).append(failure)
    return sorted(groups.values(), key=lambda group: -len(group))


def shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _rejections(board: Leaderboard) -> Table:
    table = Table(title="Refused before they cost anything", title_justify="left", box=SIMPLE_HEAD, padding=TIGHT)
    table.add_column("points", justify="right")
    table.add_column("rule", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for rule in board.rejected:
        table.add_row(f"{rule.count:,}", Text(rule.rule), Text(shortened(rule.reason)))
    return table
