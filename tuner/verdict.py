"""What a sweep says in the end: the default, unless a finalist was shown to be faster. Pure."""

from collections.abc import Sequence
from typing import Literal

from search_spaces.shapes import Noun
from tracking.record import Compared, TrialRecord
from train_worker.outcome import Crashed
from tuner.compare import USEFUL_ROUNDS
from tuner.objective import Objective
from tuner.ranking import Row, failure_of, measured_of

MORE = f" Verified in {USEFUL_ROUNDS} rounds or more, smaller differences can be told."


class Verdict(Noun):
    """The answer. `kind` "none": nothing acceptable was measured; "unverified": not compared, or in too few rounds."""

    kind: Literal["faster", "slower", "tie", "same", "unverified", "none"]
    words: str
    compared: Compared | None = None


def decide(
    compared: list[Compared], rows: list[Row], records: Sequence[TrialRecord], objective: Objective
) -> tuple[Verdict, str | None]:
    """The verdict in words, and what to use: the default, unless a finalist was shown to be faster."""
    if not rows:
        return Verdict(kind="none", words="Nothing acceptable was measured."), None
    leader = rows[0]
    latest = compared[-1] if compared else None
    if latest is None or latest.verdict == "unverified" or objective.metric == "peak_memory_bytes":
        words = f"Best so far, not verified against the default: {leader.label} ({_describe(leader, objective)})."
        return Verdict(kind="unverified", words=words, compared=latest), leader.candidate_id
    by_id = {row.candidate_id: row for row in rows}
    name = by_id[latest.finalist_id].label if latest.finalist_id in by_id else latest.finalist_id
    broken = _broken(latest.finalist_id, records)
    if broken is not None:
        why = failure_of(broken, None).reason
        words = f"No winner: {name} was measured once and failed when it was run again: {why}. Keep the default."
        return Verdict(kind="unverified", words=words, compared=latest), _if_measured(latest.default_id, by_id)
    verdict = Verdict(kind=latest.verdict, words=_words(latest, name), compared=latest)
    proven = latest.finalist_id if latest.verdict == "faster" else latest.default_id
    return verdict, _if_measured(proven, by_id)


def _if_measured(candidate_id: str, rows: dict[str, Row]) -> str | None:
    return candidate_id if candidate_id in rows else None


def _broken(candidate_id: str, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """A repeat of the finalist that failed by itself; a lost node says nothing about it."""
    for record in records:
        lost = isinstance(record.outcome, Crashed) and record.outcome.infrastructure
        if record.candidate.id == candidate_id and record.purpose == "verify" and not measured_of(record) and not lost:
            return record
    return None


def _words(compared: Compared, name: str) -> str:
    interval = f"95% interval {compared.ratio_low:.3f} to {compared.ratio_high:.3f} of the default's step time"
    how = f"{interval}, {compared.rounds} interleaved rounds"
    how += f", {compared.routing} routing" if compared.routing else ""
    match compared.verdict:
        case "faster":
            return f"Faster: {name} takes {1 - compared.ratio:.1%} less time a step than the default ({how})."
        case "tie":
            more = MORE if compared.rounds < USEFUL_ROUNDS else ""
            return f"Tie: {name} cannot be told from the default ({how}). Keep the default.{more}"
        case "slower":
            return f"Slower: {name} takes {compared.ratio - 1:.1%} more time a step than the default ({how}). Keep it."
        case "same":
            return "The default is the best configuration that was measured."
        case "unverified":
            return f"Not verified: {name} was compared in {compared.rounds} rounds; two at least are needed."


def _describe(row: Row, objective: Objective) -> str:
    if objective.metric == "peak_memory_bytes":
        return f"{row.peak_memory_bytes / 2**20:,.1f} MiB at its peak"
    return f"{row.step_time_s:.4g} s a step" + (f", {row.speed:.2f}x the default" if row.speed else "")
