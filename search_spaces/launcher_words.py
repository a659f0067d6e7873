"""Words of launchers in an explicit configuration: Megatron-LM's own flags, and what they mean as fields."""

from collections.abc import Iterable, Mapping

from search_spaces.candidate import KnobValue, layout_of
from search_spaces.partial import PartialModel, UnknownFact
from search_spaces.rules import Launcher

FRAMEWORKS: Mapping[str, Launcher] = {
    "megatron-lm": "megatron-lm", "megatron-bridge": "megatron-bridge", "megatron-core": "megatron-core",
}  # fmt: skip
# Flags of Megatron-LM whose field has another name.
FLAGS = {
    "num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}  # fmt: skip
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")  # as a layer each
VPP = "virtual_pipeline_model_parallel_size"
CHUNK_LAYERS, CHUNKS = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
# Flags that no other launcher has: who writes one runs Megatron-LM, whatever else is installed.
MEGATRON_LM_ONLY = frozenset({
    *FLAGS, CHUNK_LAYERS, CHUNKS, "fake_process_group", "group_query_attention", "check_for_nan_in_loss_and_grad",
    "accumulate_allreduce_grads_in_fp32",
}) - {"num_experts"}  # fmt: skip


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
