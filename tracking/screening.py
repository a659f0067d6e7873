"""Whether a resumed run still searches the space that it began with."""

from search_spaces.errors import Fault, InputError
from tracking.record import Screened


def same_screening(known: Screened, now: Screened) -> None:
    """InputError where the rules judge the space otherwise than when the run began: its trials were drawn from another.

    Wording and examples may differ; what counts is how many points each rule refuses.
    """
    then, today = _by_rule(known), _by_rule(now)
    changed = [rule for rule in sorted(then | today) if then.get(rule) != today.get(rule)]
    if (known.total, known.accepted) == (now.total, now.accepted) and not changed:
        return
    counts = ", ".join(f"{rule} {then.get(rule, 0)} then, {today.get(rule, 0)} now" for rule in changed)
    what = (
        f"the rules changed since this run began: {known.accepted} of {known.total} configurations could run then, "
        f"{now.accepted} of {now.total} can now" + (f" (points refused: {counts})" if counts else "")
    )
    raise InputError([Fault(what)], "run without --resume, or resume with the version of moetune that began this run")


def _by_rule(screened: Screened) -> dict[str, int]:
    return {rule.rule: rule.count for rule in screened.rejected}
