"""What one rank does among others: its share of a sequence under context parallelism, its part of the exchange."""

import pytest
import torch

from tests.search_spaces.cases import case, gpus
from tests.search_spaces.oracle import load_megatron
from tests.search_spaces.oracle_parallelism import fake_world

load_megatron("train_worker.megatron.step")
from train_worker.megatron.step import exchange, of_this_context_rank  # noqa: E402


@pytest.mark.parametrize(("ranks", "context"), [(2, 2), (4, 2), (8, 2), (8, 4)])
def test_a_rank_has_its_share_of_a_sequence(ranks: int, context: int) -> None:
    tokens = torch.arange(16).expand(3, 16)
    with fake_world(case(gpus(ranks), context_parallel_size=context)):
        mine = of_this_context_rank({"tokens": tokens})["tokens"]
    piece = 16 // (2 * context)
    assert mine[0].tolist() == [*range(piece), *range(16 - piece, 16)], "rank 0: the first piece and the last"


def test_without_context_parallelism_it_is_whole() -> None:
    tokens = torch.arange(16).expand(3, 16)
    with fake_world(case(gpus(4))):
        assert of_this_context_rank({"tokens": tokens})["tokens"] is tokens


def test_the_exchange_gives_every_rank_the_slowest_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 3: each sends its times in its own places of one sum."""
    theirs = torch.tensor([0.5, 0.25, 3.0, 0.1, 0, 0, 1.0, 0.4], dtype=torch.float64)

    def all_reduce(tensor: torch.Tensor) -> None:
        assert tensor[4:6].tolist() == [2.0, 0.3]
        assert not tensor[2:4].any()
        assert not tensor[6:].any()
        tensor += theirs

    for name, answer in (("get_world_size", 3), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_world_size", lambda: 1)
    loss, norm, slowest = exchange([torch.tensor(3.0), torch.tensor(6.0)], 1.5, [2.0, 0.3], torch.device("cpu"))
    assert (loss, norm) == (0.5 + 1.5, 0.25 + 0.5)
    assert slowest == [3.0, 0.4]
