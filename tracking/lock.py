"""One writer a journal: a lock file beside it that names the writing process."""

import fcntl
import os
import time
from pathlib import Path

from search_spaces.errors import ResourceMissing
from tracking.ballast import NO_ROOM

TRIES = 5  # `holder` takes a shared lock for an instant; that must not look like a second writer
PAUSE_S = 0.05


def take(journal: Path) -> int:
    """Lock for writing; the lock lasts until the returned descriptor is closed or the process dies.

    ResourceMissing names the holder. flock, not POSIX locks: those go when any descriptor of the file is closed.
    """
    fd = os.open(_lock_path(journal), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for last in (attempt == TRIES - 1 for attempt in range(TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if last:
                pid = _pid(fd) or "unknown"
                os.close(fd)
                raise ResourceMissing(
                    f"{journal} is being written by process {pid}", "wait for it, or stop it with `moetune stop`"
                ) from error
            time.sleep(PAUSE_S)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        if error.errno not in NO_ROOM:  # a lock without a name still locks
            os.close(fd)
            raise
    return fd


def holder(journal: Path) -> int | None:
    """The process id that is writing this journal now (0: one that left no name), or None."""
    try:
        fd = os.open(_lock_path(journal), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(fd)
    finally:
        os.close(fd)
    return None


def _pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).decode().strip()
    return int(text) if text.isdigit() else 0


def _lock_path(journal: Path) -> Path:
    return journal.with_suffix(".lock")
