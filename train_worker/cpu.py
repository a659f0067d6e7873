"""What megatron-core 0.19.2 needs to train on CPU under gloo: a reversible shim and a layer spec. Nothing for CUDA.

Megatron writes "cuda" into its calls. `megatron_on_cpu` redirects those calls for as long as it is entered, so that the
code that runs is Megatron's own GPU path (RNG tracker, DDP buffers, optimizer, schedules), only on CPU tensors.
`use_cpu_initialization` is not used: with it every EP rank draws the same expert weights
(tensor_parallel/layers.py `_initialize_affine_weight_cpu` ignores EP).

Each row below names the call sites in megatron/core that need it.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
Row = tuple[Any, str, Any]


class NullStream:
    """The only "stream" of a CPU: the calling thread, in program order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "NullStream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or NullEvent()

    def synchronize(self) -> None:
        pass


class NullEvent:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _cuda_means_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with device="cuda" read as CPU and any other device left alone ("meta" must keep working)."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _nothing(*_: Any, **__: Any) -> None:
    """Ordering between streams: there is one, in program order."""


def _tensor_rows() -> list[Row]:
    real_type = torch.Tensor.type

    def type_as_if_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = real_type(self, dtype, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return [
        # pipeline_parallel/schedules.py:749,1121,2292; optimizer/clip_grads.py:108,112,180
        (torch, "zeros", _cuda_means_cpu(torch.zeros)),
        # transformer/utils.py:39, the causal mask
        (torch, "ones", _cuda_means_cpu(torch.ones)),
        # optimizer/optimizer.py:315,702,1249; utils.py:1332
        (torch, "tensor", _cuda_means_cpu(torch.tensor)),
        # models/common/language_module/language_module.py:307, tied embeddings with PP
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        # optimizer/clip_grads.py:174, optimizer.py:1009, distrib_optimizer.py:401: is it 'torch.cuda.FloatTensor'?
        (torch.Tensor, "type", type_as_if_cuda),
        # models/gpt/fine_grained_callables.py:243, combined 1F1B
        (torch.Tensor, "record_stream", _nothing),
    ]


def _device_rows() -> list[Row]:
    stream = NullStream()
    return [
        # tensor_parallel/layers.py:305,647,1000,1363, mappings.py:145,447; rotary_pos_embedding.py:78; router.py:98;
        # utils.py:715; distributed/param_and_grad_buffer.py:1180,1186; pipeline_parallel/p2p_communication.py:334,342
        (torch.cuda, "current_device", lambda: CPU),
        # tensor_parallel/random.py:303-345,490,528. Without the last row nothing fails: torch queues the state for a
        # CUDA that never starts, the tracker's forks have no effect, and dropout under recompute gives other losses
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "manual_seed", torch.manual_seed),  # left out nothing fails: weights would not be seeded
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        # moe/token_dispatcher.py:469, shared_experts.py:192, pipeline_parallel/utils.py:392
        (torch.cuda, "Stream", NullStream),
        # models/common/model_chunk_schedule_plan.py:376, pipeline_parallel/utils.py:269,308: combined 1F1B
        (torch.cuda, "Event", NullEvent),
        # token_dispatcher.py:922,925; distributed/param_and_grad_buffer.py:632; shared_experts.py:98,226,237
        (torch.cuda, "current_stream", lambda *_, **__: stream),
        (torch.cuda, "stream", lambda stream: stream or nullcontext()),  # torch's own fails only where there is a GPU
        # pipeline_parallel/p2p_communication.py:419, batch_p2p_comm
        (torch.cuda, "synchronize", _nothing),
    ]


def _dispatcher_rows() -> list[Row]:
    """moe/token_dispatcher.py:927-943: split sizes become a list only `if tensor.is_cuda`; gloo refuses a tensor."""
    real_move = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else real_move(tensor, as_numpy, record_stream)

    return [(token_dispatcher, "maybe_move_tensor_to_cpu", move)]


