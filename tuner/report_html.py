"""One self-contained HTML page about a sweep: no network, no other file. All text is escaped.

The page carries plotly.js itself (4.8 MB), and a policy that forbids the browser to fetch anything.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from search_spaces.errors import ResourceMissing
from tracking.record import Event, SweepStarted, TrialRecord
from tuner import report_plots as plots
from tuner.leaderboard import Leaderboard, leaderboard
from tuner.objective import Objective
from tuner.proof import COLUMNS, TITLE, proof_rows
from tuner.report import cost_lines, heading, legend, milliseconds, per_rank, place, remark_lines, unwatched_line
from tuner.walls import wall_line

PAGE_NAME = "index.html"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
:root { color-scheme: light; --line: #d8dce2; --soft: #59616d; }
body { font: 16px/1.5 system-ui, sans-serif; color: #16191d; background: #fff; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; max-width: 72rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
.verdict { border-left: .4rem solid #767676; background: #f4f6f8; padding: .8rem 1rem; font-size: 1.1rem; }
.verdict.faster { border-color: #009E73; } .verdict.none { border-color: #D55E00; }
.soft { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.label { overflow-wrap: anywhere; min-width: 7rem; } tr.winner td { background: #e7f6f0; }
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; font-size: .85rem; } figure { margin: 0; }
"""


def write_html(events: Iterable[Event], folder: Path, objective: Objective | None = None) -> Path:
    """Write the page into `folder` (made if need be) and give its path. ResourceMissing where that cannot be."""
    text = page(tuple(events), objective)
    path = folder / PAGE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceMissing(f"cannot write {path}: {error.strerror}", "give another folder with -o") from error
    return path


def page(events: Sequence[Event], objective: Objective | None = None) -> str:
    """The whole page as text."""
    board = leaderboard(events, objective)
    head = next(event for event in events if isinstance(event, SweepStarted))
    records = [event for event in events if isinstance(event, TrialRecord)]
    title = f"MoETune: {board.sweep_name}/{board.run_name}"
    parts = [
        f"<h1>{_safe(title)}</h1>",
        f'<p class="verdict {board.verdict.kind}" role="status">{_safe(board.verdict.words)}</p>',
        *(f"<p>{_safe(line)}</p>" for line in board.verdict.others),
        f'<p class="soft">{_safe(heading(board))}; begun {_safe(head.started_at)}</p>',
        *_measured_parts(board, records),
        *_failure_parts(board),
        *_rejection_parts(board),
        "<h2>Costs</h2>",
        *(f"<p>{_safe(line)}</p>" for line in cost_lines(board.costs)),
        "<h2>The sweep file</h2>",
        f"<details><summary>As it was run</summary><pre>{_safe(head.sweep_text)}</pre></details>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<link rel="icon" href="data:,"><title>{_safe(title)}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _measured_parts(board: Leaderboard, records: Sequence[TrialRecord]) -> list[str]:
    if not board.rows:
        return []
    return [
        "<h2>Ranking</h2>",
        _ranking(board),
        f'<p class="soft">{_safe(legend(board))}</p>',
        *(f"<p>{_safe(wall_line(each))}</p>" for each in board.walls),
        *(f"<p>{_safe(line)}</p>" for line in remark_lines(board)),
        *_proof_parts(board),
        _figure("Step time", "steps", plots.step_times(board)),
        _figure("Memory against time", "memory", plots.memory_against_time(board)),
        _figure("Loss against the baseline", "losses", plots.losses(board, records)),
        _figure("Where the time of a trial goes", "phases", plots.phases(records)),
    ]


def _proof_parts(board: Leaderboard) -> list[str]:
    if not board.evidence:
        return []
    rows = [_row(*map(_cell, cells)) for cells in proof_rows(board.evidence)]
    return [f"<h2>{TITLE}</h2>", _table((), COLUMNS, (), rows), f"<p>{_safe(unwatched_line(board))}</p>"]


def _failure_parts(board: Leaderboard) -> list[str]:
    if not board.failures:
        return []
    rows = [
        _row(
            _number(str(failure.number)),
            _cell(failure.kind.replace("_", " ")),
            _cell(failure.label),
            f"<td><details><summary>{_safe(failure.reason)}</summary><pre>{_safe(failure.detail)}</pre></details></td>",
        )
        for failure in board.failures
    ]
    return ["<h2>Failed trials</h2>", _table(("trial",), ("kind", "configuration", "reason"), (), rows)]


def _rejection_parts(board: Leaderboard) -> list[str]:
    if not board.rejected:
        return []
    rows = [_row(_number(f"{rule.count:,}"), _cell(rule.rule), _cell(rule.reason)) for rule in board.rejected]
    figure = _figure("Refused before they cost anything", "rejections", plots.rejections(board))
    return [figure, _table(("points",), ("rule", "reason"), (), rows)]


def _ranking(board: Leaderboard) -> str:
    rows = [
        _row(
            _number(place(row)),
            _cell(row.shown),
            _number(milliseconds(row.step_time_s)),
            _number(f"{milliseconds(row.step_time_low_s)} to {milliseconds(row.step_time_high_s)}"),
            _number(f"{row.tokens_per_s:,.0f}"),
            *(_number(text) for text in per_rank(row)),
            _number(f"{row.peak_memory_bytes / plots.MIB:,.1f}"),
            _number(f"{row.speed:.3f}x" if row.speed else ""),
            kind="winner" if row.winner else "",
        )
        for row in board.rows
    ]
    throughput = ("tokens/s", f"tokens/s/{board.unit}", f"TFLOP/s/{board.unit}")
    numbers = ("step, ms", "95% interval", *throughput, "peak, MiB", "speed")
    return _table(("#",), ("differs from the default by",), numbers, rows)


def _table(left: Sequence[str], texts: Sequence[str], right: Sequence[str], rows: list[str]) -> str:
    """Columns of numbers (`left`), of text, and of numbers again (`right`)."""
    numbers, words = '<th scope="col" class="n">{}</th>', '<th scope="col">{}</th>'
    names = [(numbers, name) for name in left] + [(words, name) for name in texts] + [(numbers, name) for name in right]
    head = "".join(form.format(_safe(name)) for form, name in names)
    body = "\n".join(rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _row(*cells: str, kind: str = "") -> str:
    return f'<tr class="{kind}">{"".join(cells)}</tr>'


def _number(text: str) -> str:
    return f'<td class="n">{_safe(text)}</td>'


def _cell(text: str) -> str:
    return f'<td class="label">{_safe(text)}</td>'


def _figure(title: str, name: str, figure: go.Figure) -> str:
    drawn = to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=f"plot-{name}",
        config={"displaylogo": False, "responsive": True},
    )
    return f'<h2 id="{name}">{_safe(title)}</h2><figure aria-labelledby="{name}">{drawn}</figure>'


def _safe(text: str) -> str:
    return html.escape(text)
