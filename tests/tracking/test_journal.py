"""The journal keeps what it was given: through kill -9, a torn line, a full disk, and a second writer."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from search_spaces.errors import InputError, MoetuneError, ResourceMissing
from tests.tracking.sample import candidate, compared, finished, head, measured, proposed, screened, sweep
from tracking.ballast import BALLAST_BYTES
from tracking.journal import Journal, JournalFull, fold, read_events
from tracking.lock import holder
from tracking.record import Event, Proposed, Purpose, TrialRecord
from train_worker.outcome import Crashed, Measured

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "laptop" / "001" / "journal.jsonl"


def written(path: Path) -> Path:
    with Journal.create(path) as journal:
        for event in sweep():
            journal.put(event)
    return path


def child(source: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_what_was_put_is_read_back_in_order(path: Path) -> None:
    assert read_events(written(path)) == sweep()
    with Journal.open(path) as journal:
        assert list(journal.events) == sweep()


def test_one_event_is_one_line_of_json(path: Path) -> None:
    lines = written(path).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [event.event for event in sweep()]


def test_a_put_is_one_write_and_one_fsync_in_that_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_write, real_fsync = os.write, os.fsync

    def write(fd: int, data: bytes) -> int:
        calls.append("write")
        return real_write(fd, data)

    def fsync(fd: int) -> None:
        calls.append("fsync")
        real_fsync(fd)

    with Journal.create(path) as journal:
        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "fsync", fsync)
        journal.put(head())
        journal.put(head())  # there already
        journal.put(screened())
    assert calls == ["write", "fsync", "write", "fsync"]


def test_a_loss_that_is_not_a_number_survives(path: Path) -> None:
    record = finished(0, candidate(), measured(0.1, loss=math.nan))
    with Journal.create(path) as journal:
        journal.put(head())
        journal.put(record)
    found = read_events(path)[1]
    assert isinstance(found, TrialRecord)
    assert isinstance(found.outcome, Measured)
    assert math.isnan(found.outcome.steps[0].loss)
    with Journal.open(path) as journal:
        journal.put(record)
    assert len(read_events(path)) == 2


def test_a_screening_that_judges_the_space_otherwise_is_a_fault_of_the_input(path: Path) -> None:
    """A run resumed after an upgrade of the rules: exit 2, what changed, and nothing written."""
    first, second = screened().rejected
    fewer = first.model_copy(update={"count": 7})
    changes: list[dict[str, object]] = [
        {"accepted": 31, "rejected": (fewer, second)},
        {"rejected": (second, first.model_copy(update={"rule": "fp8-needs-sm90"}))},
        {"accepted": 29},
        {"total": 50},
    ]
    with Journal.open(written(path)) as journal:
        before = path.read_bytes()
        for change in changes:
            with pytest.raises(InputError, match="the rules changed since this run began: 30 of 40") as caught:
                journal.put(screened().model_copy(update=change))
            assert "without --resume" in caught.value.next_step
        with pytest.raises(InputError, match=r"31 of 40 can now \(points refused: fp8-needs-sm89 8 then, 7 now\)"):
            journal.put(screened().model_copy(update=changes[0]))
        assert path.read_bytes() == before


def test_a_screening_that_only_words_its_reasons_otherwise_is_the_same(path: Path) -> None:
    first, second = screened().rejected
    worded = first.model_copy(update={"reason": "better said", "example": candidate(x=1)})
    with Journal.open(written(path)) as journal:
        before = path.read_bytes()
        journal.put(screened().model_copy(update={"rejected": (second, worded)}))
        assert path.read_bytes() == before


def test_another_record_for_a_finished_trial_is_refused(path: Path) -> None:
    with Journal.open(written(path)) as journal, pytest.raises(MoetuneError, match=r"another finished record.*1"):
        journal.put(finished(1, candidate(), Crashed(phase="build", detail="other")))
    assert read_events(path) == sweep()


def test_a_journal_begins_with_its_head(path: Path) -> None:
    with Journal.create(path) as journal, pytest.raises(MoetuneError, match="first event must be sweep_started"):
        journal.put(screened())


def test_a_resumed_head_is_appended(path: Path) -> None:
    again = head(resumed=True, started_at="2026-01-03T00:00:00+00:00")
    with Journal.open(written(path)) as journal:
        journal.put(again)
    assert read_events(path) == [*sweep(), again]


def test_fold_gives_what_a_resume_needs() -> None:
    events: list[Event] = [head(), screened()]
    events += [proposed(n, candidate(micro_batch_size=n)) for n in range(4)]
    records = [finished(n, candidate(micro_batch_size=n), measured(0.1)) for n in (2, 0)]
    state = fold([*events, *records, compared()])
    assert state.head == head()
    assert state.screened == screened()
    assert [record.number for record in state.finished] == [2, 0]
    assert [event.number for event in state.in_flight] == [1, 3]
    assert state.next_number == 4
    assert state.compared == (compared(),)
    assert fold([head()]).next_number == 0


def test_a_verification_trial_from_before_the_search_went_on_is_not_in_flight() -> None:
    def of(number: int, purpose: Purpose) -> Proposed:
        return proposed(number, candidate(micro_batch_size=number + 1), purpose)

    events: list[Event] = [head(), of(0, "baseline"), of(1, "verify")]
    assert [event.number for event in fold(events).in_flight] == [0, 1]
    state = fold([*events, of(2, "search"), of(3, "verify")])
    assert [event.number for event in state.in_flight] == [0, 2, 3]
    assert state.next_number == 4
    with pytest.raises(InputError, match="empty"):
        fold([])


def test_every_cut_of_the_last_line_is_repaired(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = written(path).read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, 2, last // 2, last - 1):
        path.write_bytes(whole[:-cut])
        assert read_events(path) == sweep()[:-1]
        assert path.read_bytes() == whole[:-cut]  # readers do not repair
        caplog.clear()
        with Journal.open(path) as journal:
            assert "unfinished last line" in caplog.text
            journal.put(compared())
        assert path.read_bytes() == whole


def test_zeros_left_by_a_power_cut_are_a_torn_line(path: Path) -> None:
    whole = written(path).read_bytes()
    path.write_bytes(whole + b'{"event":' + bytes(100) + b"\n")
    with Journal.open(path) as journal:
        assert list(journal.events) == sweep()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"{", b'{"event":"finished"}', b'{"event":"nonsense"}', b"[]", b"\xff"])
def test_damage_in_the_middle_names_its_line(path: Path, damage: bytes) -> None:
    lines = written(path).read_bytes().splitlines()
    lines[3] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    for reader in (read_events, Journal.open):
        with pytest.raises(InputError, match=re.escape(f"{path}:4: damaged journal")):
            reader(path)
    assert holder(path) is None  # the lock of a failed open is let go


def test_a_journal_of_another_version_is_refused(path: Path) -> None:
    text = written(path).read_text().replace('"journal_version":1', '"journal_version":7')
    path.write_text(text)
    with pytest.raises(InputError, match="journal_version 7; this moetune knows 1") as caught:
        Journal.open(path)
    assert caught.value.exit_code == 2


def test_create_does_not_overwrite_and_open_does_not_create(path: Path) -> None:
    with pytest.raises(InputError, match="no journal here"):
        Journal.open(path)
    written(path)
    with pytest.raises(InputError, match="already"):
        Journal.create(path)
    assert read_events(path) == sweep()


def test_a_second_writer_is_told_who_the_first_is(path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tracking.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""
    process = child(script, written(path))
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(ResourceMissing, match=f"being written by process {process.pid}") as caught:
        Journal.open(path)
    assert caught.value.exit_code == 4
    assert holder(path) == (process.pid, socket.gethostname())
    assert read_events(path) == sweep()
    process.kill()
    process.communicate()
    assert holder(path) is None
    Journal.open(path).close()


PUT_FOREVER = """
import sys
from pathlib import Path
from tests.tracking.sample import candidate, finished, head, measured
from tracking.journal import Journal
journal = Journal.create(Path(sys.argv[1]))
journal.put(head())
with open(sys.argv[2], "w", buffering=1) as told:
    for number in range(100_000):
        journal.put(finished(number, candidate(), measured(0.1)))
        told.write(f"{number}\\n")
