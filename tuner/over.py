"""Whether a run is over, by its journal alone. Pure."""

from collections.abc import Sequence

from pydantic import ValidationError

from search_spaces.errors import InputError
from tracking.journal import fold
from tracking.record import Compared, Event, SweepStarted, TrialRecord
from tuner.budget import searched_s, spent
from tuner.objective import score
from tuner.sweep_spec import Budget, SweepSpec
from tuner.sweep_yaml import parse


def is_over(events: Sequence[Event]) -> bool:
    """Whether nothing is left to run under the sweep file of the latest start.

    Of a file that cannot be read as one of today's the budget is not known: such a run is over with its verdict.
    """
    start = next((event for event in reversed(events) if isinstance(event, SweepStarted)), None)
    if start is None:
        return False
    try:
        spec = SweepSpec.model_validate(parse(start.sweep_text, "sweep.yaml").data)
    except (InputError, ValidationError):
        return _judged_under(events) is not None
    return bool(nothing_left(events, spec))


def nothing_left(events: Sequence[Event], spec: SweepSpec) -> str:
    """Why a resumed run has nothing to do under this sweep file; "" where a trial or the verdict is wanted still.

    It is over where a limit of the budget is reached, every legal candidate was tried, or it came to a verdict under
    the budget that the file still has (the search may have ended by what no record holds: the clock, or memory).
    """
    if not events:
        return ""
    state = fold(events)
    measured = any(score(record.outcome, spec.objective) is not None for record in state.searched)
    judged = _judged_under(events)
    if any(each.purpose == "verify" for each in state.in_flight) or (measured and judged is None):
        return ""
    # Before trials of the search that were cut short: where the budget is used up, a resume does not run them either.
    if reason := spent(spec.budget, spec.cluster, state.finished, 0, searched_s(state.finished, spec.cluster)):
        return f"{reason}; with a larger one --resume goes on"
    if state.in_flight:
        return ""
    if state.screened and len({record.candidate.id for record in state.searched}) >= state.screened.accepted:
        return "every legal candidate was tried"
    return (
        "its budget is used up; with a larger one --resume goes on"
        if judged and _budget_of(judged) == spec.budget
        else ""
    )


def _judged_under(events: Sequence[Event]) -> SweepStarted | None:
    """The start whose driver came to a verdict after the last trial of the search; None where there is no verdict yet.

    A later start, with a larger budget, may have been stopped before its first trial.
    """
    start: SweepStarted | None = None
    judged: SweepStarted | None = None
    for event in events:
        if isinstance(event, SweepStarted):
            start = event
        elif isinstance(event, Compared):
            judged = start
        elif isinstance(event, TrialRecord) and event.purpose != "verify":
            judged = None
    return judged


def _budget_of(start: SweepStarted) -> Budget | None:
    """The budget in the sweep file of that time; None where it cannot be read as one of today's."""
    try:
        data = parse(start.sweep_text, "sweep.yaml").data
        return Budget.model_validate(data.get("budget") if isinstance(data, dict) else None)
    except (InputError, ValidationError):
        return None
