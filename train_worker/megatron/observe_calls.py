"""Counters around Megatron's own functions, for one step: which code a step really ran, and how often.

Everything is put in place when `counting` is entered and taken away when it is left, so that measured steps run
untouched. Functions are replaced where their callers look them up (a class, or the globals of a module); parts of the
layers are counted by forward hooks. A forward call inside a backward pass is a recomputation, whoever asked for it
(Megatron's checkpoint, CheckpointWithoutOutput or Transformer Engine's): autograd's engine then has a current task.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.language_module import language_module
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import mlp, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import experts, moe_utils, shared_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer

from train_worker.megatron.readers import BACKENDS, DISPATCHERS

WGRAD_STORE = "transformer_engine.pytorch.module._common"  # asked of sys.modules: never imported from here
# knob -> where its fused functions are looked up, and their names. Called only where the knob is on:
# moe_utils.py:390-420,508,592 (permute, unpermute, sort_chunks_by_idxs); :127,772,921 (router); experts.py:827,
# mlp.py:276-309, shared_experts.py:271; rope_utils.py:292, multi_latent_attention.py:879; language_module.py:167;
# fused_softmax.py:233 (`is_kernel_available`).
FUSED: dict[str, tuple[tuple[Any, tuple[str, ...]], ...]] = {
    "moe_permute_fusion": (
        (
            moe_utils,
            (
                "fused_permute", "fused_permute_with_probs", "fused_permute_and_pad_with_probs", "fused_unpermute",
                "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
            ),
        ),
    ),
    "moe_router_fusion": ((moe_utils, ("fused_topk_with_score_function",)),),
    "bias_activation_fusion": (
        (experts, ("weighted_bias_swiglu_impl",)),
        (mlp, ("weighted_bias_swiglu_impl", "bias_swiglu_impl")),
        (shared_experts, ("bias_swiglu_impl",)),
    ),
    "apply_rope_fusion": (
        (rope_utils, ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")),
        (multi_latent_attention, ("fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv")),
    ),
    "cross_entropy_loss_fusion": (
        (language_module, ("te_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy")),
    ),
    "masked_softmax_fusion": ((FusedScaleMaskSoftmax, ("forward_fused_softmax",)),),
}  # fmt: skip


@dataclass
class Counts:
    """Of one step on this rank. Keys: words of `readers`, class names, part names, knobs, offload groups."""

    dispatched: Counter[str] = field(default_factory=Counter)
    experts: Counter[str] = field(default_factory=Counter)
    forward: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    offloaded_bytes: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)


Make = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def counting(layers: list[TransformerLayer]) -> Iterator[Counts]:
    """Count one step of these layers and of the machinery around them. Everything is restored afterwards."""
    counts = Counts()
    with ExitStack() as undo:
        _count_dispatchers(layers, counts, undo)
        _count_parts(layers, counts, undo)
        _count_checkpoints(counts, undo)
        _count_fused(counts, undo)
        _count_collectives(counts, undo)
        _count_plans(counts, undo)
        _count_offload(counts, undo)
        yield counts


def recomputing() -> bool:
    """Whether autograd's engine is at work in this thread, so that a forward call is a second one."""
    return torch._C._current_graph_task_id() != -1


