"""Layout-independent weights: a weight depends on the seed and on its global name only, never on who holds it.

Megatron draws from per-rank generators, so each layout would start from another model and losses could not be
compared. Here each tensor is drawn in full from its own generator and the rank keeps its slice.
"""

import hashlib
import math
import re

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
SEQUENTIAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")
FUSED_DOWN = "linear_qkv_down_proj.weight"
# Transformer Engine keeps the first value of an FP8 or FP4 weight in full, on the host, for whoever makes main weights
# of it (pytorch/module/base.py:1842; core/optimizer/distrib_optimizer.py:431). It is Megatron's draw until told.
PRECISE = "_high_precision_init_val"
SCALED_DOWN = ("linear_proj.weight", "linear_fc2.weight")  # Megatron's output_layer_init_method


def initialise_by_name(model: torch.nn.Module, config: TransformerConfig, seed: int) -> None:
    """Overwrite every matrix of a bare (not yet wrapped) model; vectors (norms, biases) keep their constants."""
    for local_name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        name = global_name(local_name, model, config)
        drawn = _slice_of(name, parameter, config, seed)
        with torch.no_grad():
            parameter.copy_(drawn)
        if hasattr(parameter, PRECISE):
            setattr(parameter, PRECISE, drawn.to(getattr(parameter, PRECISE)))


def global_name(local_name: str, model: torch.nn.Module, config: TransformerConfig) -> str:
    """Name in a model held by one rank: global layer and expert numbers, one spelling for all expert classes.

    A tied output layer has the embedding's name: under PP the last stage holds a copy of it.
    """
    name = local_name
    if layer := LAYER.match(name):
        number = int(model.get_submodule(f"decoder.layers.{layer[1]}").layer_number) - 1  # type: ignore[arg-type]
        name = f"decoder.layers.{number}." + name[layer.end() :]
    first_expert = parallel_state.get_expert_model_parallel_rank() * (
        (config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    )
    if expert := SEQUENTIAL_EXPERT.search(name):
        return f"{name[: expert.start()]}.{first_expert + int(expert[1])}.{expert[2]}.weight"
    if expert := GROUPED_EXPERT.search(name):
        return f"{name[: expert.start()]}.experts.{first_expert + int(expert[2])}.{expert[1]}.weight"
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def is_routed_expert(name: str) -> bool:
    """Whether a parameter belongs to the routed experts, whose groups are ETP and EDP instead of TP and DP.

    By name: Megatron's mark `allreduce` says so only where EP > 1 or ETP differs from TP.
    """
    return ".mlp.experts." in name


def _slice_of(name: str, parameter: torch.nn.Parameter, config: TransformerConfig, seed: int) -> torch.Tensor:
    """This rank's slice of the full tensor, drawn on the parameter's device in fp32. Memory: one full tensor."""
    ranks, rank = 1, 0
    if getattr(parameter, "tensor_model_parallel", False):
        ranks, rank = _tensor_parallel_place(is_routed_expert(name))
    dim = int(getattr(parameter, "partition_dim")) if ranks > 1 else 0  # noqa: B009  Megatron's mark, unknown to mypy
    shape = list(parameter.shape)
    shape[dim] *= ranks
    full = _full(name, shape, config, seed, parameter.device)
    parts = torch.split(full, _parts(name, shape[dim], config), dim=dim)
    return torch.cat([part.chunk(ranks, dim=dim)[rank] for part in parts], dim=dim)


def _parts(name: str, rows: int, config: TransformerConfig) -> list[int]:
    """Rows of the matrices that lie in one, of each of which a rank holds its part: a gated fc1 is [gate; up]
    (Megatron's partition_stride 2), a fused down projection [queries; keys, values and positions]
    (multi_latent_attention.py:1358)."""
    if config.gated_linear_unit and name.endswith("linear_fc1.weight"):
        return [rows // 2, rows // 2]
    if name.endswith(FUSED_DOWN):
        queries = int(getattr(config, "q_lora_rank"))  # noqa: B009  a field of MLATransformerConfig
        return [queries, rows - queries]
    return [rows]


def _tensor_parallel_place(expert: bool) -> tuple[int, int]:
    """(ranks, my rank) of the group that splits a tensor."""
    if expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _full(name: str, shape: list[int], config: TransformerConfig, seed: int, device: torch.device) -> torch.Tensor:
    """mla_down_proj_fusion puts two matrices into one: each is drawn under the name that it has without."""
    if not name.endswith(FUSED_DOWN):
        return _draw(name, shape, config, seed, device)
    prefix = name.removesuffix(FUSED_DOWN)
    names = (f"{prefix}linear_q_down_proj.weight", f"{prefix}linear_kv_down_proj.weight")
    counts = _parts(name, shape[0], config)
    drawn = [_draw(n, [count, *shape[1:]], config, seed, device) for n, count in zip(names, counts, strict=True)]
    return torch.cat(drawn)


def _draw(name: str, shape: list[int], config: TransformerConfig, seed: int, device: torch.device) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    scale = 1 / math.sqrt(2 * config.num_layers) if name.endswith(SCALED_DOWN) else 1.0
    std = config.init_method_std * scale
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)