class _NoFp8:
    """Stands in for Transformer Engine's FP8GlobalStateManager where TE is not installed."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def _recompute_rows() -> list[Row]:
    """tensor_parallel/random.py:693,740,788,821: CheckpointWithoutOutput(fp8=False) sets `self.fp8 = fp8 is not None`.

    So selective recompute of layernorm takes the fp8 branch, which needs Transformer Engine; and it compiles C++ to let
    two tensors share a storage, where a copy does on CPU.
    """
    if megatron_random.HAVE_TE:
        return []

    def copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
        into, origin = target.untyped_storage(), source.contiguous().untyped_storage()
        into.resize_(origin.nbytes())
        into.copy_(origin)

    return [
        (megatron_random, "FP8GlobalStateManager", _NoFp8),
        (megatron_random, "activation_recompute_forward", lambda *_, **__: nullcontext()),
        (megatron_random, "fp8_autocast", lambda *_, **__: nullcontext()),
        (megatron_random, "_get_share_storage", lambda: copy_storage),
    ]


def shim_rows() -> list[Row]:
    """Every (owner, attribute, replacement) of the shim."""
    return _tensor_rows() + _device_rows() + _dispatcher_rows() + _recompute_rows()


@contextmanager
def megatron_on_cpu(without: frozenset[str] = frozenset()) -> Iterator[None]:
    """Redirect Megatron's CUDA calls to CPU inside the block; everything is put back after it.

    Dispatcher and shared-expert classes keep null streams in class attributes, so a process that has trained on CPU
    must not train on CUDA afterwards. `without` leaves rows out by attribute name, to prove that each is needed.
    """
    _device_constructors()  # an lru_cache of the real factories: filled now, or `with torch.device("meta")` breaks
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    with ExitStack() as undo:
        undo.callback(torch.compiler.set_stance, "default")
        torch.compiler.set_stance("force_eager")  # matters only where megatron was imported without preload("cpu")
        log.addFilter(_not_about_rng)
        undo.callback(log.removeFilter, _not_about_rng)
        for owner, name, replacement in shim_rows():
            if name not in without:
                _replace(owner, name, replacement, undo)
        yield


def _not_about_rng(record: logging.LogRecord) -> bool:
    # CPU and "CUDA" generator are one here, so Megatron's check that the tracker left the CPU's alone always warns.
    return "CPU RNG state changed" not in record.getMessage()


def _replace(owner: Any, name: str, replacement: Any, undo: ExitStack) -> None:
    """Set an attribute and register its restoration; one that was inherited or absent is deleted again."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, replacement)


class LocalNorm(torch.nn.RMSNorm):
    """RMSNorm that may be used with sequence parallelism, which Megatron's WrappedTorchNorm refuses (torch_norm.py:50).

    The weight carries `sequence_parallel`, so finalize_model_grads sums its gradient over the TP ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class MlaDotProductAttention(DotProductAttention):
    """Takes the head sizes MLA passes (multi_latent_attention.py:207), which the local attention's signature lacks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("k_channels", None)  # the softmax scale is given, and nothing else depends on it
        v_channels = kwargs.pop("v_channels", None)
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_attention_head = v_channels
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class PlainQueryMla(MLASelfAttention):
    """MLA whose queries are not compressed (Moonlight), without Transformer Engine.

    Megatron wants Transformer Engine's fused norm and linear layer there (mla_qk_norm_config.py:150), which norms the
    hidden states once more. Without it the projection is a plain linear layer.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        plain = copy.copy(self.config)  # not dataclasses.replace: that validates again what is half converted
        plain.qk_layernorm = False
        return {
            **QKNormConfigResolver(plain, replace(submodules, kv_layernorm=IdentityOp)).resolve(),
            "kv_layernorm": submodules.kv_layernorm or IdentityOp,
        }


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's local spec for one pipeline chunk, with a norm and an attention that run under TP+SP and MLA."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    layers = [_with_local_modules(layer, config) for layer in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalNorm)


def _with_local_modules(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    attention = layer.submodules.self_attention
    inner: dict[str, Any] = {}
    if config.multi_latent_attention:
        inner["core_attention"] = MlaDotProductAttention
    if config.qk_layernorm:
        names = ("q_layernorm", "kv_layernorm") if config.multi_latent_attention else ("q_layernorm", "k_layernorm")
        inner |= dict.fromkeys(names, LocalNorm)
    if config.multi_latent_attention and config.q_lora_rank is None:
        inner["q_layernorm"] = IdentityOp  # nothing to normalise; mla_qk_norm_config.py:259 refuses a norm there
        attention = replace(attention, module=PlainQueryMla)
    attention = replace(attention, submodules=replace(attention.submodules, **inner))
    submodules = replace(
        layer.submodules, input_layernorm=LocalNorm, pre_mlp_layernorm=LocalNorm, self_attention=attention
    )
    return replace(layer, submodules=submodules)
