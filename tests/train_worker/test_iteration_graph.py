"""The graph of a whole iteration: Megatron's own wrapper around the schedule, with CUDA's parts stood in for."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import full_cuda_graph

from tests.train_worker.megatron_trials import SGD, case
from train_worker.cpu import NullStream
from train_worker.megatron.iteration_graph import IterationGraph
from train_worker.megatron.step import Trainer


class Replayed:
    """A captured graph: what it replays is not Python."""

    replays = 0

    def replay(self) -> None:
        Replayed.replays += 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stood_in: dict[str, Any] = {
        "Stream": NullStream, "current_stream": NullStream, "stream": lambda _: nullcontext(), "CUDAGraph": Replayed,
        "synchronize": lambda: None, "graph": lambda *_, **__: nullcontext(), "graph_pool_handle": lambda: None,
    }  # fmt: skip
    for name, value in stood_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
    Replayed.replays = 0
    yield
    full_cuda_graph.FullCudaGraphWrapper.cuda_graph["training"] = None


class Schedule:
    """Reads its micro-batches and says so; `read` are the first tokens of each call."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.buffers: list[int] = []

    def __call__(self, forward_step_func: Any, data_iterator: Any, num_microbatches: int, **_: Any) -> list[Any]:
        texts = [next(data_iterator[0])["text"] for _ in range(num_microbatches)]
        self.read.append([int(text[0, 0]) for text in texts])
        self.buffers = [text.data_ptr() for text in texts]
        forward_step_func.__self__.seen += [text.shape[0] for text in texts]
        return [{"loss": texts[0].float().mean()}]


def trainer(schedule: Schedule) -> Trainer:
    optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 1.0, None))
    chunk = SimpleNamespace(zero_grad_buffer=lambda: None)
    ddp = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=False)
    transformer = SimpleNamespace(cuda_graph_use_single_mempool=True)
    configs: Any = SimpleNamespace(micro_batch_size=2, transformer=transformer, ddp=ddp)
    built: Any = SimpleNamespace(chunks=[chunk], optimizer=optimizer)
    job = case(1, SGD.model_copy(update={"warmup_steps": 4})).job
    rate: Any = SimpleNamespace(step=lambda **_: None)
    return Trainer(job, configs, built, [[0, 1], [2, 3]], torch.device("cpu"), rate, schedule=schedule)


def test_steps_are_eager_then_captured_then_replayed_on_new_tokens() -> None:
    """As the wrapper counts, so do we: two eager steps, the capture, and a step of which no Python runs."""
    schedule = Schedule()
    steps = trainer(schedule)
    graph = IterationGraph(steps.job, steps.configs, steps)
    assert graph.after == steps.configs.transformer.cuda_graph_warmup_steps == 2
    batches = [steps.batches(index) for index in range(4)]
    for index in range(2):
        steps.step(batches[index])
    assert (graph.captured, graph.replayed, graph.active, len(schedule.read)) == (0, 0, False, 2)
    steps.step(batches[2])
    assert (graph.captured, graph.replayed, Replayed.replays, len(schedule.read)) == (1, 0, 1, 3)
    assert not graph.active  # what the capturing step replays is not counted
    graph.start_counting()
    steps.step(batches[3])
    assert (graph.replayed, graph.active, Replayed.replays, len(schedule.read)) == (1, True, 2, 3)
    assert steps.seen == [2, 2]  # of the captured step, which is what ran
    buffers = full_cuda_graph.StaticBufferLoader.static_buffers["training"]
    assert [int(buffer["text"][0, 0]) for buffer in buffers] == [int(text[0, 0]) for text in batches[3][0]]
    assert [buffer["text"].data_ptr() for buffer in buffers] == schedule.buffers


def test_a_second_trial_in_the_process_does_not_replay_the_first_ones_graph() -> None:
    for _ in range(2):
        schedule = Schedule()
        steps = trainer(schedule)
        graph = IterationGraph(steps.job, steps.configs, steps)
        for index in range(3):
            steps.step(steps.batches(index))
        assert (graph.captured, len(schedule.read)) == (1, 3)
        assert len(full_cuda_graph.StaticBufferLoader.static_buffers["training"]) == 2
