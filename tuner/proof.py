"""That the winner ran what it asked for: the evidence of its trials, as data and as a small table. Pure."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tracking.record import TrialRecord
from train_worker.outcome import Evidence, Measured

TITLE = "What the winner was seen to run"
COLUMNS = ("knob", "requested", "seen")


def proof(records: Sequence[TrialRecord], candidate_id: str | None) -> tuple[Evidence, ...]:
    """Of the latest measured trial of a candidate that has any; older records have none.

    A profiled trial speaks before one that was not: some knobs are seen in its kernels only (CUTLASS), and of the
    repeats that verify a winner just the first is profiled.
    """
    mine = [record.outcome for record in records if record.candidate.id == candidate_id]
    found = [outcome for outcome in mine if isinstance(outcome, Measured) and outcome.evidence]
    profiled = [outcome for outcome in found if outcome.profile is not None]
    latest = (profiled or found)[-1:]
    return latest[0].evidence if latest else ()


def proof_rows(evidence: Sequence[Evidence]) -> list[tuple[str, str, str]]:
    """Knob, request, and what was seen; what could not be told says so."""
    return [
        (row.knob, str(row.requested), row.seen if row.active else f"cannot be told: {row.seen}") for row in evidence
    ]


def proof_table(evidence: Sequence[Evidence]) -> Table:
    """For a terminal; the texts come from a trial and are printed as they are."""
    table = Table(title=TITLE, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for cells in proof_rows(evidence):
        table.add_row(*map(Text, cells))
    return table
