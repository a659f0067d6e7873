"""From allocated to reserved to used: what torch's caching allocator and the CUDA context add to a plan.

Seven factors of a fingerprint (`Calibration`) weigh seven quantities of a plan, each with a physical meaning; all are
at least 0. The default ones are fitted in `calibration`.
"""

from typing import NamedTuple

from search_spaces.memory.plan import Activity, StagePlan

MIB = 2**20
SEGMENT, LARGE = 20 * MIB, 10 * MIB  # c10/cuda/CUDACachingAllocator.cpp kLargeBuffer, kMinLargeAlloc


class Slack(NamedTuple):
    """What may be reserved beyond what is allocated, in bytes; `constant` is one GiB, so its factor is in GiB."""

    constant: int
    activations: int  # blocks are rounded up, and change hands between tensors of different sizes
    recomputed: int  # brought back right after the loss, out of blocks the logits left
    segments: int  # rests of segments and blocks that hold optimizer states of expert matrices
    carved: int  # rests of logits-sized blocks that the optimizer's first step cut tensors from
    narrowed: int  # quantized activations lie in blocks that their wide originals left
    graphs: int  # what captured graphs hold beyond eager steps


def slack_of(stage: StagePlan, expandable: bool) -> Slack:
    """`expandable`: with expandable segments the allocator leaves no rests of segments or blocks."""
    active, states = stage.active, stage.states
    moments = states.optimizer * 2 // 3  # Adam's two moments are made in the first step, after its activations
    return Slack(
        constant=2**30,
        activations=stage.activations,
        recomputed=active.recomputed,
        segments=0 if expandable else _segment_rests(stage),
        carved=0 if expandable else carved(active, moments),
        narrowed=active.narrowed,
        graphs=active.captured,
    )


def _segment_rests(stage: StagePlan) -> int:
    """Tensors of 1 to 10 MiB come out of segments of 20 MiB; what does not fill one stays reserved. Larger ones are cut
    from blocks that activations left: one rest a layer and size, up to which it is too small for another."""
    if not stage.expert_matrix:
        return 0
    matrices = stage.parameters.experts / (3 * stage.expert_matrix)
    states = stage.states.optimizer / max(stage.parameters.total, 1) / 4  # fp32 tensors a matrix
    rests = 0.0
    for size in (4 * stage.expert_matrix, 8 * stage.expert_matrix):
        if MIB <= size < LARGE:
            fitting = SEGMENT // size
            rests += matrices * states / fitting * (SEGMENT - fitting * size)
        elif size >= LARGE and states:
            rests += stage.moe_layers * size
    return round(rests)


def carved(active: Activity, moments: int) -> int:
    """Free bytes that no tensor fits when the logits have come, in the steps after the optimizer's first.

    That step cuts its tensors from the smallest blocks that activations left; the next step's activations fill the
    rests, smallest first, and may break a block of the logits. A capture gives whole blocks back (empty_cache), and
    activations in its pool fill nothing.
    """
    if not active.logits:
        return 0
    ends = max(active.transient - 3 * active.logits, 0) if active.moment == "loss" else 0
    saved, filling = active.saved.total, max(active.saved.total - active.pooled, 0) + ends
    cut, left = max(moments - saved, 0), max(saved - moments, 0)
    return rests(active.logits, cut, max(filling - left, 0), emptied=bool(active.captured))


def rests(logits: int, cut: int, filling: int, emptied: bool) -> int:
    """What is left of two blocks, the logits' and their fp32 softmax's twice as large, once `cut` bytes are gone for
    good, `filling` are in use, and both tensors want a block again. `emptied`: a whole block was given back."""
    blocks = _cut([logits, 2 * logits], cut)
    if emptied:
        blocks = [left for left, whole in zip(blocks, (logits, 2 * logits), strict=True) if left != whole]
    blocks = _cut(sorted(blocks), filling)
    for wanted in (logits, 2 * logits):
        fitting = [block for block in blocks if block >= wanted]
        if fitting:
            block = min(fitting)
            blocks.remove(block)
            blocks.append(block - wanted)
    return sum(blocks)


def _cut(blocks: list[int], size: int) -> list[int]:
    """The blocks less `size` bytes, taken from each in turn."""
    left = []
    for block in blocks:
        taken = min(block, size)
        size -= taken
        left.append(block - taken)
    return left
