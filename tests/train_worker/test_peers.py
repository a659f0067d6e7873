"""Collectives of two real ranks, compared over gloo."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.multiprocessing import spawn

from train_worker.kernels import GpuEvent
from train_worker.megatron.peers import with_shortest

Events = tuple[GpuEvent, ...]
CPU = torch.device("cpu")


def sent(*spans: tuple[float, float], name: str = "ncclDevKernel_SendRecv") -> Events:
    return (GpuEvent("gemm", 0, 900, 7), *(GpuEvent(name, start, length, 20) for start, length in spans))


# name -> (what each rank has, the shortest runs that both must find, in the order of its events)
CASES: dict[str, tuple[tuple[Events | None, Events | None], list[float | None]]] = {
    "each waits once": ((sent((10, 5), (30, 2)), sent((12, 3), (20, 9))), [None, 3.0, 2.0]),
    "not in order of time": ((sent((30, 2), (10, 5)), sent((20, 9), (12, 3))), [None, 2.0, 3.0]),
    "one more on a rank": ((sent((10, 5), (30, 2)), sent((12, 3))), [None, None, None]),
    "another collective": ((sent((10, 5)), sent((12, 3), name="ncclDevKernel_AllReduce")), [None, None]),
    "nothing read on a rank": ((sent((10, 5)), None), [None, None]),
    "nothing sent": ((sent(), sent()), [None]),
}


def on_a_rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, (events, expected) in CASES.items():
        found = with_shortest(events[rank], CPU)
        mine = events[rank]
        shortest = [] if mine is None else expected[: len(mine)]
        assert [event.shortest_us for event in found] == shortest, (name, found)
        assert [event._replace(shortest_us=None) for event in found] == list(mine or ()), name
    torch.distributed.destroy_process_group()


def test_the_shortest_run_of_each_collective_is_found_where_ranks_do_the_same(tmp_path: Path) -> None:
    ranks: Callable[..., object] = on_a_rank
    spawn(ranks, args=(str(tmp_path / "store"),), nprocs=2)
