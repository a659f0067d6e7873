"""What a trial's run showed of each knob that was asked for, and the verdict on it. Pure, without torch.

The worker observes one step (`observed.Observed`): calls of the code behind a knob, collectives, graphs, and the
kernels of the profiled step where there is one. `evidence_checks` says what each knob must show. A knob whose evidence
says "not active" makes the trial Rejected: a configuration that did not run has no time.
"""

from collections.abc import Iterable, Sequence

from search_spaces.candidate import Candidate
from train_worker.evidence_checks import CHECKS, ONE_RANK_IS_ENOUGH
from train_worker.evidence_kernels import both, in_kernels
from train_worker.observed import Observed
from train_worker.outcome import Evidence, Rejected

RULE = "not-active"


def evidence_of(candidate: Candidate, observed: Observed) -> tuple[Evidence, ...]:
    """One row for each knob and variable of the candidate that switches something on and can be checked."""
    requested = {**candidate.knobs, **candidate.env}
    rows = []
    for knob, check in CHECKS.items():
        if knob not in requested:
            continue
        found = check(requested[knob], requested, observed)
        if found is not None:
            kernels = in_kernels(knob, requested, observed.kernels) if observed.kernels else None
            found = both(found, kernels)
            rows.append(Evidence(knob=knob, requested=requested[knob], seen=found.seen, active=found.active))
    return tuple(rows)


def merged(ranks: Sequence[Sequence[Evidence]]) -> tuple[Evidence, ...]:
    """The gang's evidence: for each knob a rank that saw it inactive speaks first, then one that saw it active.

    A rank that cannot tell (a stage without MoE layers) speaks only where no other can. Every rank asks of the same
    knobs, in the same order. For `ONE_RANK_IS_ENOUGH` the one that saw it active is first.
    """
    return tuple(min(rows, key=_turn) for rows in zip(*ranks, strict=True))


def _turn(row: Evidence) -> int:
    if row.active is None:
        return 2
    return int(row.active is not (row.knob in ONE_RANK_IS_ENOUGH))


def missing(evidence: Iterable[Evidence]) -> Rejected | None:
    """The refusal where something that was asked for did not run, with all that was seen."""
    rows = tuple(evidence)
    wrong = [row for row in rows if row.active is False]
    if not wrong:
        return None
    told = "; ".join(f"{row.knob}: requested {row.requested!r}, seen: {row.seen}" for row in wrong)
    return Rejected(rule=RULE, reason=f"asked for and not active: {told}", evidence=rows)
