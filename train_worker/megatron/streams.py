"""Streams of the GPU that building and capturing need."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_side_stream(device: str) -> Iterator[None]:
    """What a capture must not depend on through the legacy stream is built here (DDP's hooks and buffers)."""
    if device != "cuda":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
