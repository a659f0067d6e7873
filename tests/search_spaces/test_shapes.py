"""Facts of a model that contradict each other are refused when they are read."""

import pytest
from pydantic import ValidationError

from search_spaces.explicit_knobs import megatron_fields
from search_spaces.presets import load_model, model_names
from search_spaces.shapes import UNTRAINED, ModelShape

DEEPSEEK = load_model("deepseek-v3").model_dump()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_query_groups": 64}, "latent attention has no query groups"),
        ({"num_query_groups": 24}, "not divisible by num_query_groups 24"),
        ({"moe_router_topk": 300}, "moe_router_topk 300 exceeds num_moe_experts 256"),
        ({"first_dense_layers": 61}, "leaves no MoE layer"),
    ],
)
def test_contradictions_are_refused(changed: dict[str, int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ModelShape.model_validate(DEEPSEEK | changed)


def test_query_groups_are_for_attention_that_is_not_latent() -> None:
    plain = {"multi_latent_attention": False, "num_query_groups": 64}
    assert ModelShape.model_validate(DEEPSEEK | plain).num_query_groups == 64
    assert {load_model(name).multi_latent_attention for name in model_names()} == {False, True}


def test_facts_that_are_told_and_not_trained_reach_no_megatron_config() -> None:
    """The worker hands on every fact that has a field of its name; these are counted in FLOPs only."""
    assert ModelShape.model_fields.keys() >= UNTRAINED
    assert not UNTRAINED & megatron_fields().keys()
