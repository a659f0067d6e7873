"""Parameters per rank, equal to the parameter with the real GPTModel."""

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.memory.chunks import Chunk, Stages, stages_of
from search_spaces.memory.parameters import stage_parameters
from search_spaces.memory.shape import Decoder, FactError, Grid, decoder_of, grid_of
from search_spaces.presets import load_model
from tests.search_spaces.cases import SHORT
from tests.search_spaces.meta_models import counted, job_of, rank_of

Row = tuple[str, int, dict[str, KnobValue]]
DEEPSEEK = "Et*3|(tt|)*29m|L".replace("m", "")
# Model, world, knobs. Expert counts and pipelines are large so that a rank is small: building takes time by modules.
LAYOUTS: tuple[Row, ...] = (
    ("qwen3-30b-a3b", 8, {"ep": 8}),
    ("qwen3-30b-a3b", 64, {"tp": 2, "pp": 4, "ep": 8, "etp": 1}),
    ("qwen3-30b-a3b", 64, {"tp": 2, "pp": 4, "ep": 4}),
    ("qwen3-30b-a3b", 64, {"pp": 4, "vpp": 3, "ep": 16, "p2p": True}),
    ("qwen3-30b-a3b", 64, {"tp": 8, "ep": 32, "etp": 1}),
    ("qwen3-30b-a3b", 128, {"tp": 4, "pp": 2, "ep": 32, "etp": 2}),
    ("qwen3-30b-a3b", 64, {"pp": 8, "ep": 8, "vpp": 6, "p2p": True}),
    ("qwen3-30b-a3b", 32, {"pp": 4, "ep": 8, "num_layers_in_first_pipeline_stage": 9,
                           "num_layers_in_last_pipeline_stage": 11}),
    ("qwen3-30b-a3b", 1024, {"tp": 2, "pp": 4, "ep": 128, "etp": 1}),
    ("qwen3-235b-a22b", 256, {"tp": 2, "pp": 2, "ep": 64, "etp": 1}),
    ("qwen3-235b-a22b", 512, {"pp": 8, "ep": 64, "account_for_embedding_in_pipeline_split": True,
                              "account_for_loss_in_pipeline_split": True}),
    ("qwen3-235b-a22b", 256, {"tp": 4, "pp": 8, "vpp": 4, "ep": 32, "etp": 1, "p2p": True,
                              "account_for_embedding_in_pipeline_split": True,
                              "account_for_loss_in_pipeline_split": True}),
    ("qwen3-235b-a22b", 512, {"tp": 8, "pp": 2, "ep": 32, "etp": 1}),
    ("qwen3-235b-a22b", 256, {"tp": 2, "pp": 4, "ep": 64, "etp": 1, "num_layers_in_first_pipeline_stage": 22,
                              "num_layers_in_last_pipeline_stage": 22}),
    ("qwen3-235b-a22b", 512, {"tp": 16, "pp": 2, "ep": 16, "etp": 1}),
    ("deepseek-v3", 1024, {"tp": 2, "pp": 16, "vpp": 2, "ep": 32, "etp": 1, "p2p": True,
                           "pipeline_model_parallel_layout": DEEPSEEK}),
    ("deepseek-v3", 256, {"ep": 256}),
    ("deepseek-v3", 512, {"pp": 8, "ep": 64, "num_layers_in_first_pipeline_stage": 7,
                          "num_layers_in_last_pipeline_stage": 6}),
    ("deepseek-v3", 1024, {"tp": 8, "pp": 4, "ep": 128, "etp": 1, "num_layers_in_first_pipeline_stage": 16,
                           "num_layers_in_last_pipeline_stage": 15}),
    ("deepseek-v3", 512, {"tp": 4, "pp": 2, "ep": 128, "etp": 2, "num_layers_in_first_pipeline_stage": 30}),
    ("deepseek-v3", 256, {"pp": 4, "ep": 64, "pipeline_model_parallel_layout": "Et*16|t*16|t*15|t*14L"}),
    ("mixtral-8x7b", 8, {"ep": 8}),
    ("mixtral-8x7b", 8, {"tp": 2, "ep": 4, "etp": 1}),
    ("mixtral-8x7b", 16, {"tp": 4, "pp": 2, "ep": 2, "etp": 4}),
    ("mixtral-8x7b", 32, {"tp": 8, "pp": 4, "vpp": 8, "ep": 8, "etp": 1, "p2p": True}),
    ("mixtral-8x7b", 64, {"tp": 4, "pp": 4, "ep": 8, "etp": 2}),
    ("mixtral-8x7b", 32, {"tp": 16, "ep": 1, "etp": 8}),
    ("gpt-oss-20b", 8, {"ep": 8}),
    ("gpt-oss-20b", 8, {"tp": 2, "ep": 8, "etp": 1}),
    ("gpt-oss-20b", 16, {"tp": 4, "pp": 4, "ep": 4, "etp": 1}),
    ("gpt-oss-20b", 32, {"tp": 8, "pp": 2, "vpp": 3, "ep": 8, "etp": 2, "p2p": True}),
    ("gpt-oss-20b", 16, {"pp": 2, "ep": 8, "num_layers_in_first_pipeline_stage": 13}),
    ("olmoe-1b-7b", 8, {"ep": 8}),
    ("olmoe-1b-7b", 16, {"tp": 2, "pp": 2, "ep": 4, "etp": 2}),
    ("olmoe-1b-7b", 32, {"tp": 4, "pp": 4, "vpp": 2, "ep": 8, "etp": 1, "p2p": True}),
    ("olmoe-1b-7b", 64, {"tp": 16, "ep": 64, "etp": 1}),
    ("moonlight-16b-a3b", 8, {"ep": 8}),
    ("moonlight-16b-a3b", 16, {"tp": 2, "ep": 16, "etp": 1}),
    ("moonlight-16b-a3b", 32, {"tp": 4, "pp": 2, "ep": 16, "etp": 1, "num_layers_in_first_pipeline_stage": 14}),
    ("moonlight-16b-a3b", 64, {"pp": 4, "ep": 16, "num_layers_in_first_pipeline_stage": 6,
                               "num_layers_in_last_pipeline_stage": 7}),
    ("moonlight-16b-a3b", 24, {"tp": 2, "pp": 3, "ep": 4, "etp": 1}),
    ("moonlight-16b-a3b", 16, {"pp": 2, "ep": 8, "pipeline_model_parallel_layout": "Et*14|t*13L"}),
)  # fmt: skip


