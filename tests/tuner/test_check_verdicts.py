"""`moetune check` on configurations whose answer is known: verdict and rule."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from search_spaces.presets import model_names
from tests.search_spaces.published import FIXTURES, cases, models, published_cases, recipe_cases, rows
from tests.tuner.check_cases import knobs
from tuner.commands.check import CheckVerdict, answer

RECIPES: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
# GPU -> what is refused on it, recipes and dispatchers (facts of the recipe tables of Transformer Engine 2.20.2 and of
# Megatron Bridge 0.6.2's gate; deepep and hybridep on sm_80 and sm_89 pass the gate and are told as a risk).
OLD = {"delayed": "HW-01", "tensorwise": "HW-01", "blockwise": "HW-02", "mxfp8": "HW-03", "nvfp4": "HW-04"}
ADA = {name: rule for name, rule in OLD.items() if rule != "HW-01"}
HOPPER = {"mxfp8": "HW-03", "nvfp4": "HW-04"}
RTX = {"mxfp8": "HW-03", "nvfp4": "HW-05"}
NO_NCCL, NO_DEEPEP, NO_FLEX = ("ncclep",), ("deepep",), ("deepep", "hybridep", "ncclep")
REFUSED: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "A100 sm_80": (OLD, NO_NCCL), "RTX3090 sm_86": (OLD, NO_NCCL), "RTX4090 sm_89": (ADA, NO_NCCL),
    "L40S sm_89": (ADA, NO_NCCL), "H100 sm_90": (HOPPER, ()), "H200 sm_90": (HOPPER, ()), "B200 sm_100": ({}, ()),
    "GB200 sm_100": ({}, NO_DEEPEP), "B300 sm_103": ({}, ()), "GB300 sm_103": ({}, NO_DEEPEP),
    "VR200 sm_100": ({}, NO_DEEPEP), "RTX5090 sm_120": (RTX, NO_FLEX), "RTXPRO6000 sm_120": (RTX, NO_FLEX),
}  # fmt: skip


def wrong(judged: Iterable[Mapping[str, Any]]) -> list[str]:
    """Those answered otherwise than expected, in words."""
    found = []
    for number, case in enumerate(judged, start=1):
        verdict, faults = answer(case, number)
        right = verdict.valid == (case["expected"] == "valid")
        if faults or not right or not (verdict.valid or verdict.rule in case["rule"].split("/")):
            found.append(f"{case['id']}: {case['expected']} {case['rule']}, not {verdict.rule} {verdict.reason}")
    return found


def kinds() -> list[dict[str, Any]]:
    """Cases of every kind of the rule catalogue, each refused one with a valid neighbour ("-ok")."""
    facts = models() | json.loads((FIXTURES / "kinds_models.json").read_text())
    return [case | {"model": {"name": case["model"], **facts[case["model"]]}} for case in rows("kinds.jsonl")]


def test_the_validation_cases() -> None:
    assert not wrong(cases("validation_cases.json"))


def test_cases_of_every_kind() -> None:
    found = kinds()
    assert len(found) > 500
    assert not wrong(found)


def test_every_refused_kind_has_a_valid_neighbour() -> None:
    valid = {case["rule"] for case in rows("kinds.jsonl") if case["expected"] == "valid"}
    assert {case["rule"] for case in rows("kinds.jsonl")} <= valid


def test_cases_that_name_a_preset_are_answered_like_those_that_give_its_facts() -> None:
    named = [case for case in rows("kinds.jsonl") if case["model"].replace("_", "-") in model_names()]
    assert len(named) > 400
    assert not wrong(named)


def test_published_configurations_are_accepted() -> None:
    """All but PUB-228 and PUB-229, which ran on a branch: OVL-05."""
    found = list(published_cases(named_launcher=True))
    assert [case["id"] for case in found if case["expected"] == "invalid"] == ["PUB-228", "PUB-229"]
    assert not wrong(found)


@pytest.mark.parametrize("as_paths", [True, False], ids=["Bridge's paths", "plain fields"])
def test_shipped_recipes_are_answered_as_megatron_bridge_does(as_paths: bool) -> None:
    """Except the eager ncclep recipe, whose layers do not build on megatron-core 0.19.2 (DSP-11)."""
    assert not wrong(recipe_cases(as_paths))


@pytest.mark.parametrize("gpu", REFUSED)
def test_every_recipe_and_dispatcher_by_gpu(gpu: str) -> None:
    recipes, backends = REFUSED[gpu]
    facts = models()["qwen3_30b_a3b"]
    for recipe, fields in RECIPES.items():
        for dispatcher in ("allgather", "alltoall", "deepep", "hybridep", "ncclep"):
            expected = "DSP-20" if dispatcher in backends else recipes.get(recipe)
            verdict = judged(gpu, facts, fields, dispatcher)
            assert (verdict.valid, None if verdict.valid else verdict.rule) == (expected is None, expected), (
                recipe,
                dispatcher,
                verdict,
            )


def judged(gpu: str, facts: Mapping[str, Any], fields: Mapping[str, str], dispatcher: str) -> CheckVerdict:
    stack = {"mcore": "0.19.2", "torch": "2.11.0", "TE": "2.20.2"}
    knobs: dict[str, object] = {"expert_model_parallel_size": 8, "moe_token_dispatcher_type": dispatcher, **fields}
    if dispatcher in ("deepep", "hybridep", "ncclep"):
        knobs |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": dispatcher}
    if dispatcher == "ncclep":  # the one pair of releases that it starts with
        knobs["moe_expert_rank_capacity_factor"] = 8.0
        stack |= {"TE": "2.18.0", "nccl": "2.30.4"}
    case = {"stack": stack, "gpu_arch": gpu, "world_size": 8, "model": facts, "knobs": knobs}
    return answer(case, 1)[0]


STAGES, CHUNKS = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
OVERLAPPED = {STAGES: 2, CHUNKS: 1, "overlap_moe_expert_parallel_comm": True}


@pytest.mark.parametrize(
    ("framework", "asked", "rule"),
    [
        (None, OVERLAPPED, None),
        ("megatron-core", OVERLAPPED, None),
        ("megatron-bridge", OVERLAPPED, None),
        ("megatron-lm", OVERLAPPED, "OVL-02"),  # it takes 1 for none (arguments.py:944)
        ("megatron-core", {CHUNKS: 1}, "PAR-10"),  # core/parallel_state.py:829
        ("megatron-core", {STAGES: 8, CHUNKS: 1, "num_microbatches": 4}, "PAR-24"),
        ("megatron-lm", {CHUNKS: 1}, None),
        (None, {CHUNKS: 1}, None),  # as published tables have it
    ],
)
def test_one_chunk_a_stage(framework: str | None, asked: dict[str, Any], rule: str | None) -> None:
    said = knobs(**asked) | {"world_size": 64}
    verdict, faults = answer(said if framework is None else said | {"framework": framework}, 1)
    assert not faults
    assert (verdict.valid, verdict.rule) == (rule is None, rule), verdict.reason
