"""What is stored: one event a line in the journal, each a typed noun with an `event` discriminator.

A sweep's journal is: one `SweepStarted` (again at each resume), `Screened` once, then `Proposed` and `Finished`
per trial, then `Compared`. A trial that was proposed and never finished is run again on resume.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from search_spaces.candidate import Candidate
from search_spaces.shapes import Noun, Routing
from train_worker.outcome import Outcome

JOURNAL_VERSION = 1
Purpose = Literal["baseline", "search", "verify"]


class SweepStarted(Noun):
    """Head of a journal. A resumed run appends another one; `sweep_digest` and `space_digest` must be equal."""

    event: Literal["sweep_started"] = "sweep_started"
    journal_version: int = JOURNAL_VERSION
    sweep_name: str
    run_name: str = Field(description='folder of this run, such as "001"')
    sweep_digest: str = Field(description="hash of the sweep file's meaning, budget and tracking left out")
    space_digest: str
    sweep_text: str = Field(description="the sweep file as written")
    seed: int
    started_at: str = Field(description="UTC, ISO 8601")
    resumed: bool = False
    finalists: int = Field(1, description="verified at most; a run from before there could be more verified one")


class RuleCount(Noun):
    """How many points of the space one rule refuses, with one of them as an example."""

    rule: str
    reason: str
    count: int
    example: Candidate


class Screened(Noun):
    """The space before any worker started: `total` points, `accepted` of them legal, the rest by rule."""

    event: Literal["screened"] = "screened"
    total: int
    accepted: int
    rejected: tuple[RuleCount, ...]


class Proposed(Noun):
    event: Literal["proposed"] = "proposed"
    number: int = Field(ge=0)
    trial_id: str
    purpose: Purpose
    candidate: Candidate
    at: str


class TrialRecord(Noun):
    """One finished trial."""

    event: Literal["finished"] = "finished"
    number: int = Field(ge=0)
    trial_id: str
    purpose: Purpose
    candidate: Candidate
    outcome: Outcome
    wall_s: float = Field(description="from hand-over to outcome, as the controller saw it")
    attempts: int = Field(1, description="1, plus one for each retry after an infrastructure fault")
    started_at: str
    ended_at: str


class Versus(Noun):
    """One candidate against another, measured interleaved. `ratio` is the step time of the one / of the other."""

    rounds: int
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Literal["faster", "slower", "tie", "unverified"]


class RunnerUp(Noun):
    """A finalist of the same rounds that is not the one named."""

    finalist_id: str = Field(description="candidate id")
    against_default: Versus
    against_named: Versus


class Compared(Noun):
    """Finalist against the default, measured interleaved. `ratio` is finalist step time / default step time.

    Of several finalists it is about the one named, which the others (`runners_up`) stand behind.
    """

    event: Literal["compared"] = "compared"
    finalist_id: str = Field(description="candidate id")
    default_id: str
    rounds: int
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Literal["faster", "slower", "tie", "same", "unverified"]
    routing: Routing | None = Field(
        None, description="of all sides; None: no pair, or a record from before it was kept"
    )
    runners_up: tuple[RunnerUp, ...] = Field((), description="in the order of the search's ranking")


Event = Annotated[
    SweepStarted | Screened | Proposed | TrialRecord | Compared,
    Field(discriminator="event"),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
