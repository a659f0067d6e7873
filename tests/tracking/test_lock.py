"""Who writes a journal, read from its lock: the kernel's word counts, the file's is a name."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from search_spaces.errors import ResourceMissing
from tests.tracking.sample import sweep
from tracking.journal import Journal
from tracking.lock import holder, turn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "001" / "journal.jsonl"
    with Journal.create(found) as journal:
        journal.put(sweep()[0])
    return found


def test_a_lock_file_says_nothing_once_its_process_is_gone(path: Path) -> None:
    """Not even where another process has that number by now (a reboot, a container): this test's own."""
    path.with_suffix(".lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")
    assert holder(path) is None
    with Journal.open(path):
        assert holder(path) == (os.getpid(), socket.gethostname())


def test_a_lock_of_an_older_release_names_its_process(path: Path) -> None:
    with Journal.open(path):
        path.with_suffix(".lock").write_text("1234\n")
        assert str(holder(path)) == "process 1234"
        path.with_suffix(".lock").write_text("")
        assert str(holder(path)) == "process unknown"


def test_a_turn_makes_its_folder_or_says_why_not(tmp_path: Path) -> None:
    with turn(tmp_path / "new" / "start.lock"):
        assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ResourceMissing, match=r"cannot write in .*file"), turn(tmp_path / "file" / "start.lock"):
        pass


def test_a_file_system_without_locks_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert holder(path) is None
    with pytest.raises(ResourceMissing, match=r"cannot lock a file in .*: No locks available"), turn(path):
        pass
