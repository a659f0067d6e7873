"""The profiled step: real kineto around a small torch model, and events of a GPU as kineto gives them."""

import base64
import gzip
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.candidate import Candidate, KnobValue
from tests.tracking.sample import measured
from train_worker.keep import Keeper
from train_worker.megatron import profiler
from train_worker.outcome import Measured

DEVICE = torch.device("cpu")


class Host:
    def after_step(self, steps: int) -> None:
        self.steps = steps


class Trainer:
    """What the profiled step needs of `train_worker.megatron.step.Trainer`, on one matrix."""

    def __init__(self, keep_trace: bool = False, knobs: dict[str, KnobValue] | None = None, count: int = 1) -> None:
        self.device, self.count, self.trained = DEVICE, count, 0
        self.job = SimpleNamespace(keep_trace=keep_trace, candidate=Candidate(knobs=knobs or {}), world_size=1)
        self.configs = SimpleNamespace(transformer=SimpleNamespace(finalize_model_grads_func=self.reduce))
        self.layer, self.buffer = torch.nn.Linear(64, 64), torch.ones(64)
        self.built = SimpleNamespace(optimizer=torch.optim.SGD(self.layer.parameters(), lr=0.1))

    def batches(self, step: int) -> list[list[torch.Tensor]]:
        return [list(torch.randn(self.count, 32, 64, generator=torch.Generator().manual_seed(step)))]

    def step(self, batches: list[list[torch.Tensor]]) -> None:
        self.trained = len(batches[0])
        self.buffer.zero_()
        self.schedule(batches)
        self.built.optimizer.step()

    def schedule(self, batches: list[list[torch.Tensor]]) -> None:
        for batch in batches[0]:
            self.layer(batch).exp().sum().backward()
        self.configs.transformer.finalize_model_grads_func()

    def reduce(self) -> None:
        torch.distributed.all_reduce(torch.ones(1))


class Failing(Trainer):
    def step(self, batches: list[list[torch.Tensor]]) -> None:
        super().step(batches)
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def profiled(trainer: Trainer, keeper: Keeper | None = None, step_s: float = 0.2) -> profiler.WithProfile:
    return profiler.with_profile(measured(step_s), trainer, Host(), keeper or Keeper())  # type: ignore[arg-type]


@pytest.mark.usefixtures("group")
def test_operators_have_their_phase_and_category() -> None:
    trainer = Trainer()
    outcome, trace, together = profiled(trainer)
    assert together
    assert trace is not None
    assert outcome.profile_error is None
    assert outcome.profile is not None
    assert outcome.profile.wall == "compute"
    phases = {(event.name, event.phase) for event in trace.events}
    assert {("aten::addmm", "forward"), ("aten::exp", "forward"), ("aten::mm", "backward")} <= phases
    assert {phase for name, phase in phases if name == "aten::zero_"} == {"optimizer"}
    assert {phase for name, phase in phases if name.startswith("aten::_foreach") or name == "aten::add_"} >= {
        "optimizer"
    }
    assert {event.phase for event in trace.events if event.category == "communication"} == {"reduction"}
    assert trainer.configs.transformer.finalize_model_grads_func == trainer.reduce
    assert all(0 <= event.start_us <= trace.step_time_us for event in trace.events)
    assert "step" not in vars(trainer.built.optimizer)  # the mark is off again


@pytest.mark.usefixtures("group")
def test_a_profiled_step_that_fails_costs_no_measurement() -> None:
    trainer = Failing()
    outcome, trace, together = profiled(trainer)
    assert not together  # peers may be in a collective of the step
    assert trace is None
    assert outcome.profile is None
    assert outcome.profile_error == "OutOfMemoryError: CUDA out of memory"
    assert outcome.steps == measured(0.2).steps
    assert "step" not in vars(trainer.built.optimizer)
    assert profiled(Trainer())[0].profile is not None  # the profiler is free for the next


@pytest.mark.usefixtures("group")
def test_a_profiler_that_does_not_start_runs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(profiler.profile, "_prepare_trace", refuse)
    trainer = Trainer()
    before = trainer.layer.weight.detach().clone()
    outcome, _, together = profiled(trainer)
    assert together  # on every rank
    assert outcome.profile_error == "ProfilerFailed: the profiler did not start: CUPTI_ERROR_NOT_INITIALIZED"
    assert torch.equal(before, trainer.layer.weight)


OVERLAPPED: dict[str, KnobValue] = {"overlap_grad_reduce": True}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("step_s", "knobs", "keep_trace", "trained"),
    [
        (0.5, {}, False, 8),
        (1.0, {}, False, 4),
        (4.0, {}, False, 1),
        (40.0, {}, False, 1),
        (4.0, {}, True, 8),
        (4.0, OVERLAPPED, False, 8),
        (4.0, {"overlap_grad_reduce": False}, False, 1),
        (4.0, {"pipeline_model_parallel_size": 2}, False, 8),
        (4.0, {"cuda_graph_impl": "transformer_engine"}, False, 8),
    ],
)
def test_a_slow_step_is_profiled_in_part(
    step_s: float, knobs: dict[str, KnobValue], keep_trace: bool, trained: int
) -> None:
    trainer = Trainer(keep_trace, knobs, count=8)
    outcome, trace, _ = profiled(trainer, step_s=step_s)
    assert trainer.trained == trained
    assert trace is not None
    assert outcome.profile is not None
    assert outcome.profile.repeated == trace.repeated == 8 / trained
    counted = {kernel.name: kernel.count for kernel in outcome.profile.top_kernels}
    assert counted["aten::addmm"] == 8
    once = sum(event.phase in ("reduction", "optimizer") for event in trace.events)
    assert outcome.profile.kernel_count == once + (len(trace.events) - once) * 8 / trained


