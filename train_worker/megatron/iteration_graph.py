"""One CUDA graph of a whole iteration, forward to reduced gradients, captured by Megatron; the optimizer runs outside.

Follows Megatron-LM's training.py:3617. `FullCudaGraphWrapper` goes around the schedule: it copies the micro-batches
into buffers of its own, runs eager steps, captures, and from then on replays. It keeps all of that on its classes; a
second trial in the same process starts by taking it away. Needs, beside what graphs of layers need: DDP built on the
stream of the capture (`streams`), and a schedule that never waits for the device: tokens dropped and padded to one
capacity, sent by alltoall (rule RUN-16).
"""

from typing import Any

from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

from train_worker.job import TrialJob
from train_worker.megatron.config import MegatronConfigs
from train_worker.megatron.step import Trainer

WARMUP_STEPS = 3  # eager steps before the capture, as Megatron's own default; fewer where the trial has fewer
STAGE = "training"  # the wrapper's word; it keeps another graph for validation


def eager_steps(job: TrialJob) -> int:
    """Steps before the one that captures; of the warm-up steps one is left that only replays."""
    return max(1, min(WARMUP_STEPS, job.training.warmup_steps - 2))


class _CountedReplay:
    """A captured graph that counts its replays; all else is the graph's."""

    def __init__(self, graph: Any, owner: "IterationGraph") -> None:
        self._graph, self._owner = graph, owner

    def replay(self) -> None:
        self._owner.replayed += 1
        self._graph.replay()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


class IterationGraph:
    """The graph of one trial on this rank, put around the trainer's schedule. `captured`: 1 once it is there;
    `replayed`: times since `start_counting`, the replay inside the capturing step left out."""

    def __init__(self, job: TrialJob, configs: MegatronConfigs, trainer: Trainer) -> None:
        self.after = eager_steps(job)
        self.captured = self.replayed = 0
        configs.transformer.cuda_graph_warmup_steps = self.after
        self._wrapped = FullCudaGraphWrapper(
            trainer.schedule,
            cuda_graph_warmup_steps=self.after,
            use_single_mempool=configs.transformer.cuda_graph_use_single_mempool,
        )
        self._wrapped.reset_cuda_graph(STAGE)
        StaticBufferLoader.static_buffers[STAGE].clear()
        trainer.schedule = self._step

    empty = False  # every stage has a schedule to capture

    def capture(self) -> None:
        """Nothing to do: the wrapper captures inside the next step, which is its number `after`."""

    def start_counting(self) -> None:
        self.replayed = 0

    @property
    def active(self) -> bool:
        """Whether there is a graph and it was replayed since `start_counting`."""
        return self.captured > 0 and self.replayed > 0

    def _step(self, **arguments: Any) -> Any:
        found = self._wrapped(**arguments)
        graph = FullCudaGraphWrapper.cuda_graph[STAGE]
        if graph is not None and not self.captured:
            FullCudaGraphWrapper.cuda_graph[STAGE] = _CountedReplay(graph, self)
            self.captured = 1
        return found
