"""The proof: the finalist and the default, measured again, interleaved. A winner inside the noise is called a tie."""

import math
from collections.abc import Callable

from search_spaces.candidate import Candidate
from search_spaces.shapes import TrainingShape
from tracking.record import Compared, Proposed
from train_worker.outcome import Outcome
from train_worker.rank_report import SlotResult
from tuner.compare import Side, compare, order
from tuner.objective import Objective, score
from tuner.session import SweepSession, now

STEP_TIME = Objective()


def verify(session: SweepSession, run: Callable[[str], str], unfinished: tuple[Proposed, ...] = ()) -> Compared | None:
    """Measure `rounds` pairs in ABBA order and write down the verdict; None without a winner or when stopped.

    `run` takes a TrialJob as JSON and returns a SlotResult as JSON. Pairs already in the journal are not measured
    again; `unfinished` are verification trials that were proposed before a crash and now run under their number.
    Both sides route naturally, also where the search balanced the experts by force: that is how they will be trained.
    """
    winner = session.winner()
    if winner is None:
        return None
    sides: dict[Side, Candidate] = {"default": session.default, "finalist": winner.candidate}
    left = {proposed.candidate.id: proposed for proposed in unfinished}
    rounds = 0 if winner.candidate.id == session.default.id else session.sweep.spec.verify.rounds
    for number in range(rounds):
        for side in order(number):
            candidate = sides[side]
            if len(session.repeats(candidate)) > number:
                continue
            proposed = left.pop(candidate.id, None) or session.propose(candidate, "verify")
            if session.error or session.interrupted or not _measure(session, proposed, run):
                return None
    pairs = zip(_times(session, sides["finalist"]), _times(session, sides["default"]), strict=False)
    compared = compare(winner.candidate.id, session.default.id, list(pairs), _training(session).routing)
    session.emit(compared)
    return compared


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
