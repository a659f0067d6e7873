"""A published config.json gives the same facts as the preset made from it; a bad one lists all that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InputError
from search_spaces.hf_config import model_from_hf, read_hf_config
from search_spaces.presets import load_model

COMMON = {"tie_word_embeddings": False, "hidden_act": "silu"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": COMMON | {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "attention_bias": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "mixtral-8x7b": COMMON | {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-05,
    },
    "olmoe-1b-7b": COMMON | {
        "model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "vocab_size": 50304, "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05,
        "attention_bias": False,
    },
    "gpt-oss-20b": COMMON | {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072, "rope_theta": 150000,
        "rms_norm_eps": 1e-05, "attention_bias": True, "sliding_window": 128,
    },
    "deepseek-v3": COMMON | {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "vocab_size": 129280, "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-06,
        "num_nextn_predict_layers": 1, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    },
    "moonlight-16b-a3b": COMMON | {
        "model_type": "deepseek_v3", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "vocab_size": 163840, "max_position_embeddings": 8192, "rope_theta": 50000.0, "rms_norm_eps": 1e-05,
        "num_nextn_predict_layers": 0,
    },
}  # fmt: skip


def messages(error: pytest.ExceptionInfo[InputError]) -> str:
    return "\n".join(str(fault) for fault in error.value.faults)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_facts_are_those_of_the_preset(name: str) -> None:
    found = model_from_hf(CONFIGS[name], "config.json")
    assert found.model_copy(update={"name": name}) == load_model(name)


@pytest.mark.parametrize(
    ("kinds", "window"), [(["sliding", "full"] * 12, 128), (["full"] * 24, None), (["sliding", "full", "full"], None)]
)
def test_a_window_is_told_where_every_second_layer_has_it(kinds: list[str], window: int | None) -> None:
    found = model_from_hf(CONFIGS["gpt-oss-20b"] | {"layer_types": kinds}, "config.json")
    assert found.attention_window == window


def test_the_rotary_base_is_found_where_transformers_5_puts_it() -> None:
    config = dict(CONFIGS["mixtral-8x7b"])
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    assert model_from_hf(config, "config.json").rotary_base == 1_000_000


@pytest.mark.parametrize("name", CONFIGS)
def test_every_missing_key_is_listed_at_once(name: str) -> None:
    with pytest.raises(InputError) as caught:
        model_from_hf({"model_type": CONFIGS[name]["model_type"]}, "some/config.json")
    text = messages(caught)
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "rope_theta", "num_experts_per_tok"):
        assert f"some/config.json: key '{key}' is missing" in text


def test_what_the_shape_cannot_say_is_refused() -> None:
    config = CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [0, 3], "hidden_size": "2048", "rms_norm_eps": True}
    with pytest.raises(InputError) as caught:
        model_from_hf(config, "config.json")
    text = messages(caught)
    assert "mlp_only_layers" in text
    assert "'2048', not a whole number" in text
    assert "True, not a number" in text


def test_facts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="moe_router_topk 9 exceeds num_moe_experts 8"):
        model_from_hf(CONFIGS["mixtral-8x7b"] | {"num_experts_per_tok": 9}, "config.json")


def test_another_model_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean qwen3_moe"):
        model_from_hf({"model_type": "qwen2_moe"}, "config.json")
    with pytest.raises(InputError, match="model_type None"):
        model_from_hf({}, "config.json")


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b'{"model_type": "mixtral",\n "hidden_size": }', ":2:17: Expecting value"),
        (b"\xff\xfe\x00binary", "not a JSON text"),
        (b"[" * 100_000, "not a JSON text"),
        (b"[1, 2]", "not a JSON object"),
        (b"", ":1:1: Expecting value"),
        (b" " * (1 << 21), "larger than"),
    ],
    ids=["syntax", "binary", "deep", "list", "empty", "large"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, raw: bytes, place: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_hf_config(file)
    assert place in messages(caught)
    assert str(file) in messages(caught)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="cannot read it"):
            read_hf_config(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["deepseek-v3"] | {"_name_or_path": "deepseek-ai/DeepSeek-V3"}))
    assert read_hf_config(file).name == "DeepSeek-V3"
