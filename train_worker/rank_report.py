"""What one rank process left behind, and how the reports of a gang become one `Outcome` (pure).

Every rank of a gang ends for its own reason; most of those reasons are collateral (a peer died, so the
collective broke). `combine` finds the root cause over all ranks, never just rank 0's word.
"""

from typing import Literal

from pydantic import Field

from search_spaces.shapes import Noun
from train_worker.failures import out_of_memory_in, without_home
from train_worker.outcome import Crashed, Diverged, Hung, Measured, Outcome, OutOfMemory, Rejected

KillReason = Literal["deadline", "memory", "peer", "stop"]
SIGKILL = 9
SPOKEN = ("detail", "reason", "profile_error")  # fields of outcomes that quote errors
UNREPORTED = 70  # exit code of a rank that could not begin, or not write its report: its disk is full, as a rule


class RankReport(Noun):
    """How one rank ended. `outcome` is what the rank itself wrote, None where it wrote nothing."""

    rank: int
    outcome: Outcome | None = None
    collateral: bool = False  # the rank's error only says that a peer went away
    exit_code: int | None = None
    signal: int | None = None
    killed: KillReason | None = None
    host_oom_kills: int = 0  # kernel OOM kills counted in the rank's memory cgroup while it ran
    phase: str = "fork"
    step: int = -1
    note: str = ""  # the launcher's word on why it killed the rank
    stacks: str = ""
    log_tail: str = ""
    trace: str = ""  # of the profiled step, where the job keeps it (train_worker.keep), on rank 0
    wall_s: float = 0.0  # from the fork request to the exit, seen by the launcher

    @property
    def ok(self) -> bool:
        return isinstance(self.outcome, Measured)


class InterruptedGang(Noun):
    """The gang was stopped on purpose (Ctrl-C, `moetune stop`): no outcome, the trial runs again on resume."""

    kind: Literal["interrupted"] = "interrupted"


class NoSlot(Noun):
    """No slot is left or comes free: no outcome, a missing resource. The trial runs again on resume."""

    kind: Literal["no_slot"] = "no_slot"
    detail: str


class SlotResult(Noun):
    """What a trial gets back: its outcome (or why it has none), attempts made, wall seconds over all of them."""

    outcome: Outcome | InterruptedGang | NoSlot
    attempts: int
    wall_s: float
    trace: str = Field("", description="of rank 0, gzipped and in base64 (train_worker.keep)")


def explain(report: RankReport, time_limit_s: float) -> Outcome:
    """One rank's end as an outcome, from its own word or from how its process died."""
    if report.outcome is not None:
        return report.outcome
    if report.killed == "deadline":
        return Hung(phase=report.phase, time_limit_s=time_limit_s, detail=report.stacks or report.log_tail)
    if report.killed == "memory":
        return OutOfMemory(where="host", phase=report.phase, detail=report.note)
    if report.signal == SIGKILL and report.host_oom_kills:
        return OutOfMemory(where="host", phase=report.phase, detail="killed by the kernel's OOM killer")
    if where := out_of_memory_in(report.log_tail):  # C++ aborts on a failed allocation, with a last word in the log
        return OutOfMemory(where=where, phase=report.phase, detail=report.log_tail)
    end = f"signal {report.signal}" if report.signal else f"exit code {report.exit_code}"
    unreported = report.exit_code == UNREPORTED
    hint = " that it could write: is the worker's disk full?" if unreported else ""
    return Crashed(
        phase=report.phase,
        detail=f"rank {report.rank} ended with {end} and no report{hint}\n{report.log_tail}".strip(),
        exit_code=report.exit_code,
        signal=report.signal,
        infrastructure=unreported,
    )


def combine(reports: list[RankReport], time_limit_s: float) -> Outcome:
    """The gang's outcome: rank 0's measurement if every rank measured, else the root cause.

    Ranks killed because a peer had failed, and ranks whose error names a lost peer, come last.
    """
    if not reports:
        raise ValueError("combine() needs at least one rank report")
    reports = sorted(reports, key=lambda report: report.rank)
    if all(report.ok for report in reports):
        return _nameless(_with_launch_time(reports[0]))
    failed = [report for report in reports if not report.ok]
    root = min(failed, key=lambda report: (_collateral(report), _severity(explain(report, time_limit_s)), report.rank))
    return _nameless(explain(root, time_limit_s))


def _nameless(outcome: Outcome) -> Outcome:
    """Outcomes go into journals, reports and MLflow: their words do not name the user."""
    words = {name: without_home(text) for name in SPOKEN if (text := getattr(outcome, name, None))}
    return outcome.model_copy(update=words)


def _collateral(report: RankReport) -> bool:
    """What the rank said itself counts, even if it was killed as a peer right after."""
    return report.collateral or (report.outcome is None and report.killed in ("peer", "stop"))


def _severity(outcome: Outcome) -> int:
    """Most telling first: a peer of a rank out of memory may look crashed or hung, never the other way round."""
    order = (OutOfMemory, Diverged, Rejected, Crashed, Hung)
    return order.index(type(outcome)) if type(outcome) in order else len(order)


def _with_launch_time(report: RankReport) -> Measured:
    """Add what the launcher spent around the rank to its phases: nothing of a trial's cost is left out."""
    outcome = report.outcome
    assert isinstance(outcome, Measured)
    phases = outcome.phases
    inside = phases.fixed_s - phases.launch_s + phases.warmup_s + phases.measure_s
    launch_s = max(report.wall_s - inside, 0.0)
    return outcome.model_copy(update={"phases": phases.model_copy(update={"launch_s": launch_s})})