@pytest.mark.usefixtures("group")
def test_what_fails_after_the_step_leaves_no_peer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("an event without a name")

    monkeypatch.setattr(profiler, "_read", broken)
    outcome, trace, together = profiled(Trainer())
    assert (trace, together) == (None, True)
    assert outcome.profile_error == "KeyError: 'an event without a name'"


@pytest.mark.usefixtures("group")
def test_the_trace_is_kept_where_the_job_asks() -> None:
    keeper = Keeper()
    profiled(Trainer(), keeper)
    assert keeper.trace == ""
    trace = profiled(Trainer(keep_trace=True), keeper).trace
    assert trace is not None
    told = json.loads(gzip.decompress(base64.b64decode(keeper.trace)))
    shown = [event for event in told["traceEvents"] if event["ph"] == "X" and event["tid"] != "step"]
    assert [event["name"] for event in shown] == [event.name for event in trace.events]
    assert {event["args"]["phase"] for event in shown} == {
        "forward",
        "backward",
        "reduction",
        "optimizer",
    }


@dataclass
class Kineto:
    """One event with the methods of torch._C._autograd._KinetoEvent that are read."""

    at: str
    text: str
    start: int
    length: int
    resource: int
    correlation: int
    annotation: bool = False
    said: str = ""

    def name(self) -> str:
        return self.text

    def device_type(self) -> Any:
        return getattr(profiler.DeviceType, self.at)

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length

    def device_resource_id(self) -> int:
        return self.resource

    def correlation_id(self) -> int:
        return self.correlation

    def is_user_annotation(self) -> bool:
        return self.annotation

    def metadata_json(self) -> str:
        return self.said


def test_a_kernel_has_the_phase_of_the_call_that_launched_it() -> None:
    """Kernels of the forward end after the backward began to be launched: when they ran does not tell."""
    marks = profiler._Marks(DEVICE)
    marks.began_ns, marks.reduction_ns, marks.optimizer_ns = 1_000_000, 5_000_000, 5_050_000
    main, autograd = 1522704704, -1560291648  # as seen on an H200
    copy = '"device": 0, "bytes": 4096, "memory bandwidth (GB/s)": 1.0'
    found, calls = profiler._from_cuda(
        [
            Kineto("CPU", "Activity Buffer Request", 1_000_000, 2_000_000, 0, 0),
            Kineto("CPU", "cudaLaunchKernel", 1_100_000, 5_000, main, 5),
            Kineto("CPU", "cuLaunchKernelEx", 1_200_000, 5_000, autograd, 9),
            Kineto("CPU", "cudaLaunchKernelExC", 5_020_000, 5_000, main, 11),
            Kineto("CPU", "cudaMemcpyAsync", 5_100_000, 5_000, main, 13),
            Kineto("CUDA", "nvjet_sm90_tst_128x192", 1_500_000, 900_000, 7, 5),
            Kineto("CUDA", "nvjet_sm90_qrtst_128x192", 2_400_000, 100_000, 20, 9),
            Kineto("CUDA", "ncclDevKernel_AllReduce_Sum_f32", 5_040_000, 100_000, 20, 11),
            Kineto("CUDA", "Memcpy DtoH (Device -> Pinned)", 5_200_000, 10_000, 7, 13, said=copy),
            Kineto("CUDA", "lost", 5_300_000, 10_000, 7, 17),
            Kineto("CUDA", "moetune_step", 1_500_000, 4_000_000, 7, 0, annotation=True),
        ],
        marks,
    )
    assert [(event.phase, event.category, event.stream) for event in found] == [
        ("forward", "gemm", 7),
        ("backward", "fp8_gemm", 20),
        ("reduction", "communication", 20),
        ("optimizer", "memcpy", 7),
        ("unknown", "elementwise", 7),
    ]
    assert (found[0].start_us, found[0].duration_us, found[3].size_bytes) == (500.0, 900.0, 4096)
    assert calls == {"cudaLaunchKernel": 1, "cuLaunchKernelEx": 1, "cudaLaunchKernelExC": 1, "cudaMemcpyAsync": 1}


def test_a_clock_that_is_apart_is_no_profile() -> None:
    """Else kernels would be put into the wrong phase and outside the step, without a word."""
    marks = profiler._Marks(DEVICE)
    marks.began_ns, marks.ended_ns = 0, 100_000_000

    def read(start_ns: int) -> profiler.Profiled:
        event = Kineto("CPU", "aten::mm", start_ns, 1_000_000, 1, 1)
        event.start_thread_id = lambda: 1  # type: ignore[attr-defined]
        results = SimpleNamespace(events=lambda: [event])
        return profiler._read(SimpleNamespace(kineto_results=results), marks)  # type: ignore[arg-type]

    assert len(read(98_500_000).trace.events) == 1
    for start_ns in (-7_000_000, 107_000_000):
        with pytest.raises(profiler.ProfilerFailed, match="clock is apart"):
            read(start_ns)


def test_a_rank_that_hangs_in_the_profiled_step_ends_with_its_measurement_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, codes, written = threading.Event(), list[int](), list[Measured]()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("train_worker.keep.PROFILE_LIMIT_S", 0.0)
    Keeper(written.append).measured(measured(0.001))
    assert ended.wait(10)
    assert codes == [0]
    assert written[0].steps == measured(0.001).steps
    assert "ended after 0 s" in (written[0].profile_error or "")
