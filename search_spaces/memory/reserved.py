"""From allocated to reserved to used: what torch's caching allocator and the CUDA context add to a plan.

Eight factors of a fingerprint (`Calibration`) weigh eight quantities of a plan, each with a physical meaning; all are at
least 0. The default ones are fitted in `calibration`.
"""

from typing import NamedTuple

from search_spaces.memory.plan import StagePlan

MIB = 2**20
SEGMENT, LARGE = 20 * MIB, 10 * MIB  # c10/cuda/CUDACachingAllocator.cpp kLargeBuffer, kMinLargeAlloc


class Slack(NamedTuple):
    """What may be reserved beyond what is allocated, in bytes; `constant` is one GiB, so its factor is in GiB."""

    constant: int
    activations: int  # blocks are rounded up, and change hands between tensors of different sizes
    recomputed: int  # brought back right after the loss, out of blocks the logits left
    segments: int  # rests of 20 MiB segments that hold optimizer states of small expert matrices
    carved: int  # rests of logits-sized blocks that the optimizer's first step cut tensors from
    copies: int  # quantized weights, made anew each step
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
        carved=0 if expandable else carved(active.logits, moments),
        copies=states.quantized_copies,
        narrowed=active.narrowed,
        graphs=active.captured,
    )


def _segment_rests(stage: StagePlan) -> int:
    """Tensors of 1 to 10 MiB come out of segments of 20 MiB; what does not fill one stays reserved."""
    if not stage.expert_matrix:
        return 0
    matrices = stage.parameters.experts / (3 * stage.expert_matrix)
    states = stage.states.optimizer / max(stage.parameters.total, 1) / 4  # fp32 tensors a matrix
    rests = 0.0
    for size in (4 * stage.expert_matrix, 8 * stage.expert_matrix):
        if MIB <= size < LARGE:
            fitting = SEGMENT // size
            rests += matrices * states / fitting * (SEGMENT - fitting * size)
    return round(rests)


def carved(logits: int, moments: int) -> int:
    """What is left of the logits' blocks after the optimizer's first step cut its tensors from the smallest of them.

    The blocks are the logits, their gradient, and the fp32 softmax of twice their size; the next step wants all three
    whole again. Blocks that are too small for it by then are the rest.
    """
    blocks = [logits, logits, 2 * logits]
    for index, block in enumerate(blocks):
        cut = min(block, moments)
        blocks[index] -= cut
        moments -= cut
    for wanted in (logits, 2 * logits, logits):
        fitting = [block for block in blocks if block >= wanted]
        if fitting:
            block = min(fitting)
            blocks.remove(block)
            blocks.append(block - wanted)
    return sum(blocks)
