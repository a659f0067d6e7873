"""The truth about a sweep: an append-only JSON Lines file, one event a line.

A line is written with one write(2) and fsynced before `put` returns, so what was put survives a kill -9 and a
power cut. A line without its newline was never acknowledged and is cut off on the next open; damage anywhere else
is an error, never skipped. One writer holds a lock; readers need none.
"""

import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from search_spaces.errors import Fault, InputError, MoetuneError, ResourceMissing
from search_spaces.shapes import Noun
from tracking.ballast import NO_ROOM, Ballast
from tracking.lock import take
from tracking.record import EVENT, JOURNAL_VERSION, Compared, Event, Proposed, Screened, SweepStarted, TrialRecord
from tracking.screening import same_screening

log = logging.getLogger(__name__)
JOURNAL_NAME = "journal.jsonl"


class JournalFull(ResourceMissing):
    """The record did not fit. `recorded`: it is safe all the same (the ballast made room)."""

    def __init__(self, what: str, recorded: bool) -> None:
        super().__init__(what, "free space, then run again with --resume")
        self.recorded = recorded


class JournalState(Noun):
    """A journal folded to what a resume needs. `finished` in order of finishing, `in_flight` in order of proposal."""

    head: SweepStarted
    screened: Screened | None = None
    finished: tuple[TrialRecord, ...] = ()
    in_flight: tuple[Proposed, ...] = ()
    next_number: int = 0
    compared: tuple[Compared, ...] = ()

    @property
    def searched(self) -> list[TrialRecord]:
        """The finished trials of the search, without those that verify."""
        return [record for record in self.finished if record.purpose != "verify"]


def fold(events: Iterable[Event]) -> JournalState:
    """What a journal says. InputError where it does not begin with `SweepStarted` (it is empty: nothing to resume).

    A verification trial that was cut short before the search went on is not in flight: its rounds are history.
    """
    events = tuple(events)
    heads = [event for event in events if isinstance(event, SweepStarted)]
    if not heads:
        raise InputError([Fault("the journal is empty: no sweep was started in it")], "run without --resume")
    finished = tuple(event for event in events if isinstance(event, TrialRecord))
    done = {record.number for record in finished}
    proposed = {event.number: event for event in events if isinstance(event, Proposed)}
    searched = max((event.number for event in proposed.values() if event.purpose != "verify"), default=-1)
    return JournalState(
        head=heads[0],
        screened=next((event for event in events if isinstance(event, Screened)), None),
        finished=finished,
        in_flight=tuple(
            event
            for number, event in proposed.items()
            if number not in done and (event.purpose != "verify" or number > searched)
        ),
        next_number=max((*done, *proposed), default=-1) + 1,
        compared=tuple(event for event in events if isinstance(event, Compared)),
    )


def read_events(path: Path) -> list[Event]:
    """Every whole event of a journal, without taking its lock; a line still being written is left out."""
    return _parse(_read(path), path)[0]


