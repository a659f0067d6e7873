"""CUDA graphs: of layers by Transformer Engine, captured after eager warm-up steps, or of the whole iteration
(`iteration_graph`). Both count what they captured and what is replayed.

Follows Megatron-LM's training.py. Needs, seen on one H200: DDP built on a side stream (`streams`; else the capture dies
with "operation would make the legacy stream depend on a capturing blocking stream"), and a random-number tracker that
graphs can hold (`rng_arguments`).
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from search_spaces.candidate import Candidate
from train_worker.job import TrialJob
from train_worker.megatron.config import MegatronConfigs
from train_worker.megatron.iteration_graph import WARMUP_STEPS, IterationGraph
from train_worker.megatron.model import Built
from train_worker.megatron.step import Trainer

IMPL = "cuda_graph_impl"


def graphs_of(job: TrialJob, configs: MegatronConfigs, built: Built, trainer: Trainer) -> "Graphs | None":
    """The graphs the candidate asks for, not yet captured; None where it asks for none."""
    impl = job.candidate.knobs.get(IMPL)
    if impl == "transformer_engine":
        return LayerGraphs(job, configs, built)
    return IterationGraph(job, configs, trainer) if impl == "full_iteration" else None


def eager_steps(job: TrialJob) -> int:
    """Steps before the capture of layers: at least one warm-up step is left to replay in."""
    return max(1, min(WARMUP_STEPS, job.training.warmup_steps - 1))


def rng_arguments(candidate: Candidate) -> dict[str, bool]:
    """What model_parallel_cuda_manual_seed is told, so that a graph can draw random numbers."""
    captures = candidate.knobs.get(IMPL, "none") != "none"
    return {"te_rng_tracker": True, "use_cudagraphable_rng": True} if captures else {}


class _Counted:
    """A captured graph that counts its replays; all else is the graph's."""

    def __init__(self, graph: Any, owner: "LayerGraphs") -> None:
        self._graph, self._owner = graph, owner

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._owner.replayed += 1
        return self._graph(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


class LayerGraphs:
    """The graphs of one trial on this rank. `captured`: graphs there are; `replayed`: since `start_counting`."""

    def __init__(self, job: TrialJob, configs: MegatronConfigs, built: Built) -> None:
        self._built, self.after = built, eager_steps(job)
        self.captured = self.replayed = 0
        configs.transformer.cuda_graph_warmup_steps = self.after
        init_num_microbatches_calculator(
            torch.distributed.get_rank(), None, job.training.global_batch_size, configs.micro_batch_size,
            parallel_state.get_data_parallel_world_size(), False,
        )  # fmt: skip
        self._helper = TECudaGraphHelper(
            model=built.chunks, config=configs.transformer, seq_length=job.training.sequence_length,
            micro_batch_size=configs.micro_batch_size, optimizers=[built.optimizer],
        )  # fmt: skip

    def capture(self) -> None:
        """Capture now. Parameter-gather hooks would run inside the graph: they are taken off and set by hand after."""
        gathering = [chunk for chunk in self._built.chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in gathering:
            chunk.disable_forward_pre_hook(param_sync=False)
        self._helper.create_cudagraphs()
        for chunk in gathering:
            chunk.enable_forward_pre_hook()
        if gathering:
            self._helper.cuda_graph_set_manual_hooks()
        for layer in self._helper.flattened_callables:
            layer.cuda_graphs = [_Counted(graph, self) for graph in layer.cuda_graphs]
            self.captured += len(layer.cuda_graphs)

    def start_counting(self) -> None:
        self.replayed = 0

    @property
    def empty(self) -> bool:
        """Whether this stage has no layer to capture anything of: none at all, or none with the modules asked for."""
        return not self._helper.flattened_callables

    @property
    def active(self) -> bool:
        """Whether graphs were captured and the steps since `start_counting` replayed every one of them."""
        return self.captured > 0 and self.replayed >= self.captured


Graphs = LayerGraphs | IterationGraph
