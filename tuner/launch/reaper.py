"""Leaves nothing behind, even after kill -9 of the driver: a small process that outlives it and clears up.

A private Ray mostly ends with its driver, but its agents were seen to hang on exit for good once the raylet was
gone (Ray 2.60: two processes, 220 MB, in 2 of 2 kills). Everything the driver starts inherits a mark in its
environment; when the driver's end of a pipe closes, whatever still carries the mark after a grace is killed. So is
what has a file of the driver's Ray session open: an agent that renames itself may have overwritten its environment.

Standard library only, and run as a file of its own: it must start in milliseconds and outlive everything.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "MOETUNE_DRIVER"
GRACE_S = 8.0  # a private Ray needs 3 to 6 s to end by itself
POLL_S = 0.2


class Reaper:
    """Marks this process's environment and starts the reaper. `close` lets it finish; a killed driver needs no call."""

    def __init__(self) -> None:
        os.environ[MARK] = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, os.environ[MARK], str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver
            env={name: value for name, value in os.environ.items() if name != MARK},
        )

    def watch(self, session: str) -> None:
        """Name the private Ray's session, such as "session_2026-11-30_10-06-38_498836_28493"."""
        assert self._process.stdin is not None
        self._process.stdin.write(session.encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """The driver ends: wait until all it started has ended, by itself or by the reaper."""
        os.environ.pop(MARK, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def marked(mark: str) -> list[int]:
    """Processes that carry the mark in the environment they were started with."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def in_session(session: str) -> list[int]:
    """Processes that have a file of a Ray session open; none for an empty name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*") if session else ():
        with contextlib.suppress(OSError):
            if any(f"/{session}/" in str(link.readlink()) for link in (folder / "fd").iterdir()):
                found.append(int(folder.name))
    return found


def main(mark: str, driver: int) -> None:
    session = sys.stdin.buffer.read().decode()  # returns when the driver closes its end, or dies
    deadline = time.monotonic() + GRACE_S
    while (left := {*marked(mark), *in_session(session)} - {driver, os.getpid()}) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