class Journal:
    """The writing end (a `Store`). Made by `Journal.create` or `Journal.open`; safe to use from several threads."""

    def __init__(self, path: Path, fd: int, lock_fd: int, events: list[Event], ballast: Ballast) -> None:
        self.path = path
        self._fd = fd
        self._lock_fd = lock_fd
        self._size_bytes = os.fstat(fd).st_size
        self._events = events
        self._seen = {_key(event): event for event in events}
        self._ballast = ballast
        self._mutex = threading.Lock()

    @classmethod
    def create(cls, path: Path) -> Self:
        """Start a journal. ResourceMissing where the folder cannot be written, InputError where one is there."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise InputError([Fault("a journal is here already", str(path))], "continue it with --resume")
            lock_fd = take(path)
        except OSError as error:
            raise _unusable(path.parent, error) from error
        ballast = Ballast(path.with_suffix(".ballast"))
        try:
            ballast.fill()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _sync_folder(path.parent)
        except OSError as error:
            ballast.free()
            os.close(lock_fd)
            raise _unusable(path.parent, error) from error
        return cls(path, fd, lock_fd, [], ballast)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Continue a journal: a torn last line is cut off. Raises as `create` and `read_events` do."""
        if not path.exists():
            raise InputError([Fault("no journal here", str(path))], "run without --resume")
        try:
            lock_fd = take(path)
        except OSError as error:
            raise _unusable(path.parent, error) from error
        try:
            data = _read(path)
            events, whole_bytes = _parse(data, path)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if whole_bytes < len(data):
                log.warning("%s: cut off %d bytes of an unfinished last line", path, len(data) - whole_bytes)
                os.ftruncate(fd, whole_bytes)
                os.fsync(fd)
        except MoetuneError:
            os.close(lock_fd)
            raise
        except OSError as error:
            os.close(lock_fd)
            raise _unusable(path.parent, error) from error
        ballast = Ballast(path.with_suffix(".ballast"))
        if not ballast.refill():
            log.warning("%s: no room to reserve; the next full disk may lose a record", path.parent)
        return cls(path, fd, lock_fd, events, ballast)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, those put through this object included."""
        with self._mutex:
            return tuple(self._events)

    def put(self, event: Event) -> None:
        """Append one event; durable on return. A no-op for an event already there.

        MoetuneError for another record under the same trial number, InputError for another screening
        (`same_screening`), JournalFull (a ResourceMissing) on a full disk.
        """
        key = _key(event)
        with self._mutex:
            known = self._seen.get(key)
            if known is not None:
                _same(known, event, self.path)
                return
            if not self._seen and not isinstance(event, SweepStarted):
                raise MoetuneError(f"{self.path}: the first event must be sweep_started, not {event.event}")
            if self._fd < 0:
                raise MoetuneError(f"{self.path} is closed; {event.event} was not recorded")
            try:
                self._append(_line(event))
            except JournalFull as full:
                if full.recorded:
                    self._remember(key, event)
                raise
            self._remember(key, event)

    def close(self) -> None:
        """Let go of the file and the lock; the ballast stays for the next open."""
        with self._mutex:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._lock_fd)
            self._fd = self._lock_fd = -1

    def _remember(self, key: tuple[str, str], event: Event) -> None:
        self._seen[key] = event
        self._events.append(event)

    def _append(self, line: bytes) -> None:
        """Write and sync `line`, or leave the file as it was; on a full disk once more in the ballast's room."""
        first = self._try_append(line)
        if first is None:
            return
        where = f"{self.path}: {first.strerror}"
        if first.errno not in NO_ROOM:
            raise ResourceMissing(f"cannot write the journal {where}", "repair the disk, then run again with --resume")
        if self._ballast.free() and self._try_append(line) is None:
            raise JournalFull(f"{where}; this record was kept in the reserved room", recorded=True)
        raise JournalFull(f"{where}; the last record could not be kept, all before it are safe", recorded=False)

    def _try_append(self, line: bytes) -> OSError | None:
        try:
            rest = line
            while rest:  # one write(2), except on a full disk, where the second try of a short write tells why
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError as error:
            self._cut_back()
            return error
        self._size_bytes += len(line)
        return None

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size_bytes)
        except OSError as error:
            self._let_go()  # nothing may be appended behind half a line
            raise ResourceMissing(
                f"cannot write the journal {self.path}: {error.strerror}", "repair the disk, then use --resume"
            ) from error


def _same(known: Event, event: Event, path: Path) -> None:
    """Refuses to replace one event by another."""
    if isinstance(known, Screened) and isinstance(event, Screened):
        same_screening(known, event)
    elif _line(known) != _line(event):
        raise MoetuneError(
            f"{path}: another {event.event} record is there under {_key(event)[1]}",
            "report this as a bug of moetune: a finished trial must not be recorded twice",
        )


def _line(event: Event) -> bytes:
    return event.model_dump_json().encode() + b"\n"


def _key(event: Event) -> tuple[str, str]:
    """What makes an event the same one. Heads and comparisons may come again with other content, trials may not."""
    match event:
        case Proposed() | TrialRecord():
            return event.event, str(event.number)
        case Screened():
            return event.event, "the space"
        case _:
            return event.event, _line(event).decode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError([Fault("no journal here", str(path))], "check the name of the run") from error
    except OSError as error:
        raise _unusable(path, error) from error


def _parse(data: bytes, path: Path) -> tuple[list[Event], int]:
    """Events, and how many bytes of `data` are whole lines."""
    lines = data.split(b"\n")
    torn = lines.pop()  # after the last newline: nothing, or a line that was never finished
    # After a power cut a file system may keep a line's length and not its bytes: zeros where the text should be.
    if lines and not torn and b"\0" in lines[-1]:
        torn = lines.pop() + b"\n"
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            _check_version(found, path, number)
            events.append(EVENT.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise _damaged(path, number, f"{place}: {first['msg']}") from error
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, str(error)) from error
    return events, len(data) - len(torn)


def _check_version(found: object, path: Path, line: int) -> None:
    head = isinstance(found, dict) and found.get("event") == "sweep_started"
    if line == 1 and not head:
        raise _damaged(path, line, "the first event is not sweep_started")
    if head and isinstance(found, dict) and found.get("journal_version") != JOURNAL_VERSION:
        version = found.get("journal_version")
        fault = Fault(f"journal_version {version!r}; this moetune knows {JOURNAL_VERSION}", str(path), line)
        raise InputError([fault], "use the moetune that wrote it, or start a new run")


def _damaged(path: Path, line: int, why: str) -> InputError:
    fault = Fault(f"damaged journal: {why}", str(path), line)
    return InputError([fault], "restore the file from a copy, or start a new run; moetune never skips a record")


def _unusable(folder: Path, error: OSError) -> ResourceMissing:
    step = "free space" if error.errno in NO_ROOM else "make the folder writable, or set tracking.folder to another one"
    return ResourceMissing(f"cannot keep a journal in {folder}: {error.strerror}", step)


def _sync_folder(folder: Path) -> None:
    """Make the file's name durable too: fsync of a file says nothing about its folder (fsync(2))."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
