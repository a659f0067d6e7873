"""Streams of the GPU that building and capturing need."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream


@contextmanager
def on_side_stream(device: str, captures: bool = False) -> Iterator[None]:
    """What a capture must not depend on through the legacy stream is built here (DDP's hooks and buffers).

    `captures`: whether whole iterations are to be captured. Then it is the very stream of that capture: the gradient
    accumulators that DDP keeps remember the stream they were made on (training/training.py:1870).
    """
    if device != "cuda":
        yield
        return
    side = get_shared_capture_stream() if captures else torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
