"""Megatron's process groups, layers and schedules as judges of a layout: real code, fake ranks, on a CPU."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, config_arguments, config_class, config_refusal, load_megatron, target


class Passed(Exception):
    """The real code came past its checks, to where it would compute."""


def refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def fake_world(case: Case) -> Iterator[None]:
    """Rank 0 of the case's ranks, with Megatron's groups; nothing is sent. Megatron's CUDA calls go to the CPU."""
    load_megatron()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from train_worker.cpu import megatron_on_cpu

    with target(case), megatron_on_cpu():
        dist.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(**group_sizes(case))
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def group_sizes(case: Case) -> dict[str, Any]:
    """Arguments of initialize_model_parallel, as the launchers fill them."""
    layout, knobs = case.layout, case.knobs
    sizes = knobs.get("hierarchical_context_parallel_sizes")
    order = "tp-cp-ep-pp-dp" if knobs.get("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp"
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": _stages_a_rank(case),
        "context_parallel_size": layout.context,
        "hierarchical_context_parallel_sizes": json.loads(str(sizes)) if sizes else None,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "gtp_remat_size": case.integer("tensor_parallel_num_weight_shards", layout.tensor) // layout.tensor,
        "num_distributed_optimizer_instances": case.integer("num_distributed_optimizer_instances", 1),
        "order": order,
        "create_gloo_process_groups": False,
    }


def _stages_a_rank(case: Case) -> int | None:
    """VPP; not said, the launchers read it out of the pipeline layout."""
    if case.layout.virtual_pipeline is not None or not case.text("pipeline_model_parallel_layout"):
        return case.layout.virtual_pipeline
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text, stages = case.text("pipeline_model_parallel_layout"), case.layout.pipeline
    found = PipelineParallelLayerLayout.from_str(text, stages).virtual_pipeline_model_parallel_size
    return int(found) if found > 1 else None


def config_of(case: Case, **changes: Any) -> Any:
    return config_class(case)(**config_arguments(case) | {"perform_initialization": False} | changes)


def moe_layer(case: Case, **changes: Any) -> Any:
    """Megatron's MoE layer by its local spec, on the groups of `fake_world`."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    config = config_of(case, **changes)
    build = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    return build(config=config, layer_number=1, pg_collection=None)


def groups_refusal(case: Case) -> str | None:
    """Why initialize_model_parallel refuses, or None."""
    try:
        with fake_world(case):
            return None
    except REFUSALS as error:
        # It wants einops for the hierarchical groups that it makes after its checks of their sizes.
        return None if isinstance(error, ImportError) and "einops" in str(error) else refusal(error)


def layer_refusal(case: Case) -> str | None:
    """Why MoELayer cannot be built, or None."""
    with fake_world(case):
        try:
            moe_layer(case)
        except REFUSALS as error:
            return refusal(error)
    return None


def forward_refusal(case: Case) -> str | None:
    """Why MoELayer's forward pass refuses before it routes, or None."""
    import torch

    with fake_world(case):
        layer = moe_layer(case)
        with mock.patch.object(type(layer), "route", side_effect=Passed):
            try:
                layer(torch.zeros(4, 1, case.model.hidden_size))
            except Passed:
                return None
            except REFUSALS as error:
                return refusal(error)
    return "it did not come to its router"


def dense_refusal(case: Case) -> str | None:
    """Why the configuration of a model without experts refuses, or None."""
    with target(case):
        from megatron.core.transformer.transformer_config import TransformerConfig

        facts = {name: getattr(case.model, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        try:
            TransformerConfig(**facts, **dict(case.knobs))
        except REFUSALS as error:
            return refusal(error)
    return None


def stages_refusal(case: Case) -> str | None:
    """Why the layers cannot be given to stages, or None."""
    if why := config_refusal(case):
        return why
    with target(case):
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        config, virtual = config_of(case), case.layout.virtual_pipeline
        chunks = [None] if virtual is None else list(range(virtual))
        try:
            built = [
                get_num_layers_to_build(config, chunk, rank) for rank in range(case.layout.pipeline) for chunk in chunks
            ]
        except REFUSALS as error:
            return refusal(error)
    return None if sum(built) == case.model.num_layers else f"{sum(built)} layers built"


def batch_refusal(case: Case) -> str | None:
    """Why the calculator of micro-batches refuses, or None."""
    with target(case):
        from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

        batch, micro = case.training.global_batch_size, case.integer("micro_batch_size", 1)
        try:
            ConstantNumMicroBatchesCalculator(batch, micro, case.data_parallel, False, 0)
        except REFUSALS as error:
            return refusal(error)
    return None


def schedule_refusal(case: Case) -> str | None:
    """Why the pipeline schedule refuses before its first forward pass, or None."""
    import torch

    def step(*_: Any, **__: Any) -> None:
        raise Passed

    with fake_world(case):
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        config, count = config_of(case), case.layout.virtual_pipeline or 1
        chunks = [torch.nn.Linear(1, 1) for _ in range(count)]
        for chunk in chunks:
            chunk.config, chunk.model_type = config, ModelType.encoder_or_decoder  # type: ignore[assignment]
            chunk.set_input_tensor = lambda _: None  # type: ignore[assignment]
        try:
            get_forward_backward_func()(
                forward_step_func=step, data_iterator=[iter(()) for _ in chunks], model=chunks,
                num_microbatches=case.microbatches, seq_length=case.training.sequence_length,
                micro_batch_size=case.integer("micro_batch_size", 1),
            )  # fmt: skip
        except Passed:
            return None
        except REFUSALS as error:
            return refusal(error)
    return "it did not come to a forward pass"


def vocabulary_refusal(case: Case) -> str | None:
    """Why the embedding cannot be split, or None."""
    with fake_world(case):
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

        config = config_of(case)
        try:
            VocabParallelEmbedding(
                case.model.vocab_size, config.hidden_size, init_method=config.init_method, config=config
            )
        except REFUSALS as error:
            return refusal(error)
    return None


def scatter_refusal(case: Case) -> str | None:
    """Why a sequence, already cut by CP, cannot be scattered over the TP ranks, or None."""
    import torch

    with fake_world(case):
        from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

        try:
            scatter_to_sequence_parallel_region(torch.zeros(case.training.sequence_length // case.layout.context, 1))
        except REFUSALS as error:
            return refusal(error)
    return None


def dense_mlp_refusal(case: Case) -> str | None:
    """Why the MLP of a dense layer cannot be built, or None; None too where no layer is dense."""
    if not case.model.first_dense_layers:
        return None
    with fake_world(case):
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLP, MLPSubmodules

        try:
            MLP(config_of(case), MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
        except REFUSALS as error:
            return refusal(error)
    return None
