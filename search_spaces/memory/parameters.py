"""How many parameters each rank holds, exactly: equal to the real `GPTModel` on the meta device (tests).

Source of each term: core/models/gpt/gpt_layer_specs.py, core/transformer/{attention,multi_latent_attention,mlp}.py,
core/transformer/moe/{router,experts,shared_experts}.py of megatron-core 0.19.2.
"""

from functools import lru_cache
from typing import NamedTuple

from search_spaces.memory.chunks import Chunk
from search_spaces.memory.shape import Decoder, Grid, padded_vocabulary


class Parameters(NamedTuple):
    """Counts of one rank, by part. `experts` are split over ETP x EP, the rest is dense: split over TP, or whole."""

    embedding: int = 0
    output: int = 0
    norms: int = 0
    router: int = 0
    attention: int = 0
    dense_mlp: int = 0
    shared_experts: int = 0
    experts: int = 0

    @property
    def dense(self) -> int:
        """Everything but the routed experts: reduced and sharded over DP x CP."""
        return sum(self) - self.experts

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def quantized_dense(self) -> int:
        """Weights of Transformer Engine's linear layers, which FP8 keeps copies of; not embedding, output, router."""
        return self.attention + self.dense_mlp + self.shared_experts


def plus(*parts: Parameters) -> Parameters:
    """The sum, part by part."""
    return Parameters(*map(sum, zip(*parts, strict=True)))


@lru_cache(maxsize=4096)
def layer_parameters(decoder: Decoder, grid: Grid, moe: bool) -> Parameters:
    """One decoder layer on one rank."""
    hidden, tensor = decoder.hidden, grid.tensor
    attention, norms = _latent(decoder, grid) if decoder.latent else _grouped(decoder, grid)
    norms += 2 * hidden  # before attention and before the MLP
    if not moe:
        return Parameters(attention=attention, norms=norms, dense_mlp=3 * hidden * decoder.dense_width // tensor)
    shared = 3 * hidden * decoder.shared // tensor + (hidden if decoder.shared and decoder.shared_gate else 0)
    expert = 3 * hidden * decoder.expert_width // grid.expert_tensor
    return Parameters(
        attention=attention,
        norms=norms,
        router=decoder.experts * hidden,
        shared_experts=shared,
        experts=decoder.experts // grid.expert * expert,
    )


def _grouped(decoder: Decoder, grid: Grid) -> tuple[int, int]:
    """(weights, norms) of attention with query groups: core/transformer/attention.py SelfAttention.

    The fused projection is split over TP even where there are fewer groups than ranks (attention.py:353).
    """
    query, both = decoder.heads * decoder.head_size, 2 * decoder.groups * decoder.head_size
    rows = (query + both) // grid.tensor
    weights = rows * decoder.hidden + query // grid.tensor * decoder.hidden
    return weights + (rows if decoder.qkv_bias else 0), 2 * decoder.head_size if decoder.qk_norm else 0


def _latent(decoder: Decoder, grid: Grid) -> tuple[int, int]:
    """(weights, norms) of MLA: core/transformer/multi_latent_attention.py:500-635.

    The down projections are whole on every TP rank with Transformer Engine ("duplicated"), split with local layers.
    """
    hidden, heads = decoder.hidden, decoder.heads // grid.tensor
    down = grid.tensor if grid.local else 1
    query = heads * decoder.query_size
    weights = query * decoder.q_rank + decoder.q_rank * hidden // down if decoder.q_rank else query * hidden
    weights += (decoder.kv_rank + decoder.rope_size) * hidden // down
    weights += heads * (decoder.nope_size + decoder.value_size) * decoder.kv_rank
    weights += heads * decoder.value_size * hidden
    if not decoder.qk_norm:
        return weights, 0
    # Uncompressed queries: Transformer Engine's fused layer norms the hidden states again (mla_qk_norm_config.py:150).
    query_norm = decoder.q_rank or (0 if grid.local else hidden)
    return weights, query_norm + decoder.kv_rank


@lru_cache(maxsize=4096)
def chunk_parameters(decoder: Decoder, grid: Grid, chunk: Chunk) -> Parameters:
    """One model chunk on one rank: its layers, and what the first and last chunk have beside them."""
    dense, moe = (layer_parameters(decoder, grid, kind) for kind in (False, True))
    rows = padded_vocabulary(decoder.vocabulary, grid.tensor) // grid.tensor
    table = rows * decoder.hidden
    mtp = chunk.mtp * (2 * decoder.hidden * decoder.hidden // grid.tensor)
    ends = Parameters(
        # Multi-token prediction embeds its own tokens (core/models/gpt/gpt_model.py: `mtp_process`).
        embedding=table if chunk.first or chunk.mtp else 0,
        # Tied: the last stage of a pipeline holds a copy of the embedding; a model of one stage uses it as it is.
        output=table if chunk.last and not (decoder.tied and (chunk.first or chunk.mtp)) else 0,
        norms=(decoder.hidden if chunk.last else 0) + 3 * decoder.hidden * chunk.mtp,
        attention=mtp,  # eh_proj: a linear layer like those of attention
    )
    layers = [_times(dense, chunk.dense), _times(moe, chunk.moe)]
    layers.append(_times(moe if decoder.experts else dense, chunk.mtp))
    return plus(ends, *layers)


def _times(part: Parameters, count: int) -> Parameters:
    return Parameters(*(count * each for each in part))


@lru_cache(maxsize=4096)
def stage_parameters(decoder: Decoder, grid: Grid, chunks: tuple[Chunk, ...]) -> Parameters:
    """One pipeline rank: all its chunks."""
    return plus(*(chunk_parameters(decoder, grid, chunk) for chunk in chunks))
