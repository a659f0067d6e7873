"""How long each collective of a step took the rank that came to it last: what the others took longer, they waited.

A kernel of NCCL runs from when its rank arrives until all are through, so that its time is transfer and wait in one.
Ranks that do the same work meet in the same collectives in the same order; the shortest run of the k-th over the ranks
is then what its transfer takes at most, and the rest is the wait for peers.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from train_worker.kernels import GpuEvent


def with_shortest(events: Sequence[GpuEvent] | None, device: torch.device) -> tuple[GpuEvent, ...]:
    """The events, each collective with its shortest run over all ranks; as they were where the ranks communicated
    differently (streams that overtook each other) or a rank has no events to show (None). Collective.

    Groups of ranks that meet apart are taken as one: their collectives are of one size.
    """
    found = list(events or ())
    places = sorted(
        (place for place, event in enumerate(found) if event.category == "communication"),
        key=lambda place: found[place].start_us,
    )
    names = "\n".join(found[place].name for place in places)
    digest = int.from_bytes(hashlib.sha256(names.encode()).digest()[:7])
    mine = [-1, 0] if events is None else [len(places), digest]
    facts = torch.tensor([*mine, *(-value for value in mine)], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(facts, op=ReduceOp.MAX)
    largest, smallest = facts[:2].tolist(), [-value for value in facts[2:].tolist()]
    if largest != smallest or not places:
        return tuple(found)
    runs = torch.tensor([found[place].duration_us for place in places], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(runs, op=ReduceOp.MIN)
    for place, shortest_us in zip(places, runs.tolist(), strict=True):
        found[place] = found[place]._replace(shortest_us=shortest_us)
    return tuple(found)
