"""Which layers each pipeline stage and model chunk holds (core/transformer/transformer_block.py:70)."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from search_spaces.candidate import KnobValue
from search_spaces.memory.shape import Decoder, FactError, Grid, spelt


class Chunk(NamedTuple):
    """One model chunk of one pipeline stage. `last`: holds final norm, output layer and loss."""

    dense: int
    moe: int
    first: bool
    last: bool
    mtp: int = 0

    @property
    def layers(self) -> int:
        return self.dense + self.moe


Stages = tuple[tuple[Chunk, ...], ...]  # by pipeline rank, its chunks in virtual order


SPLIT_KNOBS = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout", "mtp_num_layers",
)  # fmt: skip


def stages_of(decoder: Decoder, grid: Grid, knobs: Mapping[str, KnobValue]) -> Stages:
    """Which layers each stage holds (core/transformer/transformer_block.py:70 get_num_layers_to_build).

    Raises FactError where they do not divide.
    """
    return _stages(
        decoder.layers, decoder.dense_first, grid.pipeline, grid.virtual, tuple(knobs.get(name) for name in SPLIT_KNOBS)
    )


@lru_cache(maxsize=4096)
def _stages(layers: int, dense_first: int, stages: int, virtual: int, said: tuple[KnobValue, ...]) -> Stages:
    first, last, embedding, loss, text, mtp = said
    if text:
        counts = _laid_out(str(text), layers, stages, virtual)
    else:
        counts = _counted(layers, stages, virtual, first, last, bool(embedding), bool(loss))
    chunks: list[list[Chunk]] = [[] for _ in range(stages)]
    offset, total = 0, stages * virtual
    for position, count in enumerate(counts):
        dense = min(max(dense_first - offset, 0), count)
        end = position == total - 1
        chunks[position % stages].append(Chunk(dense, count - dense, position == 0, end, int(mtp or 0) if end else 0))
        offset += count
    return tuple(tuple(each) for each in chunks)


def _laid_out(text: str, layers: int, stages: int, virtual: int) -> list[int]:
    counts = [chunk.count("decoder") for chunk in spelt(text)]
    if len(counts) != stages * virtual or sum(counts) != layers:
        raise FactError("pipeline_model_parallel_layout", f"the layout has {len(counts)} stages and {sum(counts)} "
                        f"decoder layers; PP x VPP is {stages * virtual}, num_layers {layers}")  # fmt: skip
    return counts


def _counted(
    layers: int, stages: int, virtual: int, first: KnobValue, last: KnobValue, embedding: bool, loss: bool
) -> list[int]:
    """Layers of each chunk, in the order in which data passes them."""
    ends = {0: first, stages - 1: last}
    fixed = {place: int(count) for place, count in ends.items() if count is not None}
    left = layers - sum(fixed.values()) + (0 if fixed else embedding + loss)
    middle = stages - len(fixed)
    if left < 0 or (left % middle if middle else left):
        raise FactError("pipeline_model_parallel_size", f"{left} layers do not divide over {middle} stages")
    each = [fixed.get(place, left // middle if middle else 0) for place in range(stages)]
    if any(count % virtual for count in each):
        raise FactError("virtual_pipeline_model_parallel_size", f"{max(each)} layers a stage are not divisible by VPP "
                        f"{virtual}")  # fmt: skip
    counts = [count // virtual for _ in range(virtual) for count in each]
    if not fixed:
        counts[0] -= embedding
        counts[-1] -= loss
    return counts
