"""A model's facts out of a Hugging Face `config.json`. Read as JSON, never executed: `auto_map` code is not touched.

Field by field after the transformers 4.57 configuration classes. To add a model type: one row in `_TYPES`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from search_spaces.errors import Fault, InputError
from search_spaces.shapes import ModelShape
from search_spaces.space import nearest

Fact = int | float | bool | str | None
_MAX_BYTES = 1 << 20  # published ones have 1 to 70 KiB


class _Reader:
    """Looks facts up and collects every fault instead of stopping at the first."""

    def __init__(self, config: Mapping[str, object], file: str) -> None:
        self._config, self._file = config, file
        self.faults: list[Fault] = []

    def fault(self, message: str, hint: str = "") -> None:
        self.faults.append(Fault(message, self._file, hint=hint))

    def integer(self, key: str) -> int:
        """A count; 1 stands in for a fault, so that the reading goes on."""
        value = self._config.get(key)
        if type(value) is int and value >= 0:
            return value
        self.fault(f"key {key!r} is missing" if value is None else f"key {key!r} is {value!r}, not a whole number")
        return 1

    def number(self, key: str) -> float:
        value = self._config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self.fault(f"key {key!r} is missing" if value is None else f"key {key!r} is {value!r}, not a number")
        return 1.0

    def switch(self, key: str, default: bool | None = None) -> bool:
        value = self._config.get(key, default)
        if isinstance(value, bool):
            return value
        self.fault(f"key {key!r} is missing" if value is None else f"key {key!r} is {value!r}, not true or false")
        return False

    def word(self, key: str) -> str:
        value = self._config.get(key)
        if isinstance(value, str):
            return value
        self.fault(f"key {key!r} is missing" if value is None else f"key {key!r} is {value!r}, not a word")
        return ""

    def optional(self, key: str) -> int | None:
        """A count that the file may leave out or set to null."""
        return None if self._config.get(key) is None else self.integer(key)

    def every_second_window(self) -> int | None:
        """The window of attention, where every second layer has one; an absent `layer_types` is that."""
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list) and (kinds[:1] == kinds[1:2] or kinds[:2] * (len(kinds) // 2) != kinds):
            return None
        return self.optional("sliding_window")

    def rotary_base(self) -> int:
        """`rope_theta`, which transformers 5 moved into `rope_parameters`."""
        nested = self._config.get("rope_parameters")
        if "rope_theta" not in self._config and isinstance(nested, dict):
            return int(_Reader(nested, self._file).number("rope_theta"))
        return int(self.number("rope_theta"))

    def expect(self, key: str, values: tuple[object, ...], why: str) -> None:
        """Refuse what ModelShape cannot say. An absent key is at its default, the first of `values`."""
        found = self._config.get(key, values[0])
        if found not in values:
            self.fault(f"key {key!r} is {found!r}: {why}", f"supported: {', '.join(map(repr, values))}")


def _common(read: _Reader) -> dict[str, Fact]:
    return {
        "num_layers": read.integer("num_hidden_layers"),
        "hidden_size": read.integer("hidden_size"),
        "num_attention_heads": read.integer("num_attention_heads"),
        "num_query_groups": read.integer("num_key_value_heads"),
        "vocab_size": read.integer("vocab_size"),
        "max_position_embeddings": read.integer("max_position_embeddings"),
        "moe_router_topk": read.integer("num_experts_per_tok"),
        "ffn_hidden_size": read.integer("intermediate_size"),
        "rotary_base": read.rotary_base(),
        "layernorm_epsilon": read.number("rms_norm_eps"),
        "untie_embeddings_and_output_weights": not read.switch("tie_word_embeddings"),
    }


def _head_width(read: _Reader) -> int:
    return read.optional("head_dim") or read.integer("hidden_size") // max(read.integer("num_attention_heads"), 1)


def _qwen3_moe(read: _Reader) -> dict[str, Fact]:
    read.expect("decoder_sparse_step", (1,), "dense layers between MoE layers")
    read.expect("mlp_only_layers", ([], None), "dense layers between MoE layers")
    return _common(read) | {
        "kv_channels": read.integer("head_dim"),
        "num_moe_experts": read.integer("num_experts"),
        "moe_ffn_hidden_size": read.integer("moe_intermediate_size"),
        "qk_layernorm": True,
        "add_qkv_bias": read.switch("attention_bias", default=False),
    }


def _mixtral(read: _Reader) -> dict[str, Fact]:
    return _common(read) | {
        "kv_channels": _head_width(read),
        "num_moe_experts": read.integer("num_local_experts"),
        "moe_ffn_hidden_size": read.integer("intermediate_size"),
    }


def _olmoe(read: _Reader) -> dict[str, Fact]:
    return _common(read) | {
        "kv_channels": _head_width(read),
        "num_moe_experts": read.integer("num_experts"),
        "moe_ffn_hidden_size": read.integer("intermediate_size"),
        "qk_layernorm": True,
        "add_qkv_bias": read.switch("attention_bias", default=False),
    }


def _gpt_oss(read: _Reader) -> dict[str, Fact]:
    return _common(read) | {
        "kv_channels": read.integer("head_dim"),
        "num_moe_experts": read.integer("num_local_experts"),
        "moe_ffn_hidden_size": read.integer("intermediate_size"),
        "add_qkv_bias": read.switch("attention_bias"),
        "attention_window": read.every_second_window(),
    }


def _deepseek_v3(read: _Reader) -> dict[str, Fact]:
    read.expect("moe_layer_freq", (1,), "dense layers between MoE layers")
    read.expect("scoring_func", ("sigmoid", "softmax"), "no such router score in Megatron-Core")
    width, shared = read.integer("moe_intermediate_size"), read.optional("n_shared_experts") or 0
    return _common(read) | {
        "num_query_groups": read.integer("num_attention_heads"),
        "kv_channels": read.integer("v_head_dim"),
        "num_moe_experts": read.integer("n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "first_dense_layers": read.integer("first_k_dense_replace"),
        "moe_shared_expert_intermediate_size": width * shared or None,
        "moe_router_score_function": read.word("scoring_func"),
        "moe_router_enable_expert_bias": read.word("topk_method") == "noaux_tc",
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": read.optional("q_lora_rank"),
        "kv_lora_rank": read.integer("kv_lora_rank"),
        "qk_head_dim": read.integer("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": read.integer("qk_rope_head_dim"),
        "v_head_dim": read.integer("v_head_dim"),
        "predicted_ahead": read.optional("num_nextn_predict_layers") or None,
    }


_TYPES: dict[str, Callable[[_Reader], dict[str, Fact]]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}


def model_from_hf(config: Mapping[str, object], file: str) -> ModelShape:
    """The facts of a `config.json` already parsed. Raises InputError with every missing or unusable key of `file`."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        hint = nearest(str(kind), list(_TYPES))
        raise InputError([Fault(f"model_type {kind!r} is not supported", file, hint=hint)], "give model.facts instead")
    read = _Reader(config, file)
    facts = _TYPES[kind](read)
    if read.faults:
        raise InputError(list(dict.fromkeys(read.faults)), "use the config.json published with the model")
    try:
        return ModelShape.model_validate({"name": _name(config, kind), **facts})
    except ValidationError as error:
        faults = [Fault(f"{'.'.join(map(str, e['loc'])) or kind}: {e['msg']}", file) for e in error.errors()]
        raise InputError(faults, "use the config.json published with the model") from error


def _name(config: Mapping[str, object], kind: str) -> str:
    path = config.get("_name_or_path")
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) and path.strip("/") else kind


def read_hf_config(path: Path) -> ModelShape:
    """The facts of the `config.json` at `path`. Raises InputError where it cannot be read or understood."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise InputError([Fault(f"larger than {_MAX_BYTES} bytes", str(path))], "give a model's config.json")
        config = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise InputError(
            [Fault(f"cannot read it: {(error.strerror or '').lower()}", str(path))], "check model.hf_config"
        ) from error
    except json.JSONDecodeError as error:
        raise InputError(
            [Fault(error.msg, str(path), error.lineno, error.colno)], "give a model's config.json"
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise InputError([Fault("not a JSON text", str(path))], "give a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError([Fault("not a JSON object", str(path), 1, 1)], "give a model's config.json")
    return model_from_hf(config, str(path))
