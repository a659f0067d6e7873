"""What a rank leaves behind as it goes: the phase it is in and the time each phase took.

Written to a small file at each phase and step, because a rank that is killed sends nothing: the launcher
reads the file to say *where* it died (`phase`, `step`).
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from train_worker.job import Phase


class Progress:
    """Times phases on this rank. `path` None keeps it in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.phase: Phase = "fork"
        self.step = -1
        self.seconds: dict[str, float] = {}

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Add the time of the block to `phase`; on an exception the phase stays, to be reported."""
        self.phase, start = phase, time.perf_counter()
        self._write()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def at_step(self, step: int) -> None:
        """Note that optimizer step `step` (from 0, warm-up included) begins."""
        self.step = step
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            text = json.dumps({"phase": self.phase, "step": self.step, "pid": os.getpid()})
            with suppress(OSError):  # a full disk: only the word on where a killed rank was is lost, not the trial
                self.path.write_text(text)


def read_progress(path: Path) -> tuple[str, int]:
    """Phase and step a rank had reached; ("fork", -1) where it wrote nothing readable."""
    try:
        found = json.loads(path.read_text())
        return str(found["phase"]), int(found["step"])
    except (OSError, ValueError, KeyError):
        return "fork", -1