"""


@pytest.mark.parametrize("wait_for", [5, 40])
def test_kill_9_in_the_middle_of_many_puts_loses_nothing(path: Path, wait_for: int) -> None:
    told = path.with_name("told")  # a file and not a pipe: what a reader has buffered would be lost in the kill
    told.parent.mkdir(parents=True)
    told.touch()
    process = child(PUT_FOREVER, path, told)
    while len(told.read_text().splitlines()) <= wait_for:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = int(told.read_text().rpartition("\n")[0].splitlines()[-1])
    with Journal.open(path) as journal:
        state = fold(journal.events)
        assert [record.number for record in state.finished][: last + 1] == list(range(last + 1))
        assert state.next_number in (last + 1, last + 2)  # the one that was put but not yet said so
        journal.put(finished(state.next_number, candidate(), measured(0.1)))


def test_puts_from_many_threads_are_whole_lines(path: Path) -> None:
    with Journal.create(path) as journal:
        journal.put(head())

        def work(start: int) -> None:
            for number in range(start, 40, 4):
                journal.put(finished(number, candidate(), measured(0.1)))

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {r.number for r in fold(read_events(path)).finished} == set(range(40))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={2 * BALLAST_BYTES + (256 << 10)}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs, which a really full disk needs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def put_numbers(journal: Journal, numbers: Iterable[int]) -> None:
    for number in numbers:
        journal.put(finished(number, candidate(), measured(0.1)))


def fill_up(disk: Path, leave: int = 0) -> Path:
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        chunk = 4096
        try:
            while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > leave:
                file.write(b"x" * chunk)
        except OSError:
            pass
    return filler


def test_a_full_disk_loses_no_record(small_disk: Path) -> None:
    path = small_disk / "run" / "journal.jsonl"
    journal = Journal.create(path)
    journal.put(head())
    filler = fill_up(small_disk)
    with pytest.raises(JournalFull, match="--resume") as stopped:
        put_numbers(journal, range(1000))  # the journal's own last page may still have room for a few
    assert stopped.value.recorded
    number = fold(journal.events).next_number - 1
    assert [r.number for r in fold(read_events(path)).finished] == list(range(number + 1))

    fill_up(small_disk)  # now without a ballast: the record is lost, the file stays whole
    with pytest.raises(JournalFull) as caught:
        put_numbers(journal, range(number + 1, number + 1000))
    assert not caught.value.recorded
    kept = fold(journal.events).next_number
    assert path.read_bytes().endswith(b"\n")
    assert [r.number for r in fold(read_events(path)).finished] == list(range(kept))
    journal.close()

    filler.unlink()
    with Journal.open(path) as journal:
        assert path.with_suffix(".ballast").stat().st_size == BALLAST_BYTES
        put_numbers(journal, [kept])
    assert fold(read_events(path)).next_number == kept + 1


def test_a_disk_with_no_room_to_begin_with_is_refused(small_disk: Path) -> None:
    fill_up(small_disk, leave=BALLAST_BYTES // 2)
    with pytest.raises(ResourceMissing, match=r"No space left[\s\S]*free space"):
        Journal.create(small_disk / "journal.jsonl")
    assert not (small_disk / "journal.jsonl").exists()
    assert not (small_disk / "journal.ballast").exists()


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from tests.tracking.sample import candidate, finished, head, measured
from tracking.journal import Journal, JournalFull
journal = Journal.create(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
journal.put(head())
for number in range(60):
    try:
        journal.put(finished(number, candidate(), measured(0.1)))
    except JournalFull as full:
        print(number, full.recorded)
        break
"""


def test_a_file_size_limit_keeps_every_record_before_it(path: Path) -> None:
    out = child(FILE_LIMIT, path).communicate()[0].split()
    assert out[1] == "False"  # giving up the ballast cannot help here
    assert fold(read_events(path)).next_number == int(out[0])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceMissing, match=re.escape(str(tmp_path / "file"))) as caught:
        Journal.create(tmp_path / "file" / "journal.jsonl")
    assert caught.value.exit_code == 4


def test_an_unwritable_folder_is_named() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc, where even root cannot make a file")
    with pytest.raises(ResourceMissing, match=r"/proc/self.*[\s\S]*tracking\.folder"):
        Journal.create(Path("/proc/self/journal.jsonl"))


def test_a_closed_journal_says_so(path: Path) -> None:
    journal = Journal.open(written(path))
    journal.close()
    journal.close()
    with pytest.raises(MoetuneError, match="closed"):
        journal.put(head(resumed=True))
