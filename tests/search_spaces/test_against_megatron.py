"""What our rules accept, the real `TransformerConfig` of megatron-core accepts; what it refuses, we refuse."""

import importlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from packaging.version import Version

from search_spaces.candidate import Candidate, KnobValue, modules
from search_spaces.named_spaces import LAPTOP, MOE_CORE
from search_spaces.rules import STACK_RULES, Case, case_of
from search_spaces.screen import screen, verdict
from search_spaces.shapes import ClusterShape, TrainingShape
from search_spaces.space import SearchSpace
from tests.search_spaces.cases import LAPTOP_RANKS, STACK, TINY, TRAINING, gpus
from tests.search_spaces.test_rules import EXAMPLES

# Rules whose reason TransformerConfig itself checks, and that their breaking example shows alone.
ENFORCED = (
    "PAR-05", "PAR-08", "OVL-03", "OVL-13", "RCP-01", "RCP-02", "RCP-07", "RCP-08", "RCP-09", "RCP-10", "RCP-13",
    "PRC-07", "CGR-01", "CGR-02", "CGR-06", "CGR-07", "CGR-09", "CGR-10", "CGR-13", "CGR-14",
)  # fmt: skip
LISTS = ("recompute_modules", "cuda_graph_modules")


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported here, not when tests are collected, and without inductor, which saves 3.5 CPU-seconds of 10."""
    import torch

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", lambda model=None, **_: model if model is not None else (lambda f: f))
        importlib.import_module("megatron.core.transformer.transformer_config")


@pytest.fixture(autouse=True)
def _target_stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The target has Transformer Engine 2.20.2, whatever this machine has."""
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version("2.20.2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refusal(case: Case) -> str | None:
    """Why the real configuration refuses, or None."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    model, bf16 = case.model, case.training.params_dtype == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    facts: dict[str, Any] = {name: getattr(model, name) for name in type(model).model_fields if name in known}
    knobs: dict[str, Any] = {name: value for name, value in case.knobs.items() if name in known}
    knobs |= {name: list(modules(knobs[name])) for name in LISTS if name in knobs}
    if knobs.get("cuda_graph_impl") == "full_iteration":
        knobs.setdefault("cuda_graph_modules", [])
    freq = [0] * model.first_dense_layers + [1] * (model.num_layers - model.first_dense_layers)
    own = {
        "add_bias_linear": False, "gated_linear_unit": True, "bf16": bf16, "params_dtype": dtype,
        "pipeline_dtype": dtype, "moe_layer_freq": freq,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    try:
        TransformerConfig(**facts | own | knobs)
    except (ValueError, AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", ENFORCED)
def test_a_breaking_example_is_refused_by_the_real_configuration_too(name: str) -> None:
    assert refusal(EXAMPLES[name][0]) is not None


def test_every_legal_point_of_the_laptop_builds_a_real_configuration() -> None:
    accepted = screen(LAPTOP, TINY, LAPTOP_RANKS, TRAINING).accepted
    refused = {c.id: why for c in accepted if (why := refusal(case_of(c, TINY, LAPTOP_RANKS, TRAINING)))}
    assert not refused


def test_legal_points_of_a_gpu_space_build_real_configurations() -> None:
    training = TrainingShape(sequence_length=128, global_batch_size=64)
    accepted = screen(MOE_CORE, TINY, gpus(2), training, rules=STACK_RULES).accepted
    sample = random.Random(1).sample(accepted, 500)
    refused = {c.id: why for c in sample if (why := refusal(case_of(c, TINY, gpus(2), training)))}
    assert not refused


def drawn(space: SearchSpace, source: random.Random) -> Candidate:
    decided: dict[str, KnobValue] = {}
    for knob in space.knobs:
        if space.active(decided, knob):
            decided[knob.name] = source.choice(knob.choices)
    return space.candidate(decided)


@pytest.mark.parametrize(
    ("space", "cluster", "training"),
    [
        (LAPTOP, LAPTOP_RANKS, TRAINING),
        (MOE_CORE, gpus(8), TrainingShape(sequence_length=128, global_batch_size=64)),
        (MOE_CORE, gpus(8, "B200 sm_100"), TrainingShape(sequence_length=128, global_batch_size=64)),
        (MOE_CORE, gpus(2), TrainingShape(sequence_length=128, global_batch_size=64, params_dtype="fp32")),
    ],
    ids=["laptop", "h200", "b200", "h200-fp32"],
)
def test_what_the_real_configuration_refuses_is_refused(
    space: SearchSpace, cluster: ClusterShape, training: TrainingShape
) -> None:
    source, refused = random.Random(1), 0
    for _ in range(600):
        case = case_of(drawn(space, source), TINY, cluster, training, STACK)
        why = refusal(case)
        refused += why is not None
        assert why is None or verdict(case, STACK_RULES), f"{dict(case.knobs)}: {why}"
    assert refused > 100, "the draw must reach what is refused"
