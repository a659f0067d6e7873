"""The configurations that this project's own worker builds for a candidate, as judges: its mapping, Megatron's checks.

Transformer Engine 2.1 and newer have the kernels that Megatron looks for, and all drawn targets do: their presence is
pretended once. Versions, torch's too, are the case's.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from packaging.version import Version

from search_spaces.candidate import Candidate
from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, load_megatron
from tests.search_spaces.oracle_fusions import PERMUTATIONS, ROTARY
from tests.search_spaces.oracle_precision import engine_optimizers
from train_worker.job import TrialJob

Judge = Callable[[Case], str | None]


def job_of(case: Case) -> TrialJob:
    """What the worker is sent. Unvalidated: a drawn candidate may be anything."""
    candidate = Candidate.model_construct(knobs=dict(case.knobs), env=dict(case.env))
    return TrialJob.model_construct(
        trial_id="drawn", candidate=candidate, model=case.model, cluster=case.cluster, training=case.training, seed=1,
        time_limit_s=60.0,
    )  # fmt: skip


@contextmanager
def worker() -> Iterator[Judge]:
    """Why one of Megatron's configurations refuses what the worker passes, or None.

    Megatron is patched once for all cases: 0.4 ms a case instead of 6.
    """
    load_megatron()
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from train_worker.megatron.config import configs_of

    with ExitStack() as stack:
        engine = stack.enter_context(mock.patch.object(utils, "get_te_version"))
        torch = stack.enter_context(mock.patch.object(utils, "get_torch_version"))
        stack.enter_context(mock.patch.dict("os.environ"))
        for name, module in engine_optimizers().items():  # one by one: what else is imported meanwhile must stay
            stack.callback(sys.modules.pop, name)
            sys.modules[name] = module
        stack.enter_context(mock.patch.multiple(moe_utils, **dict.fromkeys(PERMUTATIONS, print)))
        stack.enter_context(mock.patch.multiple(rope_utils, **dict.fromkeys(ROTARY, print)))

        def refusal(case: Case) -> str | None:
            assert case.stack is not None
            engine.return_value = Version(str(case.stack.transformer_engine))
            torch.return_value = Version(case.stack.torch)
            os.environ.update(case.env)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    configs_of(job_of(case))
            except (*REFUSALS, KeyError) as error:  # KeyError: Megatron's own, for a graph module it does not know
                return f"{type(error).__name__}: {error}"
            finally:
                for name in case.env:
                    del os.environ[name]
            return None

        yield refusal
