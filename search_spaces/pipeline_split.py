"""The split of layers over pipeline stages that public recipes of some models bring along.

61 layers of DeepSeek-V3 and 94 of Qwen3-235B divide into hardly any number of stages, so their recipes spell the split
out (Bridge 0.6.2: a layout for each PP and VPP; `account_for_embedding_in_pipeline_split` and `..._loss_...` for
Qwen3).
A configuration copied from a table does not say it; a bare "not divisible" would be a false refusal.
"""

from collections.abc import Mapping

from search_spaces.candidate import KnobValue, layout_of
from search_spaces.partial import PartialModel, UnknownFact

MODELS = ("deepseek_v3", "kimi_k2", "qwen3_235b", "qwen3.5_397b")
LAYOUT = "pipeline_model_parallel_layout"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
SAID = (LAYOUT, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", EMBEDDING, LOSS)


def filled_split(name: str, model: PartialModel, knobs: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Knobs that make the split legal where it is not said and an even one is impossible; {} otherwise."""
    if not name.lower().replace("-", "_").startswith(MODELS) or any(knobs.get(knob) for knob in SAID):
        return {}
    layout = layout_of(knobs)
    chunks = layout.virtual_pipeline or 1
    try:
        layers = model.num_layers
    except UnknownFact:
        return {}
    stages = layout.pipeline * chunks
    if stages < 2 or layers % stages == 0:
        return {}
    if (layers + 2) % stages == 0:
        return {EMBEDDING: True, LOSS: True}
    return {LAYOUT: spelt_out(layers, stages)} if stages <= layers + 2 else {}


def spelt_out(layers: int, stages: int) -> str:
    """A layout of nearly equal stages, the embedding and the loss counting as a layer: "Ett|ttt|ttL"."""
    small, more = divmod(layers + 2, stages)
    sizes = [small + (stage < more) for stage in range(stages)]
    parts = ["t" * size for size in sizes]
    parts[0] = "E" + parts[0][1:]
    parts[-1] = parts[-1][1:] + "L"
    return "|".join(parts)
