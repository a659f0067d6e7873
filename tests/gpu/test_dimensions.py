"""Every dimension of a sweep switched on a GPU: it runs as asked, and trains to the loss of its baseline."""

import importlib.util
import math
from collections.abc import Callable

import pytest

from search_spaces.candidate import modules
from tests.gpu.conftest import Run, noted
from tests.gpu.trials import FAMILIES, NEEDS_BLACKWELL, ONE_GPU, REFUSED, SENT, TWO_GPUS, Trial, candidate_of, job
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from train_worker.outcome import Measured, Outcome, Rejected

pytestmark = pytest.mark.gpu
Baseline = Callable[[str], Measured]
APEX = "fused_weight_gradient_mlp_cuda"
LISTS = ("recompute_modules", "cuda_graph_modules", "offload_modules")


def trial_of(name: str, trial: Trial) -> TrialJob:
    """Profiled, so that the kernels too must show what was asked for."""
    return job(name, candidate_of(trial), FAMILIES[trial.family].model, ranks=trial.ranks, profile=True)


def check(outcome: Outcome, trial: Trial, reference: Measured) -> None:
    assert isinstance(outcome, Measured), outcome
    asked = dict(candidate_of(trial).knobs) | dict(trial.env)
    for name, value in asked.items():
        found = outcome.effective[name]
        same = set(modules(found)) == set(modules(value)) if name in LISTS else found == value
        assert same, f"{name}: requested {value!r}, effective {found!r}"
    assert outcome.profile is not None, outcome.profile_error
    losses = outcome.losses
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.95 * losses[0], f"the loss does not fall: {losses}"
    furthest = max(abs(a - b) / b for a, b in zip(losses, reference.losses, strict=True))
    assert furthest < trial.tolerance, f"{furthest:.2%} away: {losses} against {reference.losses}"
    assert outcome.memory is not None
    assert outcome.memory.allocated_bytes > outcome.memory.static_bytes > 0
    if trial.frees:
        assert getattr(outcome.memory, trial.frees) < getattr(reference.memory, trial.frees)


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_setting_runs_as_asked_and_trains_alike(run: Run, baseline: Baseline, name: str) -> None:
    trial = ONE_GPU[name]
    reference = baseline(trial.family)
    check(run(trial_of(name, trial)), trial, reference)


@pytest.mark.parametrize("name", TWO_GPUS)
def test_a_setting_of_two_gpus_trains_like_one(two: LocalGang, baseline: Baseline, name: str) -> None:
    trial = TWO_GPUS[name]
    if trial.knobs.get("gradient_accumulation_fusion") and not importlib.util.find_spec(APEX):
        pytest.skip(f"no {APEX} of Apex on this machine (FUS-12)")
    reference = baseline(trial.family)
    check(noted(two, trial_of(name, trial)), trial, reference)


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_seen_to_go_wrong_is_refused_by_the_worker_itself(run: Run, name: str) -> None:
    rule, trial = REFUSED[name]
    outcome = run(trial_of(name, trial))
    assert isinstance(outcome, Rejected), outcome
    assert outcome.rule == rule


@pytest.mark.parametrize("name", NEEDS_BLACKWELL)
def test_a_recipe_of_a_newer_gpu_says_so(run: Run, arch: str, name: str) -> None:
    if int(arch.rsplit("_", 1)[1]) >= 100:
        pytest.skip(f"{arch} has it")
    outcome = run(trial_of(name, Trial(SENT | NEEDS_BLACKWELL[name])))
    assert isinstance(outcome, Rejected), outcome
    assert outcome.rule == "stack-refuses"
    assert "compute capability 10.0" in outcome.reason
