"""Build the real model: GPTModel chunks with MoE layers, wrapped in Megatron's DDP, and Megatron's optimizer.

GPTModel prints that HybridModel is its successor; this is the only file to change when it goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from train_worker.cpu import local_block_spec
from train_worker.job import TrialJob
from train_worker.megatron.config import MegatronConfigs, virtual_stages
from train_worker.megatron.init import initialise_by_name, is_routed_expert
from train_worker.megatron.streams import late_accumulators, on_side_stream


@dataclass(frozen=True)
class Built:
    """What one rank trains: a DDP chunk for each virtual pipeline stage, the bare models inside, the optimizer."""

    chunks: list[Any]
    models: list[GPTModel]
    optimizer: Any
    accumulators: list[Any]  # kept alive for the capture of layers whose weight gradients come late

    def tensors(self) -> Iterator[torch.Tensor]:
        """What lives from step to step on this rank: weights, gradient buffers, optimizer state, fp32 main weights."""
        for model, chunk in zip(self.models, self.chunks, strict=True):
            yield from model.parameters()
            yield from model.buffers()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if part.optimizer is None:  # a stage without parameters of this kind
                continue
            yield from (parameter for group in part.optimizer.param_groups for parameter in group["params"])
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))


def build(job: TrialJob, configs: MegatronConfigs) -> Built:
    """Needs `parallel_state` initialised. Weights are Megatron's draw or layout-independent, as the job says."""
    stages = virtual_stages(job.candidate)
    models = [_model(job, configs, stage) for stage in (range(stages) if stages else [None])]
    if job.training.layout_independent_init:
        for model in models:
            initialise_by_name(model, configs.transformer, job.seed)
    inner = [_half_precision(model, configs.transformer) for model in models]
    impl = configs.transformer.cuda_graph_impl
    late = impl == "transformer_engine" and configs.ddp.delay_wgrad_compute
    with on_side_stream(job.cluster.device, late or impl == "full_iteration"):
        chunks = [
            DistributedDataParallel(configs.transformer, configs.ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(inner)
        ]
        accumulators = late_accumulators(chunks) if late else []
    _hook_schedule(configs, chunks)
    optimizer = get_megatron_optimizer(configs.optimizer, chunks, use_gloo_process_groups=False)
    return Built(chunks, models, optimizer, accumulators)


def _model(job: TrialJob, configs: MegatronConfigs, stage: int | None) -> GPTModel:
    config = configs.transformer
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, job.cluster.device, stage),
        vocab_size=configs.padded_vocabulary,
        max_sequence_length=max(job.model.max_position_embeddings, job.training.sequence_length),
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not job.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=job.model.rotary_base,
        vp_stage=stage,
    )
    return model.cuda(torch.cuda.current_device()) if job.cluster.device == "cuda" else model


def _block_spec(config: TransformerConfig, device: str, stage: int | None) -> TransformerBlockSubmodules:
    if device == "cuda":  # Transformer Engine is there: `trial.run` asked
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
    return local_block_spec(config, stage)


def _half_precision(model: GPTModel, config: TransformerConfig) -> Any:
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def _hook_schedule(configs: MegatronConfigs, chunks: list[Any]) -> None:
    """Tell the pipeline schedule when gradients and parameters travel, as Megatron-LM's training.py does."""
    config = configs.transformer
    config.finalize_model_grads_func = finalize_model_grads
    if configs.ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if configs.ddp.overlap_param_gather and configs.ddp.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def parameter_count(models: list[GPTModel]) -> int:
    """Parameters of the whole model, each once, padding of the vocabulary included. Collective: call on every rank."""
    owned = sum(parameter.numel() for model in models for parameter in _owned(model))
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    total = torch.tensor([owned], dtype=torch.int64, device=torch.device(device))
    torch.distributed.all_reduce(total)
    return int(total.item())


def _owned(model: GPTModel) -> Iterator[torch.nn.Parameter]:
    """Parameters this rank counts: the first of each set of ranks that hold the same values."""
    first_dense = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first_expert = parallel_state.get_expert_data_parallel_rank() == 0
    dense_shard = parallel_state.get_tensor_model_parallel_rank()
    expert_shard = parallel_state.get_expert_tensor_parallel_rank()
    for name, parameter in model.named_parameters():
        replica_is_first, shard = (first_expert, expert_shard) if is_routed_expert(name) else (first_dense, dense_shard)
        split = getattr(parameter, "tensor_model_parallel", False)
        copied_from_first_stage = getattr(parameter, "shared", False)  # tied embeddings under PP
        if replica_is_first and (split or shard == 0) and not copied_from_first_stage:
            yield parameter
