"""The effective configuration, read back, and how it differs from the request.

Megatron overwrites and ignores settings without a word (grouped GEMM under the local spec, recompute of a module that
has no code for it), so the request proves nothing. Asked twice: of the config objects before anything is built from
them, which costs nothing, and of what was built and has run. What each knob is read from: `readers`.
"""

import torch
from megatron.core import parallel_state

from search_spaces.candidate import Candidate, KnobValue, modules
from search_spaces.canonical import canonical
from search_spaces.named_spaces import ENVIRONMENT_KNOBS
from search_spaces.rules.pipeline import layout_stages
from train_worker.megatron.config import (
    LAYOUT,
    LIST_KNOBS,
    MegatronConfigs,
    field_names,
    megatron_value,
    unset,
    virtual_stages,
)
from train_worker.megatron.latches import in_force
from train_worker.megatron.readers import ALWAYS, plain, read
from train_worker.megatron.seen import Run
from train_worker.outcome import Rejected

RULE = "effective-differs"
# None means "as Megatron chooses", so that any value is what was asked for.
MEGATRONS_CHOICE = frozenset({"bucket_size", "microbatch_group_size_per_vp_stage", "moe_flex_dispatcher_num_sms"})


def config_mismatch(candidate: Candidate, configs: MegatronConfigs) -> Rejected | None:
    """What Megatron's own validation has made otherwise than asked; the same on every rank."""
    for owner in (configs.transformer, configs.ddp, configs.optimizer):
        names = field_names(type(owner))
        found = {name: plain(getattr(owner, name)) for name in candidate.knobs if name in names}
        if differs := mismatch(candidate, found):
            return differs
    return None


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
    """The variables the candidate sets, as they are in force now, and those of any space that the worker has anyway.

    The last were inherited and are the same in every trial of the sweep (`train_worker.rank.apply_environment` has
    removed those that the sweep searches over); they are recorded, since sweeps may be compared.
    """
    inherited = [name for name in sorted(ENVIRONMENT_KNOBS) if name not in candidate.env and in_force(name) is not None]
    return {name: in_force(name) for name in [*candidate.env, *inherited]}


def mismatch(candidate: Candidate, effective: dict[str, KnobValue], searched: tuple[str, ...] = ()) -> Rejected | None:
    """The knobs and variables found with another value than requested, where that makes it another run.

    Not where both have one canonical form: then only the words differ. `searched` variables are absent unless the
    candidate sets them.
    """
    requested: dict[str, KnobValue] = {**candidate.knobs, **dict.fromkeys(searched), **candidate.env}
    wrong = {
        name: value
        for name, value in requested.items()
        if name in effective and not _same(name, _resolved(name, value, candidate), effective[name])
    }
    if not wrong or _benign(candidate, {name: effective[name] for name in wrong}):
        return None
    told = "; ".join(f"{name}: requested {value!r}, effective {effective[name]!r}" for name, value in wrong.items())
    return Rejected(rule=RULE, reason=f"would measure something else: {told}")


def _benign(candidate: Candidate, found: dict[str, KnobValue]) -> bool:
    """Whether a request with what was found in its place has the same canonical form; variables have none."""
    same = canonical({**candidate.knobs, **found}).knobs == canonical(candidate.knobs).knobs
    return same and found.keys() <= candidate.knobs.keys()


def first_mismatch_of_ranks(mine: Rejected | None) -> Rejected | None:
    """The same verdict on every rank: the lowest rank's that has one. Collective."""
    found: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine.reason if mine else None)
    reasons = [reason for reason in found if reason]
    return Rejected(rule=RULE, reason=reasons[0]) if reasons else None


def _resolved(name: str, value: KnobValue, candidate: Candidate) -> KnobValue:
    """What a request of None means: an expert tensor size that follows TP, stages that follow the layout."""
    if value is None and name == "expert_tensor_parallel_size":
        return candidate.layout.expert_tensor
    if value is None and name == "virtual_pipeline_model_parallel_size":
        return virtual_stages(candidate)
    return value


def _same(name: str, requested: KnobValue, effective: KnobValue) -> bool:
    if requested is None and name in MEGATRONS_CHOICE:
        return True
    if name == LAYOUT and requested and effective:
        return layout_stages(str(requested)) == layout_stages(str(effective))
    if name in LIST_KNOBS:
        return unset(name, requested) or set(modules(requested)) == set(modules(effective))
    wanted = megatron_value(name, requested)
    return bool((plain(wanted) if isinstance(wanted, (list, torch.dtype)) else wanted) == effective)