def parts_of(layer: TransformerLayer) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a layer that knobs are about. Norms that Transformer Engine keeps in a linear are no modules."""
    attention = layer.self_attention
    yield "layer", layer
    yield "attn", attention
    yield "core_attn", attention.core_attention
    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        if not isinstance(norm, IdentityOp):
            yield "layernorm", norm
    for part, name in (("mla_up_proj", "linear_kv_up_proj"), ("mla_down_proj", "linear_qkv_down_proj")):
        if hasattr(attention, name):
            yield part, getattr(attention, name)
    if not isinstance(layer.mlp, MoELayer):
        yield "mlp", layer.mlp
        return
    yield "moe", layer.mlp.experts
    yield "moe_router", layer.mlp.router
    if layer.mlp.use_shared_expert:
        yield "shared_experts", layer.mlp.shared_experts


def _replace(owner: Any, name: str, make: Make, undo: ExitStack) -> None:
    """Put a counting function in the place of one of a class or module; a staticmethod stays one."""
    held = vars(owner)[name]
    static = isinstance(held, staticmethod)
    made = make(held.__func__ if static else held)
    undo.callback(setattr, owner, name, held)
    setattr(owner, name, staticmethod(made) if static else made)


def _counted(counter: Counter[str], key: str) -> Make:
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counter[key] += 1
            return real(*arguments, **named)

        return call

    return make


def _count_dispatchers(layers: list[TransformerLayer], counts: Counts, undo: ExitStack) -> None:
    """By class, at the call: `MoELayer.dispatch` asks the dispatcher it holds then (moe_layer.py:497)."""

    def sending(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            counts.dispatched[dispatcher_word(self)] += 1
            return real(self, *arguments, **named)

        return call

    kinds = {type(layer.mlp.token_dispatcher) for layer in layers if isinstance(layer.mlp, MoELayer)}
    for name, make in (("token_dispatch", sending), ("dispatch_preprocess", _counted(counts.plain, "preprocess"))):
        owners = {next(base for base in kind.__mro__ if name in vars(base)) for kind in kinds}
        for owner in owners:
            _replace(owner, name, make, undo)
    _replace(SharedExpertMLP, "get_output", _counted(counts.plain, "shared_overlapped"), undo)


def dispatcher_word(dispatcher: Any) -> str:
    """ "alltoall", "allgather", "flex/deepep"; the class name of what is none of these."""
    word = DISPATCHERS.get(type(dispatcher), type(dispatcher).__name__)
    if not isinstance(dispatcher, MoEFlexTokenDispatcher):
        return word
    manager = type(dispatcher._comm_manager)
    return f"{word}/{BACKENDS.get(manager, manager.__name__)}"


def _count_parts(layers: list[TransformerLayer], counts: Counts, undo: ExitStack) -> None:
    def hook(part: str) -> Callable[..., None]:
        def called(module: torch.nn.Module, _: Any) -> None:
            (counts.again if recomputing() else counts.forward)[part] += 1
            if part == "moe" and not recomputing():
                fused = getattr(module, "_with_fused_impl", False)
                counts.experts["fused operations" if fused else type(module).__name__] += 1

        return called

    for layer in layers:
        for part, module in parts_of(layer):
            undo.callback(module.register_forward_pre_hook(hook(part)).remove)


def _count_checkpoints(counts: Counts, undo: ExitStack) -> None:
    """moe_act is a closure of TEGroupedMLP.forward and no module: told by the class in its name (experts.py:882)."""

    def part(function: Any) -> str | None:
        return "moe_act" if getattr(function, "__qualname__", "").startswith("TEGroupedMLP.") else None

    def first(real: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(self: Any, run_function: Any, *arguments: Any) -> Any:
            if (name := part(run_function)) and not recomputing():
                counts.forward[name] += 1
            return real(self, run_function, *arguments)

        return checkpoint

    def second(real: Callable[..., Any]) -> Callable[..., Any]:
        def recompute(self: Any, gradient: Any) -> Any:
            if self.ctx is not None and (name := part(self.run_function)):  # random.py:774: None was done already
                counts.again[name] += 1
            return real(self, gradient)

        return recompute

    _replace(CheckpointWithoutOutput, "checkpoint", first, undo)
    _replace(CheckpointWithoutOutput, "_recompute", second, undo)


def _count_fused(counts: Counts, undo: ExitStack) -> None:
    for knob, places in FUSED.items():
        for owner, names in places:
            for name in names:
                if vars(owner).get(name) is not None:  # None where Transformer Engine is missing
                    _replace(owner, name, _counted(counts.fused, knob), undo)


def _count_collectives(counts: Counts, undo: ExitStack) -> None:
    """Early: a handle is outstanding after the start (param_and_grad_buffer.py:377,594: only with the overlap), and it
    was not started by the wait for it (`finish_grad_sync`: the first batch, and all batches without the overlap)."""
    finishing: list[Any] = []

    def finish(real: Callable[..., Any]) -> Callable[..., Any]:
        def finish_grad_sync(self: Any, *arguments: Any, **named: Any) -> Any:
            finishing.append(self)
            try:
                return real(self, *arguments, **named)
            finally:
                finishing.pop()

        return finish_grad_sync

    def start(what: str, handle: str) -> Make:
        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any, **named: Any) -> Any:
                found = real(self, *arguments, **named)
                if _ranks(self) > 1:
                    early = getattr(self, handle) is not None and not finishing
                    counts.plain[f"{what} {'early' if early else 'late'}"] += 1
                return found

            return call

        return make

    _replace(_ParamAndGradBucketGroup, "finish_grad_sync", finish, undo)
    _replace(_ParamAndGradBucketGroup, "start_grad_sync", start("reduced", "grad_reduce_handle"), undo)
    _replace(_ParamAndGradBucketGroup, "start_param_sync", start("gathered", "param_gather_handle"), undo)


def _ranks(group: Any) -> int:
    """Size of the group that a bucket group communicates in (param_and_grad_buffer.py:205)."""
    sharded = getattr(group, "intra_distributed_optimizer_instance_size", None)
    return int(sharded if sharded is not None else group.data_parallel_group.size())


def _count_plans(counts: Counts, undo: ExitStack) -> None:
    """model_chunk_schedule_plan.py:553-581: one run a layer forward, a layer backward, or both of them interleaved."""

    def run(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(forward_layer: Any, backward_layer: Any, *arguments: Any, **named: Any) -> Any:
            counts.plain["planned_layers"] += 1
            counts.plain["paired_layers"] += forward_layer is not None and backward_layer is not None
            return real(forward_layer, backward_layer, *arguments, **named)

        return call

    _replace(TransformerLayerSchedulePlan, "run", run, undo)
    if WGRAD_STORE in sys.modules:  # module/base.py:1960 and module/grouped_linear.py:2340 take the GEMM from it
        store = vars(sys.modules[WGRAD_STORE])["WeightGradStore"]
        _replace(store, "pop", _counted(counts.plain, "delayed_wgrads"), undo)


def _count_offload(counts: Counts, undo: ExitStack) -> None:
    """fine_grained_activation_offload.py:1002 takes a group by name and copies its tensors with `offload`."""
    groups: list[str] = []

    def bulk(real: Callable[..., Any]) -> Callable[..., Any]:
        def bulk_offload_group(self: Any, group: Any) -> Any:
            groups.append(group._name)
            try:
                return real(self, group)
            finally:
                groups.pop()

        return bulk_offload_group

    def copy(real: Callable[..., Any]) -> Callable[..., Any]:
        def offload(self: Any, tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            counts.offloaded_bytes[groups[-1]] += tensor.numel() * tensor.element_size()
            return real(self, tensor, *arguments, **named)

        return offload

    _replace(ChunkOffloadHandler, "bulk_offload_group", bulk, undo)
    _replace(ChunkOffloadHandler, "offload", copy, undo)