def planned(row: Row) -> tuple[Decoder, Grid, Stages]:
    model, world, knobs = row
    job = job_of(model, world, **knobs)
    decoder = decoder_of(job.model, job.candidate.knobs)
    grid = grid_of(job.candidate.knobs, job.world_size, local=True)
    return decoder, grid, stages_of(decoder, grid, job.candidate.knobs)


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row[0]}-{row[1]}-" + "-".join(
    f"{name}{value}" for name, value in row[2].items()))  # fmt: skip
def test_every_rank_that_differs_has_as_many_parameters_as_the_real_model(row: Row) -> None:
    model, world, knobs = row
    job = job_of(model, world, **knobs)
    decoder, grid, stages = planned(row)
    seen: dict[tuple[Chunk, ...], int] = {}
    for stage, chunks in enumerate(stages):
        rank = stage * (world // grid.pipeline)  # the first of its stage: pipeline ranks are the outermost
        if chunks not in seen:
            seen[chunks] = rank
            found = stage_parameters(decoder, grid, chunks)
            assert (found.dense, found.experts) == counted(job, rank)
    assert len(stages) == grid.pipeline


@pytest.mark.parametrize("row", [row for row in LAYOUTS if "pp" in row[2]][::2], ids=str)
def test_every_stage_has_as_many_layers_as_megatron_builds(row: Row) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    model, world, knobs = row
    job = job_of(model, world, **knobs)
    _, grid, stages = planned(row)
    for stage in {0, grid.pipeline // 2, grid.pipeline - 1}:
        with rank_of(job, stage * (world // grid.pipeline)) as configs:
            virtual = job.candidate.layout.virtual_pipeline
            built = [
                get_num_layers_to_build(configs.transformer, vp_stage=index if virtual else None)
                for index in range(virtual or 1)
            ]
        assert built == [chunk.layers for chunk in stages[stage]]


@pytest.mark.parametrize(
    ("facts", "knobs"),
    [
        ({"untie_embeddings_and_output_weights": False}, {"ep": 2}),
        ({"untie_embeddings_and_output_weights": False}, {"pp": 2}),
        ({"moe_shared_expert_intermediate_size": 128, "qk_layernorm": True, "add_qkv_bias": True}, {"tp": 2}),
        ({"first_dense_layers": 3}, {"pp": 2}),
        ({"moe_shared_expert_intermediate_size": 128}, {"tp": 2, "moe_shared_expert_gate": True}),
    ],
    ids=str,
)
def test_variants_of_the_tiny_model(facts: dict[str, object], knobs: dict[str, KnobValue]) -> None:
    job = job_of("tiny-moe", 2, facts, **knobs)
    decoder = decoder_of(job.model, job.candidate.knobs)
    grid = grid_of(job.candidate.knobs, 2, local=True)
    for stage, chunks in enumerate(stages_of(decoder, grid, job.candidate.knobs)):
        found = stage_parameters(decoder, grid, chunks)
        assert (found.dense, found.experts) == counted(job, stage * 2 // grid.pipeline)


def test_published_totals() -> None:
    grid = grid_of({}, 1)
    for name, total in (("qwen3-30b-a3b", 30_532_122_624), ("mixtral-8x7b", 46_702_792_704),
                        ("qwen3-235b-a22b", 235_093_634_560), ("deepseek-v3", 671_026_404_352)):  # fmt: skip
        decoder = decoder_of(load_model(name), {})
        (chunks,) = stages_of(decoder, grid, {})
        assert stage_parameters(decoder, grid, chunks).total == total


def test_transformer_engine_keeps_the_down_projections_of_latent_attention_whole() -> None:
    decoder = decoder_of(load_model("deepseek-v3"), {})
    whole, split = (
        stage_parameters(decoder, grid, (Chunk(0, 1, False, False),)).attention
        for grid in (grid_of({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2, local)
                     for local in (False, True))
    )  # fmt: skip
    assert whole - split == (1536 + 576) * 7168 // 2


@pytest.mark.parametrize(
    ("facts", "knobs", "field"),
    [
        ({"num_layers": 0}, {}, "num_layers"),
        ({"hidden_size": -8}, {}, "hidden_size"),
        ({"num_attention_heads": 5}, {}, "num_attention_heads"),
        ({"num_moe_experts": 0}, {}, "num_moe_experts"),
        ({"moe_router_topk": 9}, {}, "moe_router_topk"),
        ({"multi_latent_attention": True}, {}, "kv_lora_rank"),
        ({}, {"pp": 3}, "world_size"),
        ({}, {"pp": 2, "num_layers_in_first_pipeline_stage": 9}, "pipeline_model_parallel_size"),
        ({}, {"pp": 2, "vpp": 3}, "virtual_pipeline_model_parallel_size"),
        ({}, {"pp": 2, "pipeline_model_parallel_layout": "Et|tL"}, "pipeline_model_parallel_layout"),
        ({}, {"pp": 2, "pipeline_model_parallel_layout": "Ex|tL"}, "pipeline_model_parallel_layout"),
        ({}, {"tp": 0}, "tensor_model_parallel_size"),
    ],
)
def test_nonsense_is_an_error_that_names_the_field(
    facts: dict[str, object], knobs: dict[str, KnobValue], field: str
) -> None:
    model = load_model("tiny-moe").model_copy(update=facts)
    named = {SHORT.get(name, name): value for name, value in knobs.items()}
    with pytest.raises(FactError) as caught:
        stages_of(decoder_of(model, named), grid_of(named, 2), named)
    assert caught.value.field == field
