"""Why a trial gave no measurement, in words."""

from train_worker.outcome import Crashed, Diverged, Hung, Measured, Outcome, OutOfMemory, Rejected


def failure_text(outcome: Outcome) -> str:
    """A failure in words: one line of what happened, then the detail as it came."""
    match outcome:
        case OutOfMemory():
            return f"out of {outcome.where} memory in {outcome.phase}\n{outcome.detail}"
        case Rejected():
            return f"rejected by {outcome.rule}: {outcome.reason}"
        case Hung():
            return f"hung in {outcome.phase}, killed after {outcome.time_limit_s:g} s\n{outcome.detail}"
        case Diverged():
            return f"diverged at step {outcome.step}: {outcome.reason}"
        case Crashed():
            how = "" if outcome.exit_code is None else f" (exit code {outcome.exit_code})"
            how = how if outcome.signal is None else f" (signal {outcome.signal})"
            what = "lost to infrastructure" if outcome.infrastructure else "crashed"
            return f"{what} in {outcome.phase}{how}\n{outcome.detail}"
        case Measured():
            return ""


def failure_line(outcome: Outcome) -> str:
    """The same in one line: the first one, and the last of the detail, since a traceback ends with its reason."""
    lines = [line.strip() for line in failure_text(outcome).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
