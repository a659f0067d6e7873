"""What a configuration leaves out or says in other words: assumed facts, launchers, splits, versions, fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from search_spaces.explicit import ASSUMED, Explicit, read_case
from search_spaces.explicit_facts import dense_layers
from search_spaces.launcher_words import launchers_of, virtual_stages
from search_spaces.partial import PartialModel, UnknownFact
from search_spaces.pipeline_split import filled_split
from search_spaces.presets import load_model
from search_spaces.rules import STACK_RULES, rules_for
from search_spaces.rules.pipeline import layout_stages
from search_spaces.rules.versions import KNOWN, version_faults
from tests.search_spaces.published import STACK, models

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"


def read(**changes: Any) -> Explicit:
    raw = {"stack": STACK, "gpu_arch": "H100", "world_size": 8, "model": "qwen3_30b_a3b", "knobs": {}, **changes}
    explicit = read_case(raw, 1)
    assert explicit.case is not None, explicit.faults
    return explicit


def test_what_a_silent_configuration_is_taken_for() -> None:
    case = read().case
    assert case is not None
    assert dict(ASSUMED).items() <= dict(case.knobs).items()
    assert case.training.params_dtype == "bf16"
    assert case.cluster.gpu_arch == "H100 sm_90"
    assert case.stack is not None
    assert case.stack.deep_ep == case.stack.hybrid_ep == case.stack.apex == "assumed"
    with pytest.raises(UnknownFact):
        _ = case.training.global_batch_size


def test_the_documents_tell_what_is_assumed() -> None:
    told = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    said = {name: {True: "true"}.get(value, value) for name, value in ASSUMED.items()}
    assert all(f"| `{name}` | {value} |" in told for name, value in said.items())


def test_what_is_said_wins_over_what_is_assumed_and_knobs_over_the_model() -> None:
    case = read(knobs={"moe_grouped_gemm": False, "bf16": False, "num_layers": 24, "seq_length": 64}).case
    assert case is not None
    assert case.knobs["moe_grouped_gemm"] is False
    assert case.training.params_dtype == "fp32"
    assert case.model.num_layers == 24
    assert case.training.sequence_length == 64


def test_a_preset_and_its_facts_are_one_model() -> None:
    facts = load_model("qwen3-30b-a3b").model_dump()
    assert read().case == read(model=facts).case
    assert read(model="qwen3-30b-a3b").case == read().case


def test_a_model_without_experts_is_dense_and_one_that_is_not_given_is_unknown() -> None:
    dense = read(model={"num_layers": 4, "num_attention_heads": 8}).case
    assert dense is not None
    assert dense.dense
    assert dense.model.num_query_groups == 8
    assert "moe_grouped_gemm" not in dense.knobs
    unknown = read(model=None).case
    assert unknown is not None
    assert not unknown.dense
    with pytest.raises(UnknownFact):
        _ = unknown.model.num_layers


@pytest.mark.parametrize(
    ("frequency", "layers", "expected"),
    [
        ([0, 0, 1, 1], 4, 2), (2, 4, 2), (2, 5, 2), (3, 7, 4), (1, 4, None), ("([0]*3+[1]*58)", 61, 3),
        ("[0,1,1]", 3, 1), ("([1]*4)", 4, 0), ("([0]+[1]*2)*2", 6, 2), ("2", 4, 2),
        ("often", 4, None), (None, 4, None), (2, None, None),
    ],
)  # fmt: skip
def test_dense_layers_by_frequency(frequency: object, layers: object, expected: int | None) -> None:
    assert dense_layers(frequency, layers) == expected


@pytest.mark.parametrize(
    ("framework", "stack", "words", "bridge", "expected"),
    [
        ("megatron-core", ["bridge", "megatron_lm"], ["fake_process_group"], True, {"megatron-core"}),
        (None, [], [], False, set()),
        (None, ["mcore", "bridge"], [], False, {"megatron-bridge"}),
        (None, ["megatron-lm"], [], False, {"megatron-lm"}),
        (None, ["megatron_lm", "megatron-bridge"], [], False, {"megatron-lm", "megatron-bridge"}),
        (None, ["mcore"], [], True, {"megatron-bridge"}),
        (None, ["mcore", "bridge"], ["fp8_format"], False, {"megatron-lm"}),
        (None, ["mcore", "bridge"], ["num_experts"], False, {"megatron-bridge"}),
        (None, ["megatron_lm"], [], True, {"megatron-bridge", "megatron-lm"}),
    ],
)
def test_whose_rules_apply(
    framework: str | None, stack: list[str], words: list[str], bridge: bool, expected: set[str]
) -> None:
    assert launchers_of(framework, stack, words, bridge) == expected


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({PP: 4, "num_virtual_stages_per_pipeline_rank": 3}, 3),
        ({PP: 4, "num_layers_per_virtual_pipeline_stage": 6}, 2),
        ({PP: 4, "num_layers_per_virtual_pipeline_stage": 5}, None),  # PAR-13 says so
        ({PP: 1, "num_virtual_stages_per_pipeline_rank": 3}, None),
        ({PP: 4, VPP: 2, "num_virtual_stages_per_pipeline_rank": 3}, None),
        (
            {PP: 4, "num_virtual_stages_per_pipeline_rank": 3, "num_layers_per_virtual_pipeline_stage": 4},
            None,
        ),  # PAR-26
    ],
)
def test_virtual_stages_by_megatron_lms_flags(knobs: Mapping[str, int], expected: int | None) -> None:
    model = PartialModel.of({"num_layers": 48})
    assert virtual_stages(model, knobs).get(VPP) == expected


@pytest.mark.parametrize(("name", "layers"), [("deepseek_v3", 61), ("kimi_k2", 61), ("qwen3_235b_a22b", 94)])
@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 4])
def test_a_split_that_public_recipes_bring_is_legal(name: str, layers: int, stages: int, chunks: int | None) -> None:
    model = PartialModel.of({**models()[name]})
    assert model.num_layers == layers
    filled = filled_split(name, model, {PP: stages, VPP: chunks})
    if text := filled.get(LAYOUT):
        held = layout_stages(str(text))
        assert len(held) == stages * (chunks or 1)
        assert sum(stage.count("decoder") for stage in held) == layers
        assert (held[0][0], held[-1][-1]) == ("embedding", "loss")
        assert all(held)
    elif filled:
        assert (layers + len(filled)) % (stages * (chunks or 1)) == 0
    else:
        even = layers % (stages * (chunks or 1)) == 0
        assert even or stages * (chunks or 1) > layers + 2


def test_a_split_is_filled_in_only_where_it_is_not_said_and_the_model_is_known() -> None:
    model = PartialModel.of({"num_layers": 61})
    assert filled_split("deepseek_v3", model, {PP: 2})
    assert filled_split("DeepSeek-V3", model, {PP: 2})
    assert not filled_split("deepseek_v3", model, {PP: 2, "num_layers_in_first_pipeline_stage": 30})
    assert not filled_split("mine", model, {PP: 2})
    assert not filled_split("deepseek_v3", PartialModel.of({}), {PP: 2})
    assert not filled_split("deepseek_v3", model, {PP: 64})
    told = read(model={"name": "deepseek_v3", "num_layers": 61, "num_moe_experts": 256}, knobs={PP: 2})
    assert LAYOUT in told.effective
    assert any("deepseek_v3" in warning for warning in told.warnings)


@pytest.mark.parametrize("package", KNOWN)
def test_versions_known_newer_older_and_nonsense(package: str) -> None:
    oldest, newest, bounded = KNOWN[package]
    for release in (oldest, newest):
        assert version_faults({package: f"{release[0]}.{release[1]}.0"}) == ([], [])
    faults, warnings = version_faults({package: f"{newest[0]}.{newest[1] + 1}.0"})
    assert not faults
    assert "newer than the rules" in warnings[0]
    for nonsense in ("x", "", f"{newest[0] + 1}.0"):
        (name, message, hint), *_ = version_faults({package: nonsense})[0]
        assert name == package
        assert repr(nonsense) in message
        assert f"{newest[0]}.{newest[1]}" in hint
    old = f"{oldest[0]}.{oldest[1] - 1}" if oldest[1] else f"{oldest[0] - 1}.9"
    assert bool(version_faults({package: old})[0]) == bounded
    assert version_faults({package: None}) == ([], [])


@pytest.mark.parametrize(
    ("release", "knobs", "refused"),
    [
        ("0.17.0", {"moe_paged_stash": True}, "megatron-core 0.17 has no moe_paged_stash"),
        ("0.16.1", {"use_transformer_engine_op_fuser": True}, "0.16 has no use_transformer_engine_op_fuser"),
        ("0.15.0", {"offload_modules": ["core_attn"], "fine_grained_activation_offloading": True},
         "no fine_grained_activation_offloading, offload_modules"),
        ("0.18.0", {"moe_paged_stash": True, "cuda_graph_modules": ["attn"]}, ""),
        ("0.15.0", {"cuda_graph_modules": ["attn"], "moe_router_padding_for_quantization": True}, ""),
        ("0.15.0", {"moe_paged_stash": False, "moe_paged_stash_page_size": 64, "offload_modules": []}, ""),
    ],
)  # fmt: skip
def test_a_field_that_the_release_lacks(release: str, knobs: dict[str, Any], refused: str) -> None:
    explicit = read(stack={**STACK, "mcore": release}, knobs=knobs)
    assert explicit.case is not None
    rule = next(rule for rule in STACK_RULES if rule.id == "UNK-03")
    told = rule.refusal(explicit.case) or ""
    assert refused in told
    assert bool(told) == bool(refused)


def test_an_idle_field_that_the_release_lacks_is_a_warning() -> None:
    off = {"moe_paged_stash": False, "moe_paged_stash_page_size": 64}
    assert (
        "megatron-core 0.17 has no moe_paged_stash: leave it out"
        in read(stack={**STACK, "mcore": "0.17.0"}, knobs=off).warnings
    )
    assert not [word for word in read(stack={**STACK, "mcore": "0.18.0"}, knobs=off).warnings if "leave it out" in word]


@pytest.mark.parametrize("knobs", [{PP: 2, VPP: 2}, {PP: 4, VPP: 2, "overlap_p2p_comm": True}, {PP: 2, VPP: 12}])
def test_megatron_core_by_name_and_no_framework_are_one_thing(knobs: dict[str, Any]) -> None:
    plain = {name: version for name, version in STACK.items() if name != "bridge"}
    cases = [read(knobs=knobs, stack=plain).case, read(knobs=knobs, framework="megatron-core").case]
    told = [[(rule.id, rule.refusal(case)) for rule in rules_for(case.launchers, None)] for case in cases if case]
    named, silent = ([row for row in rows if row[1]] for rows in told)
    assert named == silent


def variables(framework: str | None = "megatron-lm", **changes: Any) -> Mapping[str, str]:
    case = read(framework=framework, **changes).case
    assert case is not None
    return case.env


def test_a_variable_that_is_null_is_said_to_be_unset() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert variables(env={name: None})[name] == "unset"
    assert variables(env={name: False})[name] == "unset"
    assert variables(env={name: 0})[name] == "0"
    assert variables(env={"ANYTHING": None, "NCCL_GRAPH_REGISTER": "0"}) == {"NCCL_GRAPH_REGISTER": "0"}
    recipe = {f"env_vars.{name}": 1}
    assert variables("megatron-bridge", env={name: None}, knobs=recipe)[name] == "1", "the recipe sets it"
    assert variables("megatron-bridge", env={name: "8"}, knobs=recipe)[name] == "8", "the job's wins"


def test_an_empty_environment_says_so_where_the_launcher_brings_none() -> None:
    assert variables(env={})["CUDA_DEVICE_MAX_CONNECTIONS"] == "unset"
    assert variables() == {}, "not said"
    assert variables("megatron-bridge", env={}) == {}, "a recipe brings its own"
    assert variables(None, env={}) == {}


def test_sequence_parallel_without_tp_is_dropped_under_a_launcher_that_only_the_stack_lists() -> None:
    knobs = {"sequence_parallel": True}
    assert read(knobs=knobs).effective["sequence_parallel"] is False
    assert "sequence_parallel" not in read(knobs=knobs, framework="megatron-core").effective
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}
    assert read(knobs=tp2).effective["expert_tensor_parallel_size"] == 2, "Megatron-Core's reading"


def test_bf16_is_not_assumed_beside_fp16() -> None:
    case = read(knobs={"fp16": True}).case
    assert case is not None
    assert case.knobs["bf16"] is False
    assert not [rule.id for rule in rules_for(case.launchers, None) if rule.id == "PRC-01" and rule.refusal(case)]
    assert case.training.params_dtype == "bf16", "two bytes either way"


@pytest.mark.parametrize(
    ("frequency", "words"),
    [
        ([0, 1], "lists 2 layers, the model has 48"), ("([0]*3+[1]*58)", "lists 61 layers"), ("banana", "no list"),
        (-3, "no number of layers"), (0, "no number of layers"), ([], "no list"), ([0, 2] * 24, "no list"),
        ("[1]*999999999", "no list"), ({"a": 1}, "no list"), (1.5, "no list"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["model", "knobs"])
def test_a_pattern_of_layers_that_fits_no_model(frequency: object, words: str, place: str) -> None:
    facts = load_model("qwen3-30b-a3b").model_dump()
    raw: dict[str, Any] = {"world_size": 8, "model": facts, "knobs": {}}
    raw[place] = {**raw[place], "moe_layer_freq": frequency}
    faults = read_case(raw, 1).faults
    assert len(faults) == 1, faults
    assert words in faults[0].message or "moe_layer_freq is a" in faults[0].message


@pytest.mark.parametrize("frequency", [1, 2, 49, [0] * 3 + [1] * 45, "([0]*3+[1]*45)", "([0]+[1]*2)*16", "1", None])
def test_a_pattern_of_layers_that_fits(frequency: object) -> None:
    read(model={**load_model("qwen3-30b-a3b").model_dump(), "moe_layer_freq": frequency})
