"""What a sweep says in the end: the default, unless a finalist was shown to be faster. Pure."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from search_spaces.shapes import Noun
from tracking.record import Compared, RunnerUp, TrialRecord, Versus
from tuner.compare import USEFUL_ROUNDS
from tuner.objective import Objective
from tuner.ranking import Row, failed_again, failure_of

MORE = f" Verified in {USEFUL_ROUNDS} rounds or more, smaller differences can be told."


class Verdict(Noun):
    """The answer. `kind` "none": nothing acceptable was measured; "unverified": not compared, or in too few rounds."""

    kind: Literal["faster", "slower", "tie", "same", "unverified", "none"]
    words: str
    compared: Compared | None = None
    others: tuple[str, ...] = Field((), description="a line for each other finalist, in the order of the ranking")


def decide(
    compared: list[Compared], rows: list[Row], records: Sequence[TrialRecord], objective: Objective
) -> tuple[Verdict, str | None]:
    """The verdict in words, and what to use: the default, unless a finalist was shown to be faster."""
    if not rows:
        return Verdict(kind="none", words="Nothing acceptable was measured."), None
    by_id = {row.candidate_id: row for row in rows}
    latest = compared[-1] if compared else None
    others = tuple(_line(each, by_id, records) for each in latest.runners_up) if latest else ()
    if latest is not None and latest.verdict != "same" and (why := _why_failed(latest.finalist_id, records)):
        name = _name(latest.finalist_id, by_id)
        words = f"No winner: {name} was measured once and failed when it was run again: {why}. Keep the default."
        verdict = Verdict(kind="unverified", words=words, compared=latest, others=others)
        return verdict, _if_measured(latest.default_id, by_id)
    if latest is None or latest.verdict == "unverified" or objective.metric == "peak_memory_bytes":
        leader = next((row for row in rows if not _why_failed(row.candidate_id, records)), rows[0])
        words = f"Best so far, not verified against the default: {leader.label} ({_describe(leader, objective)})."
        return Verdict(kind="unverified", words=words, compared=latest, others=others), leader.candidate_id
    words = _words(latest, _name(latest.finalist_id, by_id))
    proven = latest.finalist_id if latest.verdict == "faster" else latest.default_id
    verdict = Verdict(kind=latest.verdict, words=words, compared=latest, others=others)
    return verdict, _if_measured(proven, by_id)


def _if_measured(candidate_id: str, rows: dict[str, Row]) -> str | None:
    return candidate_id if candidate_id in rows else None


def _name(candidate_id: str, rows: dict[str, Row]) -> str:
    return rows[candidate_id].label if candidate_id in rows else candidate_id


def _why_failed(candidate_id: str, records: Sequence[TrialRecord]) -> str:
    """Of a repeat that failed by itself; "" where none did."""
    failed = failed_again(candidate_id, records)
    return failure_of(failed, None).reason if failed else ""


def _line(each: RunnerUp, rows: dict[str, Row], records: Sequence[TrialRecord]) -> str:
    """Another finalist: how it stands to the default, and to the one named."""
    head = f"Also run again: {_name(each.finalist_id, rows)}"
    if why := _why_failed(each.finalist_id, records):
        return f"{head}, which failed: {why}."
    if each.against_default.verdict == "unverified":
        return f"{head}, in too few rounds to tell."
    between = {
        "tie": "a tie with the finalist above",
        "slower": "slower than the finalist above",
        "faster": "faster than the finalist above",
        "unverified": "too few rounds to tell it from the finalist above",
    }[each.against_named.verdict]
    return (
        f"{head}, {_share(each.against_default)} of the default's step time ({each.against_default.verdict}); "
        f"{between}, {_share(each.against_named)} of its step time."
    )


def _share(found: Versus) -> str:
    return f"{found.ratio:.3f} ({found.ratio_low:.3f} to {found.ratio_high:.3f})"


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
