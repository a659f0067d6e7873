"""The figures of the HTML report. Pure: a leaderboard and its records in, plotly figures out.

Plotly reads a little HTML in every text it draws, so all text goes through `shown`. Colours are Okabe and Ito's,
told apart by colour-blind eyes (https://jfly.uni-koeln.de/color/).
"""

import html
import math
from collections.abc import Sequence

import plotly.graph_objects as go

from tracking.record import TrialRecord
from train_worker.outcome import Diverged, Measured
from tuner.leaderboard import Leaderboard
from tuner.ranking import Row
from tuner.report import PHASES, shortened

WINNER, DEFAULT, TIED, OTHER, BAD = "#009E73", "#0072B2", "#E69F00", "#767676", "#D55E00"
PHASE_COLOURS = ("#56B4E9", "#0072B2", "#CC79A7", "#E69F00", "#BBBBBB", "#009E73", "#D55E00", "#F0E442")
MOST_BARS = 30
MOST_CURVES = 12
MIB = 2**20
# Pixels. Beside the plot stands the column of plotly's buttons, which would cover a legend if it lay above; a legend
# line is one curve where the page is narrow, several where it is wide.
BUTTONS_WIDE, LEGEND_LINE = 46, 20


def shown(text: str, limit: int = 60) -> str:
    """Text as plotly draws it: cut to `limit` characters, with nothing that it would take for markup."""
    return html.escape(shortened(text, limit), quote=False)


def step_times(board: Leaderboard) -> go.Figure:
    """Median step time of each configuration with its 95% interval, the best on top. Milliseconds."""
    rows = _kept(board.rows)
    figure = go.Figure()
    for kind, colour in (("winner", WINNER), ("default", DEFAULT), ("tied with the leader", TIED), ("other", OTHER)):
        mine = [row for row in rows if _kind(row) == kind]
        if not mine:
            continue
        figure.add_scatter(
            x=[row.step_time_s * 1e3 for row in mine],
            y=[_name(row) for row in mine],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [(row.step_time_high_s - row.step_time_s) * 1e3 for row in mine],
                "arrayminus": [(row.step_time_s - row.step_time_low_s) * 1e3 for row in mine],
            },
            mode="markers",
            marker={"color": colour, "size": 10},
            name=kind,
        )
    figure.update_yaxes(categoryorder="array", categoryarray=[_name(row) for row in reversed(rows)], automargin=True)
    figure.update_xaxes(title_text="step time, ms, with 95% interval")
    return _styled(figure, 140 + 28 * len(rows))


def memory_against_time(board: Leaderboard) -> go.Figure:
    """Peak memory of each configuration against its step time: what speed costs."""
    figure = go.Figure()
    for kind, colour in (("winner", WINNER), ("default", DEFAULT), ("tied with the leader", TIED), ("other", OTHER)):
        mine = [row for row in board.rows if _kind(row) == kind]
        if mine:
            figure.add_scatter(
                x=[row.step_time_s * 1e3 for row in mine],
                y=[row.peak_memory_bytes / MIB for row in mine],
                mode="markers",
                marker={"color": colour, "size": 11},
                text=[shown(row.label, 200) for row in mine],
                name=kind,
            )
    figure.update_xaxes(title_text="step time, ms")
    figure.update_yaxes(title_text="peak memory, MiB", rangemode="tozero")
    return _styled(figure, 420)


def losses(board: Leaderboard, records: Sequence[TrialRecord]) -> go.Figure:
    """Loss of the best configurations and of all that diverged, against the baseline's on the same data."""
    labels = {row.candidate_id: row.label for row in board.rows}
    labels |= {failure.candidate_id: failure.label for failure in board.failures}
    best = [row.candidate_id for row in board.rows[:MOST_CURVES]]
    figure = go.Figure()
    for record in records:
        curve = _losses(record)
        wanted = record.purpose == "baseline" or record.candidate.id in best or isinstance(record.outcome, Diverged)
        if record.purpose == "verify" or not curve or not wanted:
            continue
        baseline, wrong = record.purpose == "baseline", isinstance(record.outcome, Diverged)
        figure.add_scatter(
            x=list(range(len(curve))),
            y=curve,
            mode="lines+markers",
            line={
                "color": DEFAULT if baseline else BAD if wrong else None,
                "width": 4 if baseline else 1.5,
                "dash": "dot" if wrong else "solid",
            },
            name=shown(f"{record.number}: {labels.get(record.candidate.id, record.candidate.id)}", 50),
        )
    figure.update_xaxes(title_text="optimizer step, warm-up included")
    figure.update_yaxes(title_text="loss")
    return _styled(figure, 380 + LEGEND_LINE * len(figure.data))


def phases(records: Sequence[TrialRecord]) -> go.Figure:
    """Where each measured trial's time went, seconds, stacked by phase."""
    measured = [(record, record.outcome) for record in records if isinstance(record.outcome, Measured)]
    figure = go.Figure()
    for (name, title), colour in zip(PHASES.items(), PHASE_COLOURS, strict=True):
        figure.add_bar(
            x=[str(record.number) for record, _ in measured],
            y=[getattr(outcome.phases, name) for _, outcome in measured],
            name=title,
            marker={"color": colour},
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="trial", type="category")
    figure.update_yaxes(title_text="seconds")
    return _styled(figure, 420)


def rejections(board: Leaderboard) -> go.Figure:
    """Points of the space that each rule refuses."""
    rules = list(reversed(board.rejected[:MOST_BARS]))
    figure = go.Figure()
    figure.add_bar(
        x=[rule.count for rule in rules],
        y=[shown(rule.rule) for rule in rules],
        orientation="h",
        marker={"color": OTHER},
        text=[shown(rule.reason, 120) for rule in rules],
        textposition="none",
    )
    figure.update_yaxes(automargin=True)
    figure.update_xaxes(title_text="points refused")
    return _styled(figure, 140 + 26 * len(rules))


def _kept(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.rank <= MOST_BARS or row.default or row.winner]


def _kind(row: Row) -> str:
    if row.winner:
        return "winner"
    if row.default:
        return "default"
    return "tied with the leader" if row.tied else "other"


def _name(row: Row) -> str:
    return f"{row.rank}. {shown(row.label, 44)}"


def _losses(record: TrialRecord) -> list[float | None]:
    """By step; None (a gap in the line) where the loss is not a number."""
    outcome = record.outcome
    if isinstance(outcome, Measured):
        return [loss if math.isfinite(loss) else None for loss in outcome.losses]
    return list(outcome.losses) if isinstance(outcome, Diverged) else []


def _styled(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": BUTTONS_WIDE, "t": 20, "b": 50},
        # Half of the height would be the most a legend may take: the rest would have to be scrolled for.
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "maxheight": 0.8},
        modebar={"orientation": "v", "remove": ["select2d", "lasso2d", "autoScale2d"]},
        showlegend=len(figure.data) > 1,
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure
