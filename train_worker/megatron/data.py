"""Synthetic tokens: sequence i of step s depends on (seed, s, i) only, so every layout trains on the same batches.

The text has something to learn, so that the loss falls: tokens are Zipf-distributed, and three times of four the next
token is the successor of the last one on a fixed random cycle through the vocabulary.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

CONTINUE = 0.75  # probability that a token follows from the one before


@dataclass(frozen=True)
class TokenSource:
    """`sequence_length` tokens a sequence, from [0, vocab_size)."""

    seed: int
    vocab_size: int
    sequence_length: int

    def sequences(self, step: int, indices: list[int]) -> torch.Tensor:
        """int64 [len(indices), sequence_length + 1]: inputs and, shifted by one, labels."""
        cycle = self._cycle()
        rows = [self._sequence(step, index, cycle) for index in indices]
        return torch.from_numpy(np.stack(rows))

    def _cycle(self) -> np.ndarray:
        return self._generator("cycle").permutation(self.vocab_size)

    def _sequence(self, step: int, index: int, cycle: np.ndarray) -> np.ndarray:
        random = self._generator(f"{step}/{index}")
        length = self.sequence_length + 1
        jumps = random.random(length) >= CONTINUE
        jumps[0] = True
        targets = (random.zipf(1.3, length) - 1) % self.vocab_size  # a position on the cycle
        position = np.arange(length)
        jumped_at = np.maximum.accumulate(np.where(jumps, position, 0))
        tokens: np.ndarray = cycle[(targets[jumped_at] + position - jumped_at) % self.vocab_size].astype(np.int64)
        return tokens

    def _generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def indices_of_rank(micro_batches: int, micro_batch_size: int, data_ranks: int, data_rank: int) -> list[list[int]]:
    """Sequence numbers of each micro-batch of one data-parallel rank; the ranks together hold the global batch once."""
    step = micro_batch_size * data_ranks
    starts = [batch * step + data_rank * micro_batch_size for batch in range(micro_batches)]
    return [list(range(start, start + micro_batch_size)) for start in starts]


def micro_batches(source: TokenSource, step: int, indices: list[list[int]]) -> Iterator[torch.Tensor]:
    """The micro-batches of one step, each int64 [micro_batch_size, sequence_length + 1] on CPU, drawn at once."""
    flat = source.sequences(step, [index for batch in indices for index in batch])
    return iter(flat.split(len(indices[0])))
