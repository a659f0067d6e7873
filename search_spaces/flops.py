"""Model FLOPs a token of training, by the formula behind the published TFLOP/s figures.

As Megatron-LM counts (megatron/training/training.py, `num_floating_point_operations`) and, for windowed attention,
Megatron-Bridge (`gpt_oss_flops_calculator` of utils/flop_utils.py): three GEMMs for each of the forward pass (forward,
data gradient, weight gradient), 2 operations a multiply-add, causal attention at half of the square, the output layer
over the vocabulary; embeddings, norms, softmax, the router and recomputed work count nothing. So a configuration that
recomputes does not look faster than it is.
"""

from search_spaces.shapes import UNTRAINED, ModelShape

PER_MULTIPLY_ADD = 3 * 2  # three GEMMs, two operations
MATRICES = 3  # of a gated MLP: gate, up, down


def flops_per_token(model: ModelShape, sequence_length: int) -> float:
    """FLOPs that training on one token takes, mean over a full sequence of `sequence_length` tokens.

    Of the whole published model: with its `predicted_ahead` layers and its attention window where the shape has them.
    `as_trained` leaves out what this product does not train.
    """
    hidden, ahead = model.hidden_size, model.predicted_ahead or 0
    layers = model.num_layers + ahead
    dense = MATRICES * hidden * model.ffn_hidden_size * model.first_dense_layers
    experts = model.moe_router_topk * model.moe_ffn_hidden_size + (model.moe_shared_expert_intermediate_size or 0)
    sparse = MATRICES * hidden * experts * (layers - model.first_dense_layers)
    projections = layers * _projections(model)
    scores = _score_width(model) * sum(_tokens_seen(model, layer, sequence_length) for layer in range(layers))
    # Each layer that predicts further ahead joins two states by one matrix (eh_proj) and has the output layer again.
    joins = ahead * 2 * hidden * hidden
    output = (1 + ahead) * hidden * model.vocab_size
    return float(PER_MULTIPLY_ADD * (dense + sparse + projections + scores + joins + output))


def as_trained(model: ModelShape) -> ModelShape:
    """The shape as the worker builds it: no multi-token prediction, and every layer attends to all tokens before."""
    return model.model_copy(update=dict.fromkeys(UNTRAINED))


def _projections(model: ModelShape) -> int:
    """Multiply-adds a token of one layer's projections into and out of attention."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        return hidden * model.kv_channels * (2 * heads + 2 * model.num_query_groups)
    rank, content, rotated, value = _latent(model)
    query = heads * (content + rotated)
    into = hidden * query if model.q_lora_rank is None else model.q_lora_rank * (hidden + query)
    return into + rank * (hidden + heads * (content + value)) + hidden * rotated + heads * value * hidden


def _score_width(model: ModelShape) -> int:
    """Multiply-adds of attention for each pair of tokens: keys' width and values' width, over all heads."""
    if not model.multi_latent_attention:
        return model.num_attention_heads * 2 * model.kv_channels
    _, content, rotated, value = _latent(model)
    return model.num_attention_heads * (content + rotated + value)


def _tokens_seen(model: ModelShape, layer: int, length: int) -> float:
    """Tokens that a token attends to, mean over the sequence. Every second layer has the window (GPT-OSS)."""
    window = model.attention_window
    if window is None or layer % 2 == 0 or window >= length:
        return length / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def _latent(model: ModelShape) -> tuple[int, int, int, int]:
    """Ranks and widths of latent attention; ValueError where one is missing."""
    found = (model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim)
    rank, content, rotated, value = found
    if rank is None or content is None or rotated is None or value is None:
        raise ValueError(f"{model.name}: latent attention needs kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim and "
                         "v_head_dim")  # fmt: skip
    return rank, content, rotated, value
