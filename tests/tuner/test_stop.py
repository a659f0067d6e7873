"""How a running sweep is told to stop: signals and the stop file, on the real handlers, without workers."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InputError, ResourceMissing
from tests.tuner.test_session import Bench, drive
from tuner.commands.run import stoppable
from tuner.commands.status import stop
from tuner.run_folder import RunFolder
from tuner.session import SweepSession


class Board:
    """Counts what the handlers ask of the slots; `interrupt.remote()` is the one call they make."""

    def __init__(self) -> None:
        self.hurry = False
        self.interrupts = 0
        self.board = self.interrupt = self

    def remote(self) -> None:
        self.interrupts += 1


def at_once(session: SweepSession, folder: RunFolder, slots: Any, act: Any) -> None:
    with stoppable(session, folder, slots):
        act()
        deadline = time.monotonic() + 10
        while not session.stop_reason and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "runs/small/001").mkdir(parents=True)
    found = Bench(tmp_path)
    found.path = tmp_path / "runs/small/001/journal.jsonl"
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_search_and_interrupts_the_slots(bench: Bench, number: signal.Signals) -> None:
    session, slots = bench.session(), Board()
    before = signal.getsignal(number)
    at_once(session, RunFolder(path=bench.path.parent), slots, lambda: os.kill(os.getpid(), number))
    assert session.interrupted
    assert slots.interrupts == 1
    assert session.next_job("h") == "done"
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_does_not_wait(bench: Bench) -> None:
    session, slots = bench.session(), Board()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        at_once(session, RunFolder(path=bench.path.parent), slots, twice)
    assert slots.hurry


def test_moetune_stop_reaches_the_driver_and_waits_for_it(bench: Bench, tmp_path: Path) -> None:
    session, slots, folder = bench.session(), Board(), RunFolder(path=bench.path.parent)
    drive(session, limit=2)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(stop(tmp_path / "runs/small", 20)))
    at_once(session, folder, slots, asking.start)
    assert session.interrupted
    assert slots.interrupts == 1
    bench.journal.close()  # the driver is gone
    asking.join(10)
    assert (found[0].state, found[0].finished) == ("resumable", 2)
    with pytest.raises(InputError, match="not running"):
        stop(tmp_path / "runs/small", 1)


def test_a_driver_that_does_not_stop_is_said(bench: Bench, tmp_path: Path) -> None:
    bench.session()
    with pytest.raises(ResourceMissing, match="did not stop"):
        stop(tmp_path / "runs/small", 0.3)
    bench.journal.close()
