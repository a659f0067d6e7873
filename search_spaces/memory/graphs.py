"""What CUDA graphs of layers hold beyond what eager steps would, in bytes.

Read from megatron-core 0.19.2 (core/transformer/cuda_graphs.py TECudaGraphHelper, transformer_layer.py
`get_layer_static_inputs`) and Transformer Engine 2.20.2 (pytorch/graph.py `_make_graphed_callables` with
`_reuse_graph_input_output_buffers`). What a captured module saves for its backward pass moves into the graphs' pool,
byte for byte (one H200: allocated bytes fall by it within 7%), so only these come on top:

- static inputs of every layer: hidden states and, with attention, a boolean mask [micro-batch, 1, length, length];
- gradients of the outputs, one set that all layers share, and the last gradient of an input;
- permuted tokens: the graph's output (moe_preprocess) stays in the pool, while the experts keep a sorted copy. The
  layer whose backward pass is captured first gives its own back;
- what one layer's backward pass needs: eager steps would lend it blocks of the logits, a private pool cannot.
"""

from typing import NamedTuple

from search_spaces.memory.activations import Saved
from search_spaces.memory.setting import Setting
from search_spaces.memory.shape import Decoder, Grid


class Captured(NamedTuple):
    """What is captured, and of how many layers: all in flight, and the MoE layers among them."""

    modules: frozenset[str]
    layers: int
    moe_layers: int


def held(decoder: Decoder, grid: Grid, setting: Setting, found: Captured, whole: int) -> int:
    """Bytes beyond those of eager steps. `whole`: the backward pass of a layer, where one is captured with its MLP."""
    if not found.layers:
        return 0
    attention = bool(found.modules & {"attn", "all"})
    entire = bool(found.modules & {"moe", "all"})
    stream = setting.split * decoder.hidden * setting.element
    layers = found.layers if attention or "mlp" in found.modules else found.moe_layers
    inputs = layers * (stream + (_mask(setting) if attention else 0))
    if found.moe_layers and not entire and "moe_router" in found.modules:
        outputs, kept = _outputs(decoder, setting, found, stream)
    else:
        outputs, kept = stream, 0
    worst = max(_attention_backward(decoder, grid, setting) if attention else 0, whole if entire else 0)
    return inputs + outputs + stream + kept + worst


def _mask(setting: Setting) -> int:
    """One byte for each query and key of every sequence of the micro-batch."""
    return setting.tokens * setting.length


def _outputs(decoder: Decoder, setting: Setting, found: Captured, stream: int) -> tuple[int, int]:
    """(gradients of a MoE layer's outputs: the residual, shared experts' output, and tokens as the experts get them or
    the router's input with probabilities; permuted tokens that stay in the pool)."""
    outputs = stream + (stream if decoder.shared else 0)
    if "moe_preprocess" not in found.modules:
        return outputs + stream + 4 * setting.split * decoder.experts, 0
    if not setting.permutes:  # the others permute what they received
        return outputs + stream, 0
    permuted = setting.split * decoder.topk * decoder.hidden * setting.element
    return outputs + permuted, (found.moe_layers - 1) * permuted


def _attention_backward(decoder: Decoder, grid: Grid, setting: Setting) -> int:
    """Gradients of the output, of q (also in fp32, as flash attention adds it up), k and v, and of their projection."""
    heads = decoder.heads // grid.tensor
    keys = heads if decoder.latent else max(decoder.groups // grid.tensor, 1)
    query, out = heads * decoder.query_size, heads * decoder.out_size
    projected = query + keys * (decoder.query_size + decoder.out_size)
    return setting.tokens * (out * setting.element + 4 * query + 2 * projected * setting.element)


def moved(saved: Saved, modules: frozenset[str], layers: int) -> int:
    """Saved bytes of `layers` layers that the pool holds instead of eager memory. Norms are four tensors: both residual
    streams and both norms' outputs, the last of which is the router's."""
    if modules & {"all", "moe"}:
        return layers * saved.total
    attention, router = "attn" in modules, "moe_router" in modules
    quarters = 3 * attention + router * (1 if attention else 2)
    found = saved.norms * quarters // 4 + attention * saved.attention + router * saved.router
    return layers * (found + (saved.dense_mlp if "mlp" in modules else 0))
