"""Context parallelism cuts a sequence by its own ranks, whatever other ranks there are."""

import pytest
import torch

from tests.search_spaces.cases import case, gpus
from tests.search_spaces.oracle import load_megatron
from tests.search_spaces.oracle_parallelism import fake_world

load_megatron("train_worker.megatron.step")
from train_worker.megatron.step import of_this_context_rank  # noqa: E402


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
