"""Megatron's configuration, sharded wrapper and sharded optimizer as judges of overlap, on a CPU."""

from types import SimpleNamespace
from unittest import mock

from search_spaces.rules import Case
from search_spaces.rules.versions import older
from tests.search_spaces.oracle import REFUSALS, config_refusal, load_megatron, target
from tests.search_spaces.oracle_parallelism import Passed, config_of, refusal


def torch_refusal(case: Case) -> str | None:
    """Why the real configuration refuses with the target's torch, or None."""
    load_megatron()
    found = case.stack.torch if case.stack else "2.11"
    asked = "megatron.core.transformer.transformer_config.is_torch_min_version"
    with mock.patch(asked, lambda least: not older(found, least)):
        return config_refusal(case)


def sharding_refusal(case: Case) -> str | None:
    """Why Megatron-FSDP's wrapper refuses before it shards, or None."""
    import torch

    with target(case):
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

        config, wrapper = config_of(case), adapter.FullyShardedDataParallel
        settings = DistributedDataParallelConfig(
            use_megatron_fsdp=True, use_distributed_optimizer=True, fsdp_double_buffer=case.on("fsdp_double_buffer"),
        )  # fmt: skip
        with (
            mock.patch.object(wrapper, "_init_dist_index"),
            mock.patch.object(adapter, "MegatronFSDP", side_effect=Passed),
        ):
            try:
                wrapper(config, settings, torch.nn.Linear(1, 1), device=torch.device("cpu"))
            except Passed:
                return None
            except REFUSALS as error:
                return refusal(error)
    return "it did not come to sharding"


def optimizer_refusal(case: Case) -> str | None:
    """Why the distributed optimizer does not take the training job's optimizer, or None; None too without it."""
    if not case.on("use_distributed_optimizer"):
        return None
    import torch

    load_megatron()
    from train_worker.cpu import megatron_on_cpu

    with target(case), megatron_on_cpu():
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        kind = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.training.optimizer]
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        chunk = SimpleNamespace(ddp_config=SimpleNamespace())
        try:
            DistributedOptimizer(optimizer, OptimizerConfig(), None, None, [chunk], {}, None, None, None, 0)
        except REFUSALS as error:
            return refusal(error)
    return None
