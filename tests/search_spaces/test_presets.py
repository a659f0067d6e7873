"""Presets hold true facts: an analytic parameter count meets the published totals."""

import pytest

from search_spaces.errors import InputError
from search_spaces.presets import GPUS, gpu_named, load_gpu, load_model, model_names
from search_spaces.rules import compute_capability
from search_spaces.shapes import ModelShape


def attention_parameters(m: ModelShape) -> int:
    if not m.multi_latent_attention:
        qkv = (m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
        norms = 2 * m.kv_channels if m.qk_layernorm else 0
        bias = qkv if m.add_qkv_bias else 0
        return m.hidden_size * qkv + bias + norms + m.num_attention_heads * m.kv_channels * m.hidden_size
    kv_rank, head, rotary, value = m.kv_lora_rank, m.qk_head_dim, m.qk_pos_emb_head_dim, m.v_head_dim
    assert None not in (kv_rank, head, rotary, value)
    query = m.num_attention_heads * (head + rotary)
    queries = m.hidden_size * query
    if m.q_lora_rank:
        queries = m.hidden_size * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * query
    keys = m.hidden_size * (kv_rank + rotary) + kv_rank + kv_rank * m.num_attention_heads * (head + value)
    return queries + keys + m.num_attention_heads * value * m.hidden_size


def parameters(m: ModelShape) -> int:
    """All trained weights: gated MLPs, RMSNorm, no biases but those of queries, keys and values."""
    expert = 3 * m.hidden_size * m.moe_ffn_hidden_size
    shared = 3 * m.hidden_size * (m.moe_shared_expert_intermediate_size or 0)
    moe = m.hidden_size * m.num_moe_experts + expert * m.num_moe_experts + shared
    dense = 3 * m.hidden_size * m.ffn_hidden_size
    layers = m.num_layers * (attention_parameters(m) + 2 * m.hidden_size)
    layers += (m.num_layers - m.first_dense_layers) * moe + m.first_dense_layers * dense
    tables = 2 if m.untie_embeddings_and_output_weights else 1
    return layers + m.hidden_size + tables * m.hidden_size * m.vocab_size


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("qwen3-30b-a3b", 30_532_122_624),  # counted on the real GPTModel
        ("deepseek-v3", 671_026_404_352),  # counted on the real GPTModel, without expert biases
        ("qwen3-235b-a22b", 235_093_634_560),
        ("mixtral-8x7b", 46_702_792_704),
        ("olmoe-1b-7b", 6_919_161_856 - 61_440),  # its query and key norms are wider: see the preset
    ],
)
def test_exact_totals(name: str, total: int) -> None:
    assert parameters(load_model(name)) == total


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 20.9), ("moonlight-16b-a3b", 16.0)])
def test_published_roundings(name: str, billions: float) -> None:
    assert round(parameters(load_model(name)) / 1e9, 1) == billions


def test_the_cut_model_differs_in_layers_only() -> None:
    whole, cut = load_model("qwen3-30b-a3b"), load_model("qwen3-30b-a3b-4l")
    assert cut == whole.model_copy(update={"name": "qwen3-30b-a3b-4l", "num_layers": 4})


@pytest.mark.parametrize("name", model_names())
def test_every_preset_loads_under_its_own_name(name: str) -> None:
    assert load_model(name).name == name


def test_an_unknown_model_names_the_nearest_and_the_known() -> None:
    with pytest.raises(InputError) as caught:
        load_model("mixtral-8x7")
    assert caught.value.faults[0].hint == "did you mean mixtral-8x7b?"
    assert all(name in caught.value.next_step for name in model_names())
    with pytest.raises(InputError):
        load_model("../presets/tiny-moe")


def test_gpus_have_a_capability_and_a_name() -> None:
    for name, gpu in GPUS.items():
        assert compute_capability(gpu.gpu_arch), name
        assert load_gpu(name.lower()) is gpu
    with pytest.raises(InputError, match="did you mean H"):
        load_gpu("h2000")


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("h100", "H100 sm_90"),
        ("NVIDIA H100 80GB HBM3", "H100 sm_90"),
        ("H100-SXM5-80GB", "H100 sm_90"),
        ("H100 sm_90a", "H100 sm_90"),
        ("NVIDIA GH200 480GB", "GH200 sm_90"),
        ("NVIDIA GB200 NVL72", "GB200 sm_100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000 sm_120"),
        ("NVIDIA GeForce RTX 4090", "RTX4090 sm_89"),
        ("VR200 sm_100", "VR200 sm_100"),  # not listed: its architecture says enough
        *((gpu.gpu_arch, gpu.gpu_arch) for gpu in GPUS.values()),
    ],
)
def test_a_gpu_by_the_words_of_people(text: str, arch: str) -> None:
    assert gpu_named(text).gpu_arch == arch


@pytest.mark.parametrize("text", ["H1000", "B2000", "A1000", "L40", "", "H100 sm_95", "sm_"])
def test_a_gpu_that_only_looks_like_a_known_one(text: str) -> None:
    with pytest.raises(InputError, match=r"no GPU .*known: "):
        gpu_named(text)


@pytest.mark.parametrize("text", ["H100 sm_100", "NVIDIA B200 sm_90a", "A100 sm_90"])
def test_a_listed_gpu_has_one_architecture(text: str) -> None:
    with pytest.raises(InputError, match=r"(H100|B200|A100) is sm_\d+, not sm_\d+ "):
        gpu_named(text)
