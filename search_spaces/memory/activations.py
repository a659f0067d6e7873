"""Bytes one layer keeps for its backward pass, and what the backward pass needs beside them.

Read from megatron-core 0.19.2 and Transformer Engine 2.20.2 (what each autograd function saves), and checked against
one H200 (tests): four layers of 32 experts keep 98,466 B a token and layer there with the fused activation.
Everything is for one micro-batch on one rank.
"""

from functools import lru_cache
from typing import NamedTuple

from search_spaces.memory.setting import Setting
from search_spaces.memory.shape import Decoder, Grid

# Router: logits, scores, probabilities (fp32), map, and the permutation's row ids (int32). Fitted to two measured
# shapes of 32 and 128 experts (1,058 and 2,862 B a token).
ROUTER_PER_EXPERT, ROUTER_PER_TOKEN = 19, 450


class Saved(NamedTuple):
    """Bytes kept from forward to backward, by part of a layer."""

    norms: int = 0  # residual stream and outputs of the norms
    attention: int = 0
    router: int = 0
    dispatch: int = 0  # permuted tokens: the input of the experts
    experts: int = 0  # both GEMMs' inner activations
    shared_experts: int = 0
    dense_mlp: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def added(one: Saved, other: Saved, count: int) -> Saved:
    """one + count x other, part by part."""
    return Saved(*[a + count * b for a, b in zip(one, other, strict=True)])


class Layer(NamedTuple):
    """`saved` under the recompute setting; `whole` without any (what a recomputation brings back at most);
    `backward` beyond all that is saved, at the worst moment of this layer's backward pass; `forward` likewise.
    `narrowed`: by how much more would be saved without FP8 or FP4."""

    saved: Saved
    whole: Saved
    backward: int
    forward: int
    narrowed: int = 0


@lru_cache(maxsize=65536)
def layer_of(decoder: Decoder, grid: Grid, setting: Setting, moe: bool) -> Layer:
    """One decoder layer. Full recompute keeps the input; the rest comes back, whole, in the backward pass."""
    plain = setting._replace(recompute=frozenset(), offload=frozenset())
    whole = _saved(decoder, grid, plain, moe)
    stream = setting.split * decoder.hidden * setting.element
    forward = 2 * setting.routed * decoder.hidden * setting.element + stream if moe else 2 * stream
    if "full" in setting.recompute:
        kept = Saved(norms=stream)
        # The recomputed layer's output and its gradient, beside those of the residual stream.
        again = whole.total - stream + 2 * stream
        return Layer(kept, whole, again + _backward(decoder, grid, plain, moe), forward)
    kept = _saved(decoder, grid, setting, moe)
    again = _again(decoder, grid, setting, whole, moe)
    wide = _saved(decoder, grid, setting._replace(saved=setting.element), moe) if setting.quantized else kept
    return Layer(kept, whole, again + _backward(decoder, grid, setting, moe), forward, wide.total - kept.total)


def _saved(decoder: Decoder, grid: Grid, setting: Setting, moe: bool) -> Saved:
    stream = setting.split * decoder.hidden
    # Two residual streams, and the norms' outputs as the next linear layer keeps them. The one before a MoE layer
    # stays in full precision for the router; Megatron recomputes only norms that are layers of their own.
    second = 0 if moe and "layernorm" in setting.recompute else stream
    first = 0 if decoder.latent and "layernorm" in setting.recompute else stream
    norms = 2 * stream * setting.element + round(first * setting.saved)
    norms += second * setting.element if moe else 0
    attention = _latent(decoder, grid, setting) if decoder.latent else _grouped(decoder, grid, setting)
    if not moe:
        return Saved(norms=norms, attention=attention, dense_mlp=_dense(decoder, grid, setting))
    return _moe(decoder, grid, setting)._replace(norms=norms, attention=attention)


