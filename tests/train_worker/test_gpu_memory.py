"""Free GPU memory before a trial, by a driver that is played: no machine of the suite has one."""

import itertools

import pytest

from train_worker.failures import classify
from train_worker.gpu_memory import TOLERATED_BYTES, GpuInUse, used_memory_bytes, visible_device, wait_until_free
from train_worker.outcome import Crashed

GIB = 1 << 30


def test_memory_that_a_dying_process_still_holds_is_waited_for() -> None:
    told = iter([100 * GIB, 40 * GIB, TOLERATED_BYTES])
    wait_until_free(0, used_bytes=lambda _: next(told), wait_s=5)
    assert next(told, None) is None


def test_memory_that_stays_in_use_is_the_machines_fault_and_worth_another_attempt() -> None:
    asked = itertools.count()
    with pytest.raises(GpuInUse, match=r"12\.5 GiB of GPU 3 are in use before the trial began") as raised:
        wait_until_free(3, used_bytes=lambda _: 12 * GIB + GIB // 2 + 0 * next(asked), wait_s=0.5)
    assert next(asked) > 1  # it asked again before it gave up
    outcome = classify(raised.value, "process_group")
    assert isinstance(outcome, Crashed)
    assert outcome.infrastructure


def test_a_driver_that_does_not_tell_is_not_waited_for() -> None:
    wait_until_free(0, used_bytes=lambda _: None, wait_s=0)


@pytest.mark.parametrize(
    ("local_rank", "visible", "device"),
    [
        (1, None, 1),
        (1, "", 1),
        (0, "6,7", 6),
        (1, "6, 7", 7),
        (0, "GPU-8f3c0a52-0000-1111-2222-333344445555", "GPU-8f3c0a52-0000-1111-2222-333344445555"),
    ],
)
def test_the_device_of_a_rank_is_the_one_that_cuda_shows_it(
    local_rank: int, visible: str | None, device: int | str
) -> None:
    assert visible_device(local_rank, visible) == device


def test_fewer_visible_devices_than_ranks_is_an_error() -> None:
    with pytest.raises(IndexError):
        visible_device(2, "0,1")


def test_where_no_driver_is_installed_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert used_memory_bytes(0) is None
