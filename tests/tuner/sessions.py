"""A sweep session without Ray: one driver's life on a real journal, and outcomes as a slot would bring them."""

from collections.abc import Callable
from pathlib import Path

from search_spaces.candidate import Candidate
from search_spaces.screen import screen
from search_spaces.shapes import StackVersions
from tests.end_to_end.sweeps import write_sweep
from tracking.journal import Journal, JournalState, fold
from tracking.record import Event, SweepStarted
from train_worker.job import TrialJob
from train_worker.outcome import (
    Fingerprint,
    Measured,
    Outcome,
    PhaseTimes,
    StepSample,
)
from train_worker.rank_report import InterruptedGang, NoSlot, SlotResult
from tuner.proposer import Proposer
from tuner.session import SweepSession
from tuner.sweep import LoadedSweep, load_sweep

FINGERPRINT = Fingerprint(
    stack=StackVersions(megatron_core="0.19.2", torch="2.11.0"), python="3.12", device="cpu", device_name="x"
)


def measured(step_time_s: float, loss: float = 2.0) -> Measured:
    sample = StepSample(step_time_s=step_time_s, tokens_per_s=512 / step_time_s, loss=loss, grad_norm=1.0)
    return Measured(
        steps=(sample,) * 3,
        warmup=(sample,),
        peak_memory_bytes=1 << 20,
        parameter_count=1,
        effective={},
        fingerprint=FINGERPRINT,
        phases=PhaseTimes(measure_s=step_time_s * 3),
    )


def speed(candidate: Candidate) -> float:
    """Larger micro-batches are faster, the rest is noise that depends on the candidate alone."""
    return 1.0 / float(candidate.knobs["micro_batch_size"] or 1) + int(candidate.id[:4], 16) / 1e7


class Bench:
    """One sweep folder; `session()` is one driver's life."""

    def __init__(self, folder: Path, trials: int = 8, change: Callable[[str], str] = lambda text: text) -> None:
        path = write_sweep(folder, trials)
        path.write_text(change(path.read_text()))
        self.sweep: LoadedSweep = load_sweep(path)
        spec = self.sweep.spec
        self.legal = screen(self.sweep.space, self.sweep.model, spec.cluster, spec.training)
        self.path = folder / "journal.jsonl"
        self.seen: list[Event] = []

    def session(self) -> SweepSession:
        exists = self.path.exists()
        self.journal = Journal.open(self.path) if exists else Journal.create(self.path)
        state = fold(self.journal.events) if self.journal.events else None
        spec = self.sweep.spec
        proposer = Proposer(self.legal, "minimize", spec.seed, 8)
        session = SweepSession(self.sweep, self.journal, proposer, state, [self.seen.append])
        if not exists:
            session.emit(
                SweepStarted(
                    sweep_name="small",
                    run_name="001",
                    sweep_digest="d",
                    space_digest="s",
                    sweep_text=self.sweep.text,
                    seed=spec.seed,
                    started_at="2026-11-30T00:00:00+00:00",
                    finalists=session.most_finalists,
                )
            )
        return session

    def state(self) -> JournalState:
        return fold(self.journal.events)


def result(outcome: Outcome | InterruptedGang | NoSlot, wall_s: float = 1.0) -> str:
    return SlotResult(outcome=outcome, attempts=1, wall_s=wall_s).model_dump_json()


def honest(candidate: Candidate) -> Outcome:
    return measured(speed(candidate))


def drive(
    session: SweepSession, answer: Callable[[Candidate], Outcome | InterruptedGang | NoSlot] = honest, limit: int = 99
) -> list[str]:
    """Play Tune with one trial at a time; the candidate ids in order."""
    ids = []
    for number in range(limit):
        job = session.next_job(f"h{number}")
        if job in ("done", "wait"):
            break
        candidate = TrialJob.model_validate_json(job).candidate
        ids.append(candidate.id)
        session.finish(f"h{number}", result(answer(candidate)))
    return ids


def run_with(times: Callable[[Candidate, int], float], ran: list[str]) -> Callable[[str], str]:
    def run(job_json: str) -> str:
        candidate = TrialJob.model_validate_json(job_json).candidate
        ran.append(candidate.id)
        return result(measured(times(candidate, len(ran))))

    return run


def one_finalist(text: str) -> str:
    """A change of the sweep file."""
    return text.replace("verify: {rounds: 2}", "verify: {rounds: 2, finalists: 1}")
