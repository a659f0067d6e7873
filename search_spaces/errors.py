"""Errors a user can act on: each says what is wrong, where, and the next step, and carries its exit code.

A failed trial is *not* an error (see `train_worker.outcome`); these are faults of the input, of a missing
resource, or an interruption. `tuner.cli` prints them without a traceback and exits with `exit_code`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing wrong with an input. `line` and `column` count from 1; 0 means the whole file."""

    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    hint: str = ""

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        text = f"{place}: {self.message}" if place else self.message
        return f"{text} ({self.hint})" if self.hint else text


class MoetuneError(Exception):
    """Base of the errors shown to a user: `what` happened and the `next_step` to take."""

    exit_code = 1

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(f"{what}\n  next: {next_step}" if next_step else what)
        self.what = what
        self.next_step = next_step


class InputError(MoetuneError):
    """The input is wrong (exit 2). Lists every fault found, never only the first."""

    exit_code = 2

    def __init__(self, faults: list[Fault], next_step: str = "") -> None:
        super().__init__("\n".join(str(fault) for fault in faults), next_step)
        self.faults = tuple(faults)


class NothingAcceptable(MoetuneError):
    """The work was done, but no acceptable configuration was found (exit 3)."""

    exit_code = 3


class ResourceMissing(MoetuneError):
    """A cluster, tracking server, GPU or disk space is missing (exit 4)."""

    exit_code = 4


class Interrupted(MoetuneError):
    """Stopped by the user; state is kept and `--resume` continues (exit 130)."""

    exit_code = 130
