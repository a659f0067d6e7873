"""Words of an explicit configuration: which knobs exist, of what kind, and how their values are told to the rules."""

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from search_spaces.candidate import MODULE_SEPARATOR, KnobValue
from search_spaces.named_spaces import NAMED_SPACES
from search_spaces.rules import ALL_RULES
from search_spaces.shapes import ModelShape
from search_spaces.space import nearest

FIELDS = Path(__file__).parent / "megatron_fields.json"
FLAGS_UNREAD = Path(__file__).parent / "megatron_lm_flags.json"
MODULE_LISTS = frozenset({
    "recompute_modules", "cuda_graph_modules", "offload_modules", "cuda_graph_scope", "fsdp_unit_modules",
})  # fmt: skip
# Names of the training loop and of launchers that no configuration class of Megatron-Core has and no rule reads.
LOOP = frozenset({
    "seq_length", "micro_batch_size", "global_batch_size", "num_microbatches", "manual_gc", "manual_gc_interval",
    "train_iters", "transformer_impl", "cpu_affinity", "log_interval", "data_parallel_size", "max_position_embeddings",
})  # fmt: skip
# Integers among the words that are no fields of Megatron-Core's.
COUNTS = frozenset({
    "seq_length", "dataset.seq_length", "micro_batch_size", "global_batch_size", "num_microbatches",
    "eval_micro_batch_size", "eval_global_batch_size", "manual_gc_interval", "train_iters", "log_interval",
    "data_parallel_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
})  # fmt: skip
# Integers that divide something: below 1 they are nonsense to every rule.
SIZES = COUNTS - {"manual_gc_interval", "train_iters", "log_interval"} | {
    "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances", "microbatch_group_size_per_vp_stage", "linear_num_key_heads",
    "linear_num_value_heads", "moe_router_num_groups", "moe_router_group_topk",
}  # fmt: skip
LARGEST = 10**15  # no size, factor or count is larger


LONGEST = 100  # characters of a word that are compared with the known ones


KNOWN = "known knobs: the fields of Megatron-Core's TransformerConfig, ..."


class CaseFault(NamedTuple):
    """One wrong word; `key` is where it stands in the case, for its line."""

    key: str
    message: str
    hint: str = ""


class FieldKind(NamedTuple):
    """`kind`: switch, integer, number, word, list or other. `choices`: the words of a word."""

    kind: str
    choices: tuple[str, ...]


@cache
def megatron_fields() -> Mapping[str, FieldKind]:
    """The fields of Megatron-Core 0.19.2's configuration classes (scripts/megatron_fields.py)."""
    rows = json.loads(FIELDS.read_text())
    return {name: FieldKind(row["kind"], tuple(row.get("choices", ()))) for name, row in rows.items()}


@cache
def read_words() -> frozenset[str]:
    """Megatron's fields, what rules read, what spaces search, the loop's names."""
    of_rules = {name for rule in ALL_RULES for name in rule.reads}
    of_spaces = {knob.name for space in NAMED_SPACES.values() for knob in space.knobs}
    return frozenset(megatron_fields()) | of_rules | of_spaces | LOOP | ModelShape.model_fields.keys()


@cache
def known_words() -> frozenset[str]:
    """Every knob a configuration may name: also flags that nothing reads (scripts/megatron_lm_flags.py)."""
    return read_words() | frozenset(json.loads(FLAGS_UNREAD.read_text()))


def knob_fault(name: str, value: object, hint: bool = True) -> CaseFault | None:
    """A word that does not exist, or a value of the wrong kind or out of range. `hint`: look for the nearest word."""
    if name not in known_words() and not name.isupper():
        return CaseFault(name, f"no knob {shown(name)}", _closest(name[:LONGEST]) if hint else KNOWN)
    if value is None:
        return None
    kind = "integer" if name in COUNTS else megatron_fields()[name].kind if name in megatron_fields() else "other"
    if not _fits(kind, value):
        return CaseFault(name, f"{name} is a {kind}, not {shown(value)}")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # NaN is not either
        return CaseFault(name, f"{name} {shown(value)} is out of range")
    if name in SIZES and isinstance(value, int) and value < 1:
        return CaseFault(name, f"{name} {value} is below 1")
    return None


@lru_cache(maxsize=1000)  # the same slip stands in many configurations of a file
def _closest(name: str) -> str:
    found = (nearest(name, sorted(words())) for words in (read_words, known_words))
    return next((hint for hint in found if hint.startswith("did")), KNOWN)


def _fits(kind: str, value: object) -> bool:
    if kind == "switch":
        return isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "list":
        return _is_list(value)
    return isinstance(value, str) if kind == "word" else True


def _is_list(value: object) -> bool:
    """A list of plain values, one of them alone, or a list as JSON text."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return not isinstance(value, dict) and (
        not isinstance(value, list) or all(isinstance(each, bool | int | float | str) for each in value)
    )


def knob_value(name: str, value: object) -> KnobValue:
    """As the rules read it: lists of modules as "a+b" ("" for none), other lists and objects as JSON text."""
    if name in MODULE_LISTS and isinstance(value, list | tuple):
        return MODULE_SEPARATOR.join(str(part) for part in value)
    if name in MODULE_LISTS and isinstance(value, str):
        return value.replace(",", MODULE_SEPARATOR)
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return cast(KnobValue, value)


# Variables of which "not set" is not the same as "not said" -> how the rules read one that is said to be unset.
UNSET = {"CUDA_DEVICE_MAX_CONNECTIONS": "unset", "NVTE_CPU_OFFLOAD_V1": "unset", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0"}


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables; None and false say that one is not set, true is "1"."""
    off = {name: UNSET[name] for name, value in values.items() if name in UNSET and (value is None or value is False)}
    return off | {
        str(name): "1" if value is True else str(value)
        for name, value in values.items()
        if value is not None and value is not False
    }


def shown(value: object) -> str:
    """A value in a message, short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
