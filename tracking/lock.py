"""One writer a journal: a lock file beside it that names the writing process.

The lock is the kernel's (flock) and ends with the process, however that ends: what the file says is only who to name.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from search_spaces.errors import ResourceMissing
from tracking.ballast import NO_ROOM

TRIES = 5  # `holder` takes a shared lock for an instant; that must not look like a second writer
PAUSE_S = 0.05


class Holder(NamedTuple):
    """Who writes a journal. `pid` 0: it left no name; `host` "": an older release, which left none."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid or 'unknown'}" + (f" on {self.host}" if self.host else "")


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
                named = _named(fd)
                os.close(fd)
                raise ResourceMissing(
                    f"{journal} is being written by {named}", "wait for it, or stop it with `moetune stop`"
                ) from error
            time.sleep(PAUSE_S)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        if error.errno not in NO_ROOM:  # a lock without a name still locks
            os.close(fd)
            raise
    return fd


def holder(journal: Path) -> Holder | None:
    """Who is writing this journal now, or None. A lock file that a dead process left says nothing."""
    try:
        fd = os.open(_lock_path(journal), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(fd)
    except OSError:  # a file system without locks: nobody can write a journal there (`take`)
        return None
    finally:
        os.close(fd)
    return None


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Alone in the block among all that take this lock file, waiting for the others; its folder is made if need be.

    Raises ResourceMissing where the folder cannot be written, or its file system has no locks.
    """
    fd = -1
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ResourceMissing(
            f"cannot {'write' if fd < 0 else 'lock a file'} in {lock.parent}: {error.strerror}",
            "make the folder writable and free space there, or set tracking.folder to another one",
        ) from error
    try:
        yield
    finally:
        os.close(fd)


def _named(fd: int) -> Holder:
    pid, _, host = os.pread(fd, 320, 0).decode(errors="replace").strip().partition(" ")
    return Holder(int(pid) if pid.isdecimal() else 0, host)


def _lock_path(journal: Path) -> Path:
    return journal.with_suffix(".lock")
