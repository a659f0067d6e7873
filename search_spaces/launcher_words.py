"""Words of launchers in an explicit configuration: Megatron-LM's own flags, and what they mean as fields."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from search_spaces.candidate import KnobValue, layout_of
from search_spaces.explicit_knobs import megatron_fields
from search_spaces.partial import PartialModel, UnknownFact
from search_spaces.rules import Launcher

FRAMEWORKS: Mapping[str, Launcher] = {
    "megatron-lm": "megatron-lm", "megatron-bridge": "megatron-bridge", "megatron-core": "megatron-core",
}  # fmt: skip
# Flags of Megatron-LM whose field has another name.
FLAGS = {
    "num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage", "ddp_bucket_size": "bucket_size",
    "ddp_num_buckets": "num_buckets", "use_nccl_ub": "nccl_ub", "ddp_average_in_collective": "average_in_collective",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
}  # fmt: skip
# Flags that switch a field off: with the flag absent (false) the field is not said. The others are "no_" or "disable_"
# before the field's name.
OFF = {
    "no_overlap_p2p_communication": "overlap_p2p_comm", "no_rope_fusion": "apply_rope_fusion",
    "disable_bias_linear": "add_bias_linear", "no_bias_swiglu_fusion": "bias_activation_fusion",
    "no_check_for_nan_in_loss_and_grad": "check_for_nan_in_loss_and_grad",
}  # fmt: skip
# Flags that set fields to values (argument_utils.py:314-326, arguments.py:589).
MEANT: Mapping[str, Mapping[str, KnobValue]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "squared_relu": {"activation_func": "squared_relu"},
    "recompute_activations": {"recompute_granularity": "selective"},
}
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")  # as a layer each
VPP = "virtual_pipeline_model_parallel_size"
CHUNK_LAYERS, CHUNKS = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
DASHED = "--"  # a word of a command line; Megatron-LM alone has one
# Flags that no other launcher has: who writes one runs Megatron-LM, whatever else is installed.
MEGATRON_LM_ONLY = frozenset({
    *FLAGS, CHUNK_LAYERS, CHUNKS, "fake_process_group", "group_query_attention", "check_for_nan_in_loss_and_grad",
    "accumulate_allreduce_grads_in_fp32", *OFF, *MEANT, DASHED,
}) - {"num_experts"}  # fmt: skip


class Spelt(NamedTuple):
    """`words`: flags of Megatron-LM told as fields. `origin`: how a word that was spelt otherwise stands in the file.
    `flags`: the words as they were, without dashes."""

    words: dict[str, Any]
    origin: dict[str, str]
    flags: frozenset[str]


def plain_words(given: Mapping[str, Any]) -> Spelt:
    """Flags ("--moe-router-dtype", "no_rope_fusion") as fields; a field that is said under its own name wins."""
    said, meant, origin, flags = dict[str, Any](), dict[str, Any](), dict[str, str](), set[str]()
    for name, value in given.items():
        flag = _undashed(name)
        flags |= {flag, DASHED} if name.startswith("--") else {flag}
        fields = {} if flag in given and flag != name else _fields(flag, value)
        origin |= {field: name for field in fields if field != name}
        (said if flag in fields else meant).update(fields)
    return Spelt({**meant, **said}, origin, frozenset(flags))


def _undashed(name: str) -> str:
    return name.removeprefix("--").replace("-", "_") if "." not in name and "-" in name else name


def _fields(flag: str, value: Any) -> Mapping[str, Any]:
    if flag in MEANT and isinstance(value, bool | None):
        return MEANT[flag] if value else {}
    field = OFF.get(flag) or _negated(flag)
    if field is None:
        return {FLAGS.get(flag, flag): value}
    if value is None or value is False:
        return {}
    return {field: False if value is True else value}


def _negated(flag: str) -> str | None:
    """The switch behind "no_" or "disable_"; None for a field that is called so ("no_rope_freq")."""
    rest = flag.removeprefix("no_") if flag.startswith("no_") else flag.removeprefix("disable_")
    fields = megatron_fields()
    return rest if rest != flag and flag not in fields and rest in fields and fields[rest].kind == "switch" else None


def launchers_of(
    framework: str | None, stack: Iterable[str], words: Iterable[str], bridge: bool
) -> frozenset[Launcher]:
    """Whose rules apply. A named `framework` decides; else Bridge's paths (`bridge`) or Megatron-LM's own flags among
    `words`; else each launcher that the `stack` lists."""
    if framework is not None:
        return frozenset({FRAMEWORKS[framework]})
    if not bridge and not MEGATRON_LM_ONLY.isdisjoint(words):
        return frozenset({"megatron-lm"})
    installed = {name.lower().replace("-", "_") for name in stack}
    found: set[Launcher] = {"megatron-bridge"} if bridge or installed & {"bridge", "megatron_bridge"} else set()
    return frozenset(found | ({"megatron-lm"} if "megatron_lm" in installed else set()))


def virtual_stages(model: PartialModel, knobs: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """VPP where one of Megatron-LM's flags says it (arguments.py:918-962); {} otherwise."""
    stages, each, chunks = layout_of(knobs).pipeline, knobs.get(CHUNK_LAYERS), knobs.get(CHUNKS)
    if knobs.get(VPP) is not None or stages < 2 or (each and chunks):
        return {}
    if isinstance(chunks, int) and chunks > 0:
        return {VPP: chunks}
    try:
        layers = model.num_layers + sum(bool(knobs.get(name)) for name in COUNTED)
    except UnknownFact:
        return {}
    a_stage, rest = divmod(layers, stages)
    whole = isinstance(each, int) and each > 0 and not rest and not a_stage % each
    return {VPP: a_stage // int(each)} if whole and each else {}
