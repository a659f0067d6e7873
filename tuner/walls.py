"""Which wall the baseline and the winner stand at, in one line each: the numbers, and what to try against it. Pure."""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from pydantic import Field

from search_spaces.candidate import Candidate
from search_spaces.shapes import Noun
from train_worker.outcome import Measured
from train_worker.profile import StepProfile

Role = Literal["default", "winner"]


class StandsAt(Noun):
    """The wall of one configuration that a reader asks about; `error` where profiling failed."""

    role: Role
    candidate_id: str
    label: str
    profile: StepProfile | None = None
    untried: tuple[str, ...] = Field((), description="what is suggested against its wall and not set in it")
    error: str | None = None


def gpu_busy(outcomes: Sequence[Measured]) -> float | None:
    """Median over the trials of a configuration, seconds a step; None where none was profiled on a GPU."""
    found = [
        outcome.profile.gpu_busy_s
        for outcome in outcomes
        if outcome.profile is not None and outcome.fingerprint.device == "cuda"
    ]
    return median(found) if found else None


def stands_at(role: Role, candidate: Candidate, label: str, outcomes: Sequence[Measured]) -> StandsAt | None:
    """From the first trial of a configuration that was profiled; None where profiling was not asked for."""
    profiled = next((outcome for outcome in outcomes if outcome.profile is not None), None)
    failed = next((outcome for outcome in outcomes if outcome.profile_error is not None), None)
    if profiled is None and failed is None:
        return None
    return StandsAt(
        role=role,
        candidate_id=candidate.id,
        label=label,
        profile=profiled.profile if profiled else None,
        untried=untried(profiled.profile.suggested, candidate) if profiled and profiled.profile else (),
        error=failed.profile_error if failed and not profiled else None,
    )


def untried(suggested: Sequence[str], candidate: Candidate) -> tuple[str, ...]:
    """Without the switches that are on in the candidate and the settings that it has; what has no one value stays."""

    def has(setting: str) -> bool:
        name, _, value = setting.partition("=")
        found = {**candidate.knobs, **candidate.env}.get(name)
        return str(found) == value if value else found is True

    return tuple(setting for setting in suggested if not has(setting))


def wall_line(found: StandsAt) -> str:
    """One line: the wall, the numbers that decide, where the work goes, the settings to try."""
    name = "default" if found.role == "default" else f"winner ({found.label})"
    profile = found.profile
    if profile is None:
        return f"Wall of the {name}: not known, the profiled step failed: {found.error}."
    work = sorted(((v, k) for k, v in profile.categories_s.items()), reverse=True)[:4]
    busiest = ", ".join(
        f"{category.replace('_', ' ')} {seconds / profile.gpu_busy_s:.0%}"
        for seconds, category in work
        if profile.gpu_busy_s  # a journal is only data
    )
    why = profile.why[:1].upper() + profile.why[1:]
    busy = f"{profile.gpu_busy_s * 1e3:.4g} ms of work ({busiest})"
    line = f"Wall of the {name}: {profile.wall}. {why}; {busy}."
    return f"{line} Try: {', '.join(found.untried)}." if found.untried else line
