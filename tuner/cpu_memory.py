"""Whether a model can be trained in the memory of this machine, where the ranks are CPU processes of it.

`MemoryJudge` is silent on CPU: there is no device to fill, but a machine that all ranks share. Parameters, gradients
and optimizer state are counted (search_spaces/memory), so what they say about a model that is far too large is sure.
"""

from collections.abc import Iterator
from typing import NamedTuple

from search_spaces.candidate import Candidate
from search_spaces.memory.plan import plan_of
from search_spaces.memory.shape import FactError
from search_spaces.presets import load_model, model_names
from search_spaces.rules import case_of
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from train_worker.host_memory import host_memory, limit_share
from tuner.sweep import LoadedSweep

GIB = 2**30


class Shortage(NamedTuple):
    """What does not fit, and what to do. `hopeless`: no configuration can, whatever is sharded or recomputed."""

    hopeless: bool
    what: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.what}; {self.next_step}"


def shortage_of(sweep: LoadedSweep, address: str | None) -> Shortage | None:
    """Of a sweep that runs on this machine; None where it fits, on GPUs, and on a cluster elsewhere (`address`)."""
    if address is not None:
        return None
    spec = sweep.spec
    return shortage(sweep.model, spec.cluster, spec.training, sweep.space.default(), machine_bytes())


def machine_bytes() -> int | None:
    """Memory of this machine or container, in bytes; None where the system does not tell."""
    try:
        return host_memory().total_bytes
    except (OSError, KeyError):
        return None


def shortage(
    model: ModelShape, cluster: ClusterShape, training: TrainingShape, default: Candidate, there_bytes: int | None
) -> Shortage | None:
    """None where all trials that run at once fit `there_bytes`, and where that or a fact of the model is not known."""
    if cluster.device != "cpu" or there_bytes is None:
        return None
    usable = there_bytes * limit_share()  # a rank is killed beyond it
    try:
        least, asked = least_bytes(model, cluster, training), default_bytes(model, cluster, training, default)
    except FactError:
        return None
    if asked <= usable:
        return None
    slots = f", {cluster.slots} trials at once" if cluster.slots > 1 else ""
    there = f"this machine has {there_bytes / GIB:.1f} GiB"
    hopeless = least > usable
    what = (
        f"{model.name} cannot be trained here: its weights, gradients and optimizer state alone take "
        f"{least / GIB:,.1f} GiB{slots}; {there}"
        if hopeless
        else f"the default configuration of {model.name} takes {asked / GIB:,.1f} GiB on {cluster.workers} ranks"
        f"{slots}; {there}"
    )
    fitting = ", ".join(_fitting(cluster, training, default, usable)) or "none"
    return Shortage(hopeless, what, f"use a smaller preset (fit here: {fitting}), or cut num_layers in model.facts")


def least_bytes(model: ModelShape, cluster: ClusterShape, training: TrainingShape) -> int:
    """What lives from step to step in all trials that run at once, each parameter held once: no layout takes less."""
    alone = cluster.model_copy(update={"workers": 1, "workers_per_trial": 1, "workers_per_node": 1})
    plan = plan_of(case_of(Candidate(knobs={}), model, alone, training))
    return cluster.slots * plan.worst.states.resident


def default_bytes(model: ModelShape, cluster: ClusterShape, training: TrainingShape, default: Candidate) -> int:
    """The predicted peak of all ranks of all trials that run at once, under the default configuration."""
    plan = plan_of(case_of(default, model, cluster, training))
    ranks_a_stage = cluster.workers_per_trial // len(plan.stages)
    return cluster.slots * ranks_a_stage * sum(stage.total for stage in plan.stages)


def _fitting(cluster: ClusterShape, training: TrainingShape, default: Candidate, usable: float) -> Iterator[str]:
    """Model presets whose default configuration fits, the largest first."""
    sizes = []
    for name in model_names():
        try:
            size = default_bytes(load_model(name), cluster, training, default)
        except FactError:
            continue
        sizes.append((size, name))
    yield from (name for size, name in sorted(sizes, reverse=True) if size <= usable)
