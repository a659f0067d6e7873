"""The real gradient buckets, sharding adapter and optimizer configuration as judges, on a CPU.

Ranks are pretended: torch's fake process group runs no communication, and Megatron's groups are built on it.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

from packaging.version import Version

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, config_arguments, config_class, target


def _split(ranks: Any, pattern: str, **sizes: int) -> Any:
    """What parallel_state asks of einops, which need not be installed."""
    assert pattern == "(l s u) -> (l u) s"
    outer, size, inner = sizes["l"], sizes["s"], sizes["u"]
    return ranks.reshape(outer, size, inner).transpose(0, 2, 1).reshape(-1, size)


@contextmanager
def pretended_ranks(case: Case) -> Iterator[None]:
    """Megatron's process groups for the case's layout, on rank 0 of a fake world."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from train_worker.cpu import megatron_on_cpu

    layout = case.layout
    with target(case), megatron_on_cpu(), ExitStack() as stack:
        from megatron.core import parallel_state

        stack.enter_context(mock.patch.object(parallel_state, "HAVE_EINOPS", True))
        stack.enter_context(mock.patch.object(parallel_state, "einops", SimpleNamespace(rearrange=_split), create=True))
        distributed.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                layout.tensor,
                layout.pipeline,
                expert_model_parallel_size=layout.expert,
                num_distributed_optimizer_instances=case.integer("num_distributed_optimizer_instances", 1),
                create_gloo_process_groups=False,
            )
            yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


def _own(case: Case, owner: Any) -> dict[str, Any]:
    """The knobs that are fields of a configuration class."""
    return {field.name: case.knobs[field.name] for field in fields(owner) if field.name in case.knobs}


def _buckets(case: Case) -> Any:
    """Megatron's DistributedDataParallel around one matrix."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = config_class(case)(**config_arguments(case))
    settings = DistributedDataParallelConfig(**_own(case, DistributedDataParallelConfig))
    return DistributedDataParallel(config, settings, torch.nn.Linear(4, 4))


def buckets_refusal(case: Case) -> str | None:
    """Why the real DistributedDataParallel refuses to be built, or None."""
    with pretended_ranks(case):
        try:
            _buckets(case)
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def gather_refusal(case: Case) -> str | None:
    """Why the real buckets refuse to gather their parameters in the first step, or None."""
    with pretended_ranks(case):
        try:
            _buckets(case).start_param_sync()
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def bucket_config_refusal(case: Case) -> str | None:
    """Why the real DistributedDataParallelConfig refuses, or None."""
    torch_version = Version(case.stack.torch) if case.stack else Version("2.11.0")
    with target(case), mock.patch.dict("os.environ", case.env):
        from megatron.core import utils
        from megatron.core.distributed import DistributedDataParallelConfig

        settings = _own(case, DistributedDataParallelConfig)
        settings = {k: json.loads(v) if isinstance(v, str) and v[:1] == "[" else v for k, v in settings.items()}
        with mock.patch.object(utils, "get_torch_version", return_value=torch_version):
            try:
                DistributedDataParallelConfig(**settings)
            except REFUSALS as error:
                return f"{type(error).__name__}: {error}"
    return None


def optimizer_refusal(case: Case) -> str | None:
    """Why the real OptimizerConfig refuses, or None."""
    with target(case):
        from megatron.core.optimizer import OptimizerConfig

        try:
            OptimizerConfig(**_own(case, OptimizerConfig))
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


class _PastTheChecksError(Exception):
    """Raised in place of the first thing that needs real ranks."""


def sharding_refusal(case: Case) -> str | None:
    """Why the real Megatron-FSDP adapter refuses before it touches a process group's ranks, or None."""
    import torch

    if not case.on("use_megatron_fsdp"):
        return None
    with target(case):
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as Adapter

        config = SimpleNamespace(**config_arguments(case))
        settings = DistributedDataParallelConfig(**_own(case, DistributedDataParallelConfig))
        past = mock.Mock(side_effect=_PastTheChecksError)
        with (
            mock.patch.object(Adapter, "_init_dist_index"),
            mock.patch.object(Adapter, "_annotate_tensor_parallelism", past),
        ):
            try:
                Adapter(config, settings, torch.nn.Linear(4, 4), device=torch.device("cpu"))
            except _PastTheChecksError:
                return None
            except REFUSALS as error:
                return f"{type(error).__name__}: {error}"
    return "the adapter was built without its process groups"
