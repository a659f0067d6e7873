"""Streams of the GPU that building and capturing need."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream


@contextmanager
def on_side_stream(device: str, captures: bool = False) -> Iterator[None]:
    """What a capture must not depend on through the legacy stream is built here (DDP's hooks and buffers).

    `captures`: it must be the very stream of the capture, because gradient accumulators remember the stream they were
    made on: of whole iterations (training/training.py:1870), or of `late_accumulators`.
    """
    if device != "cuda":
        yield
        return
    side = get_shared_capture_stream() if captures else torch.cuda.Stream()
    if captures:
        torch.cuda.graph.default_capture_stream = side
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def late_accumulators(chunks: list[Any]) -> list[Any]:
    """Gradient accumulators of the weights whose gradients come late, made on the current stream. Keep them.

    DDP makes and keeps those of all other weights and leaves these out (distributed_data_parallel.py:365). The eager
    steps then make them on the legacy stream, and the capture of a backward pass ends with "operation would make the
    legacy stream depend on a capturing blocking stream" (seen on one H200; see pytorch pull request 189371).
    """
    weights = (each for chunk in chunks for each in chunk.parameters() if each.requires_grad)
    late = (each for each in weights if getattr(each, "skip_backward_post_hook", False))
    return [each.expand_as(each).grad_fn.next_functions[0][0] for each in late]
