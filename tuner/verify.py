"""The proof: finalists and default, measured again, interleaved. A winner inside the noise is called a tie."""

import math
from collections.abc import Callable

from search_spaces.candidate import Candidate
from search_spaces.shapes import TrainingShape
from tracking.record import Compared, Proposed
from train_worker.outcome import Outcome
from train_worker.rank_report import SlotResult
from tuner.compare import name_one, order
from tuner.objective import Objective, score
from tuner.ranking import failed_again
from tuner.session import SweepSession, now

STEP_TIME = Objective()


def verify(session: SweepSession, run: Callable[[str], str], unfinished: tuple[Proposed, ...] = ()) -> Compared | None:
    """Measure `rounds` rounds in turning order and write down the verdict; None without a finalist or when stopped.

    `run` takes a TrialJob as JSON and returns a SlotResult as JSON. Trials already in the journal are not measured
    again; `unfinished` are verification trials that were proposed before a crash and now run under their number.
    A finalist that fails by itself drops out, and the others go on. All sides route naturally, also where the search
    balanced the experts by force: that is how they will be trained.
    """
    finalists = [record.candidate for record in session.finalists()]
    if not finalists:
        return None
    nothing_better = finalists[0].id == session.default.id
    if not nothing_better and not _measure_rounds(session, finalists, run, unfinished):
        return None
    compared = name_one(
        {candidate.id: _times(session, candidate) for candidate in finalists},
        session.default.id,
        _times(session, session.default),
        _training(session).routing,
        failed={candidate.id for candidate in finalists if _failed(session, candidate)},
    )
    session.emit(compared)
    return compared


def what_follows(session: SweepSession) -> str:
    """After the search, in words."""
    finalists = session.finalists()
    if not finalists:
        return "nothing was measured"
    if finalists[0].candidate.id == session.default.id:
        return "nothing beat the default"
    if not session.sweep.spec.verify.rounds:
        return "verify.rounds is 0, so that the winner is not verified"
    return f"measuring {'the finalist' if len(finalists) == 1 else f'{len(finalists)} finalists'} against the default"


def _measure_rounds(
    session: SweepSession, finalists: list[Candidate], run: Callable[[str], str], unfinished: tuple[Proposed, ...]
) -> bool:
    """All rounds, or as many as there are finalists for; False where they were interrupted."""
    sides = [session.default, *finalists]
    left = {proposed.candidate.id: proposed for proposed in unfinished}
    for number in range(session.sweep.spec.verify.rounds):
        for side in order(number, len(sides)):
            if len(session.repeats(sides[side])) > number or (side and _failed(session, sides[side])):
                continue
            if all(_failed(session, candidate) for candidate in finalists):
                return True
            proposed = left.pop(sides[side].id, None) or session.propose(sides[side], "verify")
            if session.error or session.interrupted or not _measure(session, proposed, run):
                return False
    return True


def _failed(session: SweepSession, candidate: Candidate) -> bool:
    return failed_again(candidate.id, session.repeats(candidate)) is not None


def _measure(session: SweepSession, proposed: Proposed, run: Callable[[str], str]) -> bool:
    """Run one verification trial and record it; False where it was interrupted."""
    started_at = now()
    job = session.job(proposed.trial_id, proposed.candidate, _training(session))
    # One profile and trace of each side is enough to look at: a step of 4 s took 6 to 8 s to profile (H200).
    first = not session.repeats(proposed.candidate)
    job = job.model_copy(update={"keep_trace": first, "profile": first})
    result = SlotResult.model_validate_json(run(job.model_dump_json()))
    if not session.usable(result):
        return False
    session.record(proposed, result, started_at)
    return session.error is None


def _training(session: SweepSession) -> TrainingShape:
    """The sweep's training job with natural routing."""
    return session.sweep.spec.training.model_copy(update={"routing": "natural"})


def _times(session: SweepSession, candidate: Candidate) -> list[float]:
    """Median step time of each repeat, seconds; NaN where it did not run, so that rounds stay paired."""
    return [_seconds(record.outcome) for record in session.repeats(candidate)]


def _seconds(outcome: Outcome) -> float:
    value = score(outcome, STEP_TIME)
    return math.nan if value is None else value
