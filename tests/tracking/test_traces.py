"""Traces beside the journal: a disk that takes no more costs the trace and nothing else."""

from pathlib import Path

import pytest

from tracking.traces import FOLDER, store_trace, trace_path


def test_half_a_trace_leaves_the_disk_to_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, packed: bytes) -> int:
        with path.open("wb") as file:
            file.write(packed[: len(packed) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", half)
        store_trace(tmp_path, "t1", b"packed")
    assert list((tmp_path / FOLDER).iterdir()) == []
    store_trace(tmp_path, "t1", b"packed")
    assert trace_path(tmp_path, "t1").read_bytes() == b"packed"
