"""The real GPTModel of one rank, on the meta device under a fake process group: exact counts, no memory, no GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.presets import load_model
from tests.search_spaces.cases import SHORT, cpus
from tests.search_spaces.oracle import load_megatron
from train_worker.job import TrialJob

TRAINING = {"sequence_length": 128, "global_batch_size": 1024}


def job_of(model: str, world: int, facts: Mapping[str, object] | None = None, **knobs: KnobValue) -> TrialJob:
    """A job on `world` CPU ranks: the worker builds Megatron's local layers there."""
    from search_spaces.shapes import TrainingShape

    named = {SHORT.get(name, name): value for name, value in knobs.items()}
    if named.get("tensor_model_parallel_size", 1) != 1:
        named.setdefault("sequence_parallel", True)
    return TrialJob(
        trial_id="meta",
        candidate=Candidate(knobs=named),
        model=load_model(model).model_copy(update=dict(facts or {})),
        cluster=cpus(world),
        training=TrainingShape.model_validate(TRAINING),
        seed=1,
        time_limit_s=60,
    )


@contextmanager
def rank_of(job: TrialJob, rank: int) -> Iterator[Any]:
    """The Megatron configs of rank `rank`, with its process groups set up; everything is torn down afterwards."""
    load_megatron()
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from train_worker.cpu import megatron_on_cpu
    from train_worker.megatron.config import configs_of

    layout = job.candidate.layout
    torch.distributed.init_process_group("fake", rank=rank, world_size=job.world_size, store=FakeStore())
    try:
        with megatron_on_cpu(), patch.object(torch.cuda, "current_device", lambda: torch.device("meta")):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
                context_parallel_size=layout.context,
                expert_model_parallel_size=layout.expert,
                expert_tensor_parallel_size=layout.expert_tensor,
                create_gloo_process_groups=False,
            )
            configs = configs_of(job)
            configs.transformer.perform_initialization = False
            yield configs
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def counted(job: TrialJob, rank: int) -> tuple[int, int]:
    """(dense, routed expert) parameters that rank `rank` holds, as the worker builds its model."""
    from train_worker.megatron import model as worker
    from train_worker.megatron.init import is_routed_expert

    found = [0, 0]
    with rank_of(job, rank) as configs, torch.device("meta"):
        stages = job.candidate.layout.virtual_pipeline
        for stage in range(stages) if stages else [None]:
            for name, parameter in worker._model(job, configs, stage).named_parameters():
                found[is_routed_expert(name)] += parameter.numel()
    return found[0], found[1]
