"""A candidate and the fixed shapes -> Megatron's own config objects. Which knob goes to which object is decided here.

A knob has the name of a Megatron-Core 0.19 field and goes to *every* config object that has a field of that name
(`overlap_param_gather` is in two). Only `OWN_KNOBS` are read by this worker itself. An absent knob keeps Megatron's
default.
"""

import difflib
import json
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from search_spaces.candidate import Candidate, KnobValue, modules
from search_spaces.memory.shape import padded_vocabulary
from search_spaces.rules.pipeline import layout_stages
from search_spaces.shapes import ModelShape, TrainingShape
from train_worker.host import HOST_KNOBS
from train_worker.job import TrialJob

OWN_KNOBS = HOST_KNOBS | {"micro_batch_size"}
LAYOUT, VIRTUAL = "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"
LIST_KNOBS = frozenset({"recompute_modules", "cuda_graph_modules", "offload_modules"})
NONE_MEANS_OFF = frozenset({"recompute_granularity", "recompute_method", "fp8", "fp4", "moe_router_dtype"})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The precision-aware optimizer's fields and words; fp8 is what Transformer Engine stores as bytes (MLM arguments.py).
STATE_DTYPES = frozenset({"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"})
STATE_WORDS = DTYPES | {"fp16": torch.float16, "fp8": torch.uint8}
TORCH_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
OWNERS: tuple[type, ...] = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)


@dataclass(frozen=True)
class MegatronConfigs:
    """The three objects Megatron is built from, and the batch split. `padded_vocabulary` counts rows."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    micro_batch_size: int
    padded_vocabulary: int


def configs_of(job: TrialJob) -> MegatronConfigs:
    """Knobs must exist (`refuse_unknown`). The errors of Megatron's own validation pass through."""
    candidate, training = job.candidate, job.training
    knobs = {name: megatron_value(name, value) for name, value in candidate.knobs.items() if not unset(name, value)}
    fixed = _model_fields(job.model) | _training_fields(training) | _derived_fields(candidate)
    owner = _transformer_class(job.model)
    transformer = owner(**(fixed | _of(knobs, owner)))
    ddp_fields = {
        "grad_reduce_in_fp32": training.params_dtype == "bf16",  # as Megatron-LM with --bf16
        # Megatron-LM has one option for both objects: arguments.py, --fp8-param-gather and --fp4-param-gather.
        "fp8_param_gather": bool(candidate.knobs.get("fp8_param")),
        "fp4_param_gather": bool(candidate.knobs.get("fp4_param")),
    }
    ddp = DistributedDataParallelConfig(**(ddp_fields | _of(knobs, DistributedDataParallelConfig)))
    optimizer = OptimizerConfig(**(_optimizer_fields(training) | _of(knobs, OptimizerConfig)))
    return MegatronConfigs(
        transformer=transformer,
        ddp=ddp,
        optimizer=optimizer,
        micro_batch_size=int(candidate.knobs.get("micro_batch_size") or 1),
        padded_vocabulary=padded_vocabulary(job.model.vocab_size, candidate.layout.tensor),
    )


def refuse_unknown(candidate: Candidate) -> None:
    """ValueError naming the first knob that is a fact of the model, or that no Megatron config object has.

    With the nearest name that exists.
    """
    known = OWN_KNOBS.union(*(field_names(owner) for owner in OWNERS))
    for name in candidate.knobs:
        if name in ModelShape.model_fields:
            raise ValueError(f"{name!r} is a fact of the model and cannot be a knob")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"unknown knob {name!r}" + (f"; nearest: {near[0]!r}" if near else ""))


def field_names(owner: type) -> frozenset[str]:
    """Names of the dataclass fields of a Megatron config class, inherited ones included."""
    return frozenset(field.name for field in fields(owner))


def unset(name: str, value: KnobValue) -> bool:
    """Values as good as absent: an empty list (Megatron's default), one chunk a stage (the schedule without chunks)."""
    return (name in LIST_KNOBS and not modules(value)) or (name == VIRTUAL and value == 1)


def megatron_value(name: str, value: KnobValue) -> Any:
    """A knob's value in the type Megatron wants: "core_attn+moe" -> ["core_attn", "moe"], "none" -> None."""
    if name in LIST_KNOBS:
        return list(modules(value))
    if name in NONE_MEANS_OFF and value == "none":
        return None
    if name in STATE_DTYPES and isinstance(value, str):
        return _state_dtype(name, value.removeprefix("torch."))
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list by layer, or a nested layout
        return json.loads(value)
    return value


def _state_dtype(name: str, word: str) -> torch.dtype:
    known = STATE_WORDS.get(TORCH_WORDS.get(word, word))
    if known is None:
        raise ValueError(f"{name} {word!r} is no type of optimizer state; known: {', '.join(STATE_WORDS)}")
    return known


def virtual_stages(candidate: Candidate) -> int | None:
    """Chunks a rank holds. Where the knob is absent, a layout of more stages than ranks sets it, as in Megatron."""
    layout, text = candidate.layout, candidate.knobs.get(LAYOUT)
    if layout.virtual_pipeline is not None or not text:
        return None if unset(VIRTUAL, layout.virtual_pipeline) else layout.virtual_pipeline
    chunks = len(layout_stages(str(text))) // layout.pipeline
    return chunks if chunks > 1 else None


def _of(knobs: dict[str, Any], owner: type) -> dict[str, Any]:
    names = field_names(owner)
    return {name: value for name, value in knobs.items() if name in names}


def _transformer_class(model: ModelShape) -> Any:
    return MLATransformerConfig if model.multi_latent_attention else TransformerConfig


def _model_fields(model: ModelShape) -> dict[str, Any]:
    """The model's facts, and what today's MoE decoders share: RMSNorm, gated SiLU, no linear bias, no dropout."""
    same = field_names(_transformer_class(model)) & set(ModelShape.model_fields)
    found: dict[str, Any] = {name: getattr(model, name) for name in same}
    if model.multi_latent_attention:
        found["rope_type"] = "rope"
    dense = model.first_dense_layers
    return found | {
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense),
        "moe_router_pre_softmax": model.moe_router_topk == 1 and model.moe_router_score_function == "softmax",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _training_fields(training: TrainingShape) -> dict[str, Any]:
    dtype = DTYPES[training.params_dtype]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "moe_router_load_balancing_type": training.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": training.moe_aux_loss_coeff,
        "moe_router_force_load_balancing": training.routing == "forced",
    }


def _derived_fields(candidate: Candidate) -> dict[str, Any]:
    """What follows from the knobs: Megatron-LM's arguments derive batch_p2p_comm the same way (arguments.py)."""
    layout = candidate.layout
    return {
        "batch_p2p_comm": not candidate.knobs.get("overlap_p2p_comm", False),
        "expert_tensor_parallel_size": layout.expert_tensor,
        "deallocate_pipeline_outputs": layout.pipeline > 1,  # sent outputs are not kept for the backward pass
    }


def _optimizer_fields(training: TrainingShape) -> dict[str, Any]:
    dtype = DTYPES[training.params_dtype]
    return {
        "optimizer": training.optimizer,
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        "clip_grad": training.clip_grad,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "sgd_momentum": 0.0,  # plain SGD: the optimizer of the parity tests
        # With optimizer_cpu_offload all of it moves, as by Megatron-LM's argument; by the class's own 0.0 nothing does.
        "optimizer_offload_fraction": 1.0,
    }
