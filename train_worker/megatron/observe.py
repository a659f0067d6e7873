"""Fills `Observed`: what one step of this rank ran, and what its objects hold after it.

Counters are in place only around the step that is watched, the last of the warm-up (`observe_calls`). Facts of state
(optimizer, recipes, parameters) are read once after it. The same verdict is reached on all ranks (`agreed`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp4_utils import is_nvfp4tensor
from megatron.core.fp8_utils import is_float8tensor

from search_spaces.candidate import modules
from train_worker.evidence import evidence_of, merged, missing
from train_worker.job import TrialJob
from train_worker.megatron.graphs import Graphs
from train_worker.megatron.model import Built
from train_worker.megatron.observe_calls import Counts, counting, parts_of
from train_worker.megatron.precision import fp4_recipes, fp8_recipes
from train_worker.megatron.profiler import WithProfile
from train_worker.megatron.seen import Run
from train_worker.megatron.step import Trainer
from train_worker.observed import Calls, Kernels, Observed, OptimizerState, Sent, kernels_of
from train_worker.outcome import Evidence, Measured, Rejected

WHOLE_STEP = "full_iteration"


class Observer:
    """Watches one step of a trial on this rank; what it saw stays as it was, whatever runs later."""

    def __init__(self, job: TrialJob, trainer: Trainer, graphs: Graphs | None) -> None:
        self.job, self._trainer, self._graphs = job, trainer, graphs
        self._run = Run(trainer.built, (), planned=False, host={})
        self._observed: Observed | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one step."""
        first = not self._trainer.seen
        with counting(self._run.layers()) as counts:
            yield
        self._observed = self._seen(counts, first)

    def observed(self, kernels: Kernels | None = None) -> Observed:
        """After `watching`, on every rank. Raises RuntimeError where no step was watched."""
        if self._observed is None:
            raise RuntimeError("no step was watched")
        return self._observed.model_copy(update={"kernels": kernels})

    def _seen(self, counts: Counts, first: bool) -> Observed:
        """Read at once: the next step clears the flags of the weights, and graphs go on counting."""
        built, layers, plain = self._trainer.built, self._run.layers(), counts.plain
        sizes = Counter(part for layer in layers for part, _ in parts_of(layer))
        return Observed(
            device=self.job.cluster.device,
            first_step=first,
            micro_batches=len(self._trainer.seen) // len(built.chunks),
            layers=len(layers),
            moe_layers=len(self._run.moe_layers()),
            low_precision_layers=len(self._run.quantized_layers()),
            last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            captured=self._captured(),
            graphs_captured=self._graphs.captured if self._graphs else 0,
            graphs_replayed=self._graphs.replayed if self._graphs else 0,
            dispatched=dict(counts.dispatched),
            experts=dict(counts.experts),
            parts=_calls(counts, sizes),
            part_sizes=dict(sizes),
            fused=dict(counts.fused),
            reductions=Sent(early=plain["reduced early"], late=plain["reduced late"]),
            gathers=Sent(early=plain["gathered early"], late=plain["gathered late"]),
            planned_layers=plain["planned_layers"],
            paired_layers=plain["paired_layers"],
            delayed_wgrads=plain["delayed_wgrads"],
            shared_overlapped=plain["shared_overlapped"],
            offloaded_bytes=dict(counts.offloaded_bytes),
            optimizer=optimizer_state(built),
            precisions=dict(_precisions(self._run)),
            quantized_parameters=dict(_quantized(built)),
            fused_gradients=_fused_gradients(built),
        )

    def _captured(self) -> tuple[str, ...]:
        if self._graphs is None or not self._graphs.active:
            return ()
        knobs = self.job.candidate.knobs
        if knobs.get("cuda_graph_impl") == WHOLE_STEP:
            return (WHOLE_STEP,)
        # No module named: the whole layer is captured (transformer_config.py, cuda_graph_modules).
        return modules(knobs.get("cuda_graph_modules")) or (WHOLE_STEP,)


def agreed(mine: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The evidence of the gang, the same on every rank. Collective."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    return merged(ranks)


def with_kernels(found: WithProfile, observer: Observer) -> Measured | Rejected:
    """The measurement with what the profiled step's kernels add to its evidence. Collective on cuda.

    A profiled step that failed on this rank has left its peers in a collective: no new one is begun. What happens while
    the ranks agree never undoes what was measured.
    """
    measured = found.measured
    if observer.job.cluster.device == "cpu" or not found.together:
        return measured
    try:
        kernels = kernels_of(found.trace) if found.trace else None
        evidence = agreed(evidence_of(observer.job.candidate, observer.observed(kernels)))
    except RuntimeError as error:  # torch.distributed's: a peer has gone
        return measured.model_copy(update={"profile_error": f"{type(error).__name__}: {error}"})
    return missing(evidence) or measured.model_copy(update={"evidence": evidence})


def _calls(counts: Counts, sizes: Counter[str]) -> dict[str, Calls]:
    names = {*sizes, *counts.forward, *counts.again}
    found = {name: Calls(forward=counts.forward[name], again=counts.again[name]) for name in sorted(names)}
    return found | {"moe_preprocess": Calls(forward=counts.plain["preprocess"], again=0)}


def optimizer_state(built: Built) -> OptimizerState:
    """Of every optimizer of this rank (dense, expert); HybridDeviceOptimizer shows its parts' states as its own."""
    dtypes: dict[str, set[str]] = {}
    classes: set[str] = set()
    placed: Counter[str] = Counter()
    for part in getattr(built.optimizer, "chained_optimizers", [built.optimizer]):
        if part.optimizer is None:  # a stage without parameters of this kind
            continue
        classes.add(type(part.optimizer).__name__)
        for state in part.optimizer.state.values():
            for name, value in _tensors(state):
                dtypes.setdefault(name, set()).add(str(value.dtype).removeprefix("torch."))
                placed[value.device.type] += value.numel() * value.element_size()
    host = placed.pop("cpu", 0)
    return OptimizerState(
        classes=tuple(sorted(classes)),
        dtypes={name: tuple(sorted(found)) for name, found in sorted(dtypes.items())},
        host_bytes=host,
        device_bytes=placed.total(),
    )


def _tensors(state: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Without the step counters, which are scalars and on the host in every optimizer."""
    return ((str(name), value) for name, value in state.items() if torch.is_tensor(value) and value.dim())


def _precisions(run: Run) -> Counter[str]:
    found = [pair for layer in run.layers() for read in (fp8_recipes, fp4_recipes) for pair in read(layer.modules())]
    return Counter(f"{form}/{recipe}" for form, recipe in found)


def _quantized(built: Built) -> Counter[str]:
    weights = (weight for model in built.models for weight in model.parameters())
    return Counter(type(weight).__name__ for weight in weights if is_float8tensor(weight) or is_nvfp4tensor(weight))


def _fused_gradients(built: Built) -> int:
    """Weights whose GEMM wrote main_grad itself: Transformer Engine says so on the weight (module/base.py), DDP clears
    it at the start of a step (distributed_data_parallel.py:603)."""
    weights = (weight for model in built.models for weight in model.parameters())
    return sum(bool(getattr(weight, "grad_added_to_main_grad", False)) for weight in weights)
