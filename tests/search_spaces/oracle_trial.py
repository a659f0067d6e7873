"""What a trial does before it trains, in its order, on rank 0 of a fake world: the real code, each step a judge.

Groups, the layers of every stage, the model of every chunk on the meta device (Megatron's local layers: Transformer
Engine's need a GPU), the micro-batches, the schedule's checks, the first layer's. Nothing is sent and nothing computed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, load_megatron
from tests.search_spaces.oracle_parallelism import Passed, fake_world
from tests.search_spaces.oracle_worker import job_of

Step = Callable[[Case, Any], None]


def _stages(case: Case, config: Any) -> None:
    """The layers of all ranks, in the chunks that the worker builds."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    virtual, built = case.layout.virtual_pipeline, 0
    for rank in range(case.layout.pipeline):
        with mock.patch.object(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank):
            chunks = [None] if virtual is None else range(virtual)
            # Of -1 layers in the middle none is built.
            built += sum(max(get_num_layers_to_build(config, chunk, rank), 0) for chunk in chunks)
    if built != case.model.num_layers:
        raise ValueError(f"{built} layers built")


def _model(case: Case, config: Any) -> None:
    """Megatron's own attention knows no context parallelism: then what follows attention, alone."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    from train_worker.megatron import model
    from train_worker.megatron.config import configs_of

    on_cpu = case.cluster.model_copy(update={"device": "cpu", "gpu_arch": None})
    job = job_of(replace(case, cluster=on_cpu))
    virtual = case.layout.virtual_pipeline
    meta = torch.device("meta")
    with meta, mock.patch.object(torch.cuda, "current_device", return_value=meta):
        if case.layout.context > 1:
            _layer(config)
            if case.model.first_dense_layers:
                MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
            return
        configs = configs_of(job)
        configs.transformer.perform_initialization = False
        for chunk in [None] if virtual is None else range(virtual):
            model._model(job, configs, chunk)


def _layer(config: Any) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    build = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    return build(config=config, layer_number=1, pg_collection=None)


def _batch(case: Case, _: Any) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    batch, micro = case.training.global_batch_size, case.integer("micro_batch_size", 1)
    ConstantNumMicroBatchesCalculator(batch, micro, case.data_parallel, False, 0)


def _schedule(case: Case, config: Any) -> None:
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def step(*_: Any, **__: Any) -> None:
        raise Passed

    chunks: list[Any] = [torch.nn.Linear(1, 1) for _ in range(config.virtual_pipeline_model_parallel_size or 1)]
    for chunk in chunks:
        chunk.config, chunk.model_type = config, ModelType.encoder_or_decoder
        chunk.set_input_tensor = lambda _: None
    try:
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=[iter(()) for _ in chunks], model=chunks,
            num_microbatches=case.microbatches, seq_length=case.training.sequence_length,
            micro_batch_size=case.integer("micro_batch_size", 1),
        )  # fmt: skip
    except Passed:
        return
    raise AssertionError("the schedule did not come to a forward pass")


def _first_step(case: Case, config: Any) -> None:
    """The batch cut by CP, the sequence scattered over TP, then a MoE layer's forward up to its router."""
    import torch
    from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

    from train_worker.megatron.step import of_this_context_rank

    meta, text = torch.device("meta"), torch.zeros(1, case.training.sequence_length)
    text = of_this_context_rank({"tokens": text})["tokens"]
    if case.layout.sequence_parallel:
        scatter_to_sequence_parallel_region(text.T)
    with meta, mock.patch.object(torch.cuda, "current_device", return_value=meta):
        layer = _layer(config)
        with mock.patch.object(type(layer), "route", side_effect=Passed):
            try:
                layer(torch.zeros(4, 1, case.model.hidden_size))
            except Passed:
                return
    raise AssertionError("the layer did not come to its router")


STEPS: dict[str, Step] = {
    "stages": _stages, "model": _model, "batch": _batch, "schedule": _schedule, "first step": _first_step,
}  # fmt: skip


def first_refusal(case: Case) -> tuple[str, str] | None:
    """(step, reason) of the first step that refuses; None where the trial would begin to compute."""
    load_megatron("train_worker.megatron.trial")
    from train_worker.megatron.config import configs_of

    step = "groups"
    # The worker makes its groups by the sizes it was told: it does not read a pipeline layout for them.
    told = {name: value for name, value in case.knobs.items() if name != "pipeline_model_parallel_layout"}
    try:
        with fake_world(replace(case, knobs=told)):
            step = "config"
            config = configs_of(job_of(case)).transformer
            config.perform_initialization = False
            for step, check in STEPS.items():  # noqa: B007
                check(case, config)
    except (*REFUSALS, KeyError, ZeroDivisionError) as error:
        return step, f"{type(error).__name__}: {error}"
    return None
