"""Live tensor bytes: each storage once, from birth to death. Sizes in bytes of float32 tensors."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from train_worker.meter import LiveBytes, PeakMemory, StepClock

KIB = 256  # elements of float32 in one KiB


def test_a_new_tensor_counts_and_a_freed_one_does_not() -> None:
    with LiveBytes() as live:
        first = torch.zeros(4 * KIB)
        assert live.live_bytes == 4096
        del first
        assert live.live_bytes == 0
        second = torch.zeros(2 * KIB)
        assert live.live_bytes == 2048
    assert live.peak_bytes == 4096
    assert second.numel() == 2 * KIB


def test_views_share_one_storage() -> None:
    with LiveBytes() as live:
        whole = torch.zeros(4 * KIB)
        rows = whole.view(4, KIB)
        part = rows[1:, :16].t()
        del whole, rows
        assert live.live_bytes == 4096
        del part
        assert live.live_bytes == 0


def test_held_tensors_count_from_the_start_and_once() -> None:
    weight = torch.zeros(4 * KIB)
    with LiveBytes([weight, weight.view(2, -1), torch.zeros(KIB)]) as live:
        assert live.live_bytes == 4096  # the temporary died with the list
        result = weight + 1
        assert live.live_bytes == 8192
        del result
    assert live.peak_bytes == 4096 + 4096


def test_a_storage_resized_to_nothing_is_free() -> None:
    """Selective recompute frees outputs with resize_(0) and fills them again in the backward pass."""
    with LiveBytes() as live:
        output = torch.zeros(4 * KIB)
        output.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        output.untyped_storage().resize_(4096)
        assert live.live_bytes == 4096
    assert torch.UntypedStorage.resize_ is type(output.untyped_storage()).resize_
    assert "booking" not in torch.UntypedStorage.resize_.__qualname__


def test_storages_that_outlive_the_mode_are_let_go() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(KIB)
    peak = live.peak_bytes
    del kept
    assert live.peak_bytes == peak == 1024


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_saved_activations_are_seen_through_autograd(layers: int) -> None:
    weight = torch.ones(KIB, requires_grad=True)

    def peak(value: torch.Tensor) -> int:
        with LiveBytes([weight]) as live:
            for _ in range(layers):
                value = (value * weight).exp()  # exp saves its result, the product its input
            value.sum().backward()
        weight.grad = None
        return live.peak_bytes

    first = peak(torch.zeros(KIB))
    assert first == peak(torch.zeros(KIB))  # the same to the byte
    assert first >= layers * 1024


def test_cpu_peak_is_that_of_the_observed_step(tmp_path: Path) -> None:
    held = [torch.zeros(KIB)]

    def tensors() -> Iterable[torch.Tensor]:
        return held

    memory = PeakMemory(torch.device("cpu"), tensors)
    torch.zeros(64 * KIB)
    with memory.observe():
        torch.zeros(4 * KIB)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert memory.largest() == 1024 + 4096
    finally:
        torch.distributed.destroy_process_group()


def test_a_clock_has_a_time_for_each_step_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 10.5, 20.0, 30.0, 30.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    clock = StepClock(torch.device("cpu"))
    with clock.step():
        pass
    with pytest.raises(RuntimeError, match="in the step"), clock.step():
        raise RuntimeError("in the step")
    with clock.step():
        pass
    assert clock.seconds == [0.5, 0.25]
    assert clock.latest() == [0.25]


class FakeEvent:
    """Stands in for torch.cuda.Event; its time is the number of things said to the device before it was recorded."""

    said: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = len(self.said)
        self.said.append("event")

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.said[-1] == "drained"  # before that the answer would be an error
        return float(end.at - self.at)


def test_on_cuda_the_events_stand_around_the_step_and_the_device_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(FakeEvent, "said", said)
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: said.append("drained"))
    clock = StepClock(torch.device("cuda:0"))
    with clock.step():
        said.append("kernels")
    assert said == ["drained", "event", "kernels", "event", "drained"]
    assert clock.gpu_seconds == [0.002]  # events answer in milliseconds
    assert clock.latest() == [clock.seconds[0], 0.002]


def test_a_tensor_that_dies_while_the_watching_ends_breaks_nothing() -> None:
    """Seen in one trial of some sixty: a thread of gloo let go of one between two watchers."""

    class Dying:
        def detach(self) -> None:
            live._forget(last)

    with LiveBytes() as live:
        kept = [torch.ones(4), torch.ones(8)]
        first, last = list(live._watchers)
        live._watchers[first].detach()
        live._watchers[first] = Dying()
    assert live.peak_bytes == 48
    assert len(kept) == 2