def _grouped(decoder: Decoder, grid: Grid, setting: Setting) -> int:
    """Attention with query groups: flash attention keeps q, k, v, its output and one fp32 a query row.

    q is a copy out of the fused projection; with q and k norms their inputs stay too. Recomputing core attention
    keeps v as a view, and with it the whole projection (core/transformer/attention.py:445), so it costs memory.
    """
    query = decoder.heads * decoder.head_size // grid.tensor
    key = max(decoder.groups // grid.tensor, 1) * decoder.head_size
    rows = 2 * (query + key) if decoder.qk_norm else query + key
    rows += query + 2 * key if "core_attn" in setting.recompute else key
    rows += query  # the output, also the projection's input, kept in bf16 under FP8 too (attention.py:443)
    if "core_attn" in setting.offload:
        rows -= round((query + 2 * key) * setting.offload_fraction)
    if "attn_proj" in setting.offload:
        rows -= round(query * setting.offload_fraction)
    heads = decoder.heads // grid.tensor
    return setting.tokens * (rows * setting.element + (0 if "core_attn" in setting.recompute else 4 * heads))


def _latent(decoder: Decoder, grid: Grid, setting: Setting) -> int:
    """MLA: compressed queries and keys with their norms, then q, k, v per head (multi_latent_attention.py)."""
    heads = decoder.heads // grid.tensor
    query, value = heads * decoder.query_size, heads * decoder.value_size
    down = (2 * decoder.q_rank if decoder.q_rank else decoder.hidden) + 2 * decoder.kv_rank + decoder.rope_size
    up = 2 * query + (heads * (decoder.nope_size + decoder.value_size) if "core_attn" in setting.recompute else value)
    if "mla_up_proj" in setting.recompute:
        up = 0
        down -= (decoder.q_rank or decoder.hidden) + decoder.kv_rank  # outputs of the fused norms
    if "core_attn" in setting.offload:
        up = round(up * (1 - setting.offload_fraction))
    lse = 0 if "core_attn" in setting.recompute else 4 * heads
    return setting.split * down * setting.element + setting.tokens * ((up + value) * setting.element + lse)


def _unfused(setting: Setting, width: int) -> int:
    """Elements an unfused gated activation keeps beyond its input and output: measured as 2 x width on two models."""
    return 0 if setting.act_fused else 2 * width


def _dense(decoder: Decoder, grid: Grid, setting: Setting) -> int:
    """A gated MLP: the norm's output, both halves of fc1 and the activation."""
    if "mlp" in setting.recompute:
        return 0  # its input is the residual stream
    width = decoder.dense_width // grid.tensor
    act = 2 * width + _unfused(setting, width)
    inner = round(setting.tokens * (act * setting.element + width * setting.saved))
    return inner + round(setting.split * decoder.hidden * setting.saved)


class _Widths(NamedTuple):
    """Bytes of the experts' tensors: tokens of width hidden, and of the experts' width."""

    tokens: int
    inner: int


def _widths(decoder: Decoder, grid: Grid, setting: Setting) -> _Widths:
    routed = setting.routed * setting.element
    return _Widths(routed * decoder.hidden, routed * decoder.expert_width // grid.expert_tensor)


def _act_bytes(setting: Setting, inner: int) -> int:
    """The activation with the router's weights: fused it keeps nothing; unfused silu's output and an fp32 product."""
    return 0 if setting.act_fused else 3 * inner


def _moe(decoder: Decoder, grid: Grid, setting: Setting) -> Saved:
    """Router, permuted tokens, fc1's output (2 x width), and the activation, which fc2 keeps."""
    if "moe" in setting.recompute:
        return Saved()  # its input is the norm's output
    shared = _shared(decoder, grid, setting)
    tokens, inner = _widths(decoder, grid, setting)
    narrow = setting.saved / setting.element
    kept = setting.offload_fraction
    dispatch = tokens if "expert_fc1" in setting.offload else round(tokens * narrow)  # offloaded as it came: bf16
    fc1 = 2 * inner
    act = 0 if "moe_act" in setting.recompute else round(inner * narrow) + _act_bytes(setting, inner)
    if {"expert_fc1", "fused_group_mlp"} & setting.offload:
        dispatch = round(dispatch * (1 - kept))
    if {"moe_act", "fused_group_mlp"} & setting.offload:
        fc1 = round(fc1 * (1 - kept))
    router = setting.split * (ROUTER_PER_EXPERT * decoder.experts + ROUTER_PER_TOKEN)
    return Saved(router=router, dispatch=dispatch, experts=fc1 + act, shared_experts=shared)


def _shared(decoder: Decoder, grid: Grid, setting: Setting) -> int:
    """Shared experts see every token; their input is the router's."""
    if not decoder.shared or "shared_experts" in setting.recompute:
        return 0
    width = decoder.shared // grid.tensor
    act = 2 * width + _unfused(setting, width)
    return round(setting.tokens * (act * setting.element + width * setting.saved))


def _again(decoder: Decoder, grid: Grid, setting: Setting, whole: Saved, moe: bool) -> int:
    """Bytes that recomputing the selected modules of one layer brings back while its experts run backward."""
    found = 0
    if moe and "moe" in setting.recompute:
        found += whole.router + whole.dispatch + whole.experts + whole.shared_experts
    elif moe and "moe_act" in setting.recompute:
        inner = _widths(decoder, grid, setting).inner
        found += inner + _act_bytes(setting, inner)
    if moe and "layernorm" in setting.recompute:
        found += setting.split * decoder.hidden * setting.element
    if moe and "shared_experts" in setting.recompute and "moe" not in setting.recompute:
        found += whole.shared_experts
    if not moe and "mlp" in setting.recompute:
        found += whole.dense_mlp
    return found


def _backward(decoder: Decoder, grid: Grid, setting: Setting, moe: bool) -> int:
    """The worst of the backward steps of one layer, beyond what is saved when it starts.

    Each step holds the gradient that comes in and the one that goes out; what the step before it had saved is freed.
    Weight gradients are bf16 tensors of their own unless they are added to the main gradients in the GEMM.
    """
    stream = setting.split * decoder.hidden * setting.element
    if setting.split < setting.tokens:  # sequence parallel: gathered for the GEMM, and its gradient before it is split
        stream += 2 * setting.tokens * decoder.hidden * setting.element
    if not moe:
        return _dense_backward(decoder, grid, setting, stream)
    tokens, inner = _widths(decoder, grid, setting)
    local = decoder.experts // grid.expert if setting.grouped else 1
    matrix = 0 if setting.wgrad_fused else (
        local * decoder.hidden * decoder.expert_width // grid.expert_tensor * setting.element
    )  # fmt: skip
    act = round(inner * setting.saved / setting.element)  # freed once fc2 is through
    # Gradients quantized by row and by column; tokens padded to what the GEMM wants (experts.py quantization_padding).
    copies = 1 if setting.quantized else 0
    sort = 2 * tokens
    fc2 = tokens + inner + matrix + copies * (2 * tokens + inner)
    fc1 = tokens + 2 * matrix - act - _act_bytes(setting, inner) + copies * 2 * (inner + tokens)
    silu = (3 if setting.act_fused else 4) * inner - act  # unfused: an fp32 gradient of the product on the way
    return stream + max(sort, fc2, fc1, silu) + setting.gathered * decoder.hidden * setting.element


def _dense_backward(decoder: Decoder, grid: Grid, setting: Setting, stream: int) -> int:
    width = decoder.dense_width // grid.tensor
    inner = setting.tokens * width * setting.element
    matrix = 0 if setting.wgrad_fused else decoder.hidden * width * setting.element
    return stream + max(inner + matrix, 3 * inner, stream + 2 * matrix)
