"""What the fixtures call valid, Megatron-Core's own configuration class accepts: a check of the fixtures themselves."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from search_spaces.explicit import read_case
from search_spaces.partial import UnknownFact
from search_spaces.presets import load_model
from search_spaces.rules import Case
from search_spaces.shapes import ModelShape
from tests.search_spaces import oracle_fusions
from tests.search_spaces.cases import GPU_TRAINING
from tests.search_spaces.published import FIXTURES, cases, models, recipe_cases, rows

RELEASE = "0.19.2"
# Facts that a fixture does not give are this model's.
WHOLE = load_model("qwen3-30b-a3b")


def valid() -> Iterator[dict[str, Any]]:
    facts = models() | json.loads((FIXTURES / "kinds_models.json").read_text())
    kinds = (case | {"model": {"name": case["model"], **facts[case["model"]]}} for case in rows("kinds.jsonl"))
    for case in (*kinds, *cases("validation_cases.json"), *recipe_cases(as_paths=True)):
        if case["expected"] == "valid" and case["stack"]["mcore"] == RELEASE:
            yield case


def completed(case: Case) -> Case:
    model = {name: known(case.model, name, getattr(WHOLE, name)) for name in ModelShape.model_fields}
    training = {
        name: known(case.training, name, getattr(GPU_TRAINING, name)) for name in type(GPU_TRAINING).model_fields
    }
    shape = ModelShape.model_construct(**model)
    return replace(case, model=shape, training=GPU_TRAINING.model_copy(update=training))


def known(noun: object, name: str, otherwise: object) -> object:
    try:
        return getattr(noun, name)
    except UnknownFact:
        return otherwise


def test_what_is_called_valid_is_accepted_by_the_real_configuration() -> None:
    refused, asked = [], 0
    for raw in valid():
        case = read_case(raw, 1).case
        assert case is not None
        if case.dense or "cuda_graph_scope" in case.knobs:  # the oracle tells neither
            continue
        asked += 1
        if why := oracle_fusions.config_refusal(completed(case)):
            refused.append(f"{raw['id']}: {why}")
    assert asked > 400
    assert not refused
