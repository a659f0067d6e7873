"""Synthetic tokens: the same global batch whoever reads it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_worker.megatron.data import CONTINUE, TokenSource, indices_of_rank, micro_batches

SOURCE = TokenSource(seed=3, vocab_size=50, sequence_length=64)


@given(micro=st.integers(1, 6), size=st.integers(1, 6), ranks=st.integers(1, 6))
def test_the_ranks_together_read_each_sequence_once(micro: int, size: int, ranks: int) -> None:
    read = [index for rank in range(ranks) for batch in indices_of_rank(micro, size, ranks, rank) for index in batch]
    assert sorted(read) == list(range(micro * size * ranks))


def test_a_sequence_depends_on_seed_step_and_index_only() -> None:
    alone = SOURCE.sequences(4, [7])[0]
    assert torch.equal(alone, SOURCE.sequences(4, [2, 7, 9])[1])
    assert not torch.equal(alone, SOURCE.sequences(5, [7])[0])
    assert not torch.equal(alone, SOURCE.sequences(4, [8])[0])
    assert not torch.equal(alone, TokenSource(4, 50, 64).sequences(4, [7])[0])


def test_micro_batches_have_inputs_and_one_label_more() -> None:
    found = list(micro_batches(SOURCE, 0, [[0, 1], [4, 5], [8, 9]]))
    assert [batch.shape for batch in found] == [(2, 65)] * 3
    assert torch.equal(found[1], SOURCE.sequences(0, [4, 5]))


@pytest.mark.parametrize("vocab_size", [2, 50, 1000])
def test_tokens_are_in_the_vocabulary(vocab_size: int) -> None:
    tokens = TokenSource(0, vocab_size, 200).sequences(0, [0, 1])
    assert tokens.dtype == torch.int64
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size


def test_most_tokens_follow_from_the_one_before() -> None:
    """What there is to learn: one successor for each token, taken with probability CONTINUE."""
    tokens = SOURCE.sequences(0, list(range(200))).numpy()
    before, after = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
    counts = np.zeros((50, 50))
    np.add.at(counts, (before, after), 1)
    followed = counts.max(axis=1).sum() / counts.sum()
    assert CONTINUE - 0.05 < followed < CONTINUE + 0.1
