"""The effective configuration, read back from the objects that were built, and how it differs from the request.

Megatron overwrites and ignores settings without a word (grouped GEMM under the local spec, recompute of a module that
has no code for it), so the request proves nothing. What each knob is read from: `readers`.
"""

import os

import torch
from megatron.core import parallel_state

from search_spaces.candidate import Candidate, KnobValue, modules
from search_spaces.named_spaces import ENVIRONMENT_KNOBS
from train_worker.megatron.config import LIST_KNOBS, megatron_value, unset
from train_worker.megatron.readers import ALWAYS, Run, read
from train_worker.outcome import Rejected


def effective_configuration(candidate: Candidate, run: Run) -> dict[str, KnobValue]:
    """Every knob of the candidate, the layout in force, the dispatcher and the batch split, as they really are here.

    `num_microbatches` and `data_parallel_size` are added to the knobs, and the environment variables that the candidate
    sets or that a space knows and this process has. Raises ValueError for a knob nothing holds.
    """
    names = [*candidate.knobs, *(name for name in ALWAYS if name not in candidate.knobs)]
    found = {name: read(name, run) for name in names}
    found["data_parallel_size"] = parallel_state.get_data_parallel_world_size()
    chunks = len(run.built.chunks)
    found["num_microbatches"] = len(run.micro_batch_sizes) // chunks
    return found | effective_environment(candidate)


def effective_environment(candidate: Candidate) -> dict[str, KnobValue]:
    """The variables the candidate sets, as they are in this process now, and knobs that the process has on its own.

    The last are inherited from whoever started the worker, and would change every trial without being recorded.
    """
    inherited = [name for name in sorted(ENVIRONMENT_KNOBS) if name in os.environ and name not in candidate.env]
    return {name: os.environ.get(name) for name in [*candidate.env, *inherited]}


def mismatch(candidate: Candidate, effective: dict[str, KnobValue]) -> Rejected | None:
    """The knobs and variables whose effective value is not the requested one, or None."""
    inherited = {name: None for name in effective if name in ENVIRONMENT_KNOBS}
    requested: dict[str, KnobValue] = {**candidate.knobs, **inherited, **candidate.env}
    wrong = [
        f"{name}: requested {value!r}, effective {effective[name]!r}"
        for name, value in requested.items()
        if not _same(name, _resolved(name, value, candidate), effective[name])
    ]
    return Rejected(rule="effective-differs", reason="; ".join(wrong)) if wrong else None


def first_mismatch_of_ranks(mine: Rejected | None) -> Rejected | None:
    """The same verdict on every rank: the lowest rank's that has one. Collective."""
    found: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine.reason if mine else None)
    reasons = [reason for reason in found if reason]
    return Rejected(rule="effective-differs", reason=reasons[0]) if reasons else None


def _resolved(name: str, value: KnobValue, candidate: Candidate) -> KnobValue:
    """What a request of None means: an expert tensor size that follows TP."""
    return candidate.layout.expert_tensor if name == "expert_tensor_parallel_size" else value


def _same(name: str, requested: KnobValue, effective: KnobValue) -> bool:
    if name in LIST_KNOBS:
        return unset(name, requested) or set(modules(requested)) == set(modules(effective))
    return bool(megatron_value(name, requested) == effective)
