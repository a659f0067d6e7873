"""Our reading of a pipeline layout against Megatron's own."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_spaces.rules import Case
from search_spaces.rules.pipeline import RULES, layout_stages, virtual_stages
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.oracle import REFUSALS, config_refusal, load_megatron

LAYOUT = next(rule for rule in RULES if rule.id == "PAR-16")


def theirs(text: str) -> list[list[str]] | None:
    load_megatron()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        return [[kind.name for kind in stage] for stage in PipelineParallelLayerLayout.parse_str_to_list(text)]
    except REFUSALS:
        return None


def ours(text: str) -> list[list[str]] | None:
    try:
        return [list(stage) for stage in layout_stages(text)]
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("text", "stages", "layers"),
    [("Et*3|(tt|)*29m|L", 32, 61), ("Et*4|(t*4|)*14tmL", 16, 61), ("Et,t|tt|tL", 3, 5), ("Ettt|(t|)*3tL", 5, 7)],
)
def test_published_layouts_have_their_layers(text: str, stages: int, layers: int) -> None:
    read = layout_stages(text)
    assert len(read) == stages
    assert sum(stage.count("decoder") for stage in read) == layers


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="EtmL|()*,23x", max_size=14))
@example("E(tt|)*2(m|)*2L")
@example("Et*2*2|L")
def test_we_read_what_megatron_reads(text: str) -> None:
    if not text.startswith("["):
        assert ours(text) == theirs(text)


PARTS = st.sampled_from(("Et", "E", "t", "tt", "t*2", "tm", "m", "mL", "L", "tL", "mt"))


def laid_out(text: str, mtp: int | None) -> Case:
    return case(gpus(2), pp=2, pipeline_model_parallel_layout=text, mtp_num_layers=mtp)


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=6), st.sampled_from((None, 0, 1, 2)))
@example(["Et", "t", "tt", "L"], None)
@example(["Et", "t", "tt", "mL"], 1)
@example(["Et", "tt", "t", "m", "t", "L"], 1)
def test_we_refuse_what_the_real_configuration_refuses(parts: list[str], mtp: int | None) -> None:
    made = laid_out("|".join(parts), mtp)
    assert (LAYOUT.refusal(made) is None) == (config_refusal(made) is None), config_refusal(made)


def test_a_layout_says_how_many_virtual_stages_there_are() -> None:
    assert virtual_stages(laid_out("Et|t|t|tL", None)) == 2
    assert virtual_stages(laid_out("Ett|ttL", None)) is None
    assert virtual_stages(case(gpus(2), pp=2, vpp=4)) == 4


def test_a_nested_layout_is_read_as_well() -> None:
    text = '[["embedding", "decoder"], ["decoder", "decoder"], ["Decoder"], ["loss"]]'
    made = laid_out(text, None)
    assert LAYOUT.refusal(made) is None
    assert config_refusal(made) is None
    assert LAYOUT.refusal(laid_out(text.replace("loss", "encoder"), None))
    assert LAYOUT.refusal(laid_out('["embedding", "loss"]', None))
    assert LAYOUT.refusal(laid_out("[[", None))


def test_a_layout_that_repeats_without_bound_is_refused_not_unrolled() -> None:
    assert "repeats" in str(LAYOUT.refusal(laid_out("Et*999999999|L", None)))
