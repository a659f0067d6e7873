"""Import everything a trial needs, once, in the clean parent process that every trial is forked from.

Imports cost 7.4 CPU-seconds on a laptop (facts: torch 2.9, megatron 4.5 of which 3.5 is inductor) and 13-21 s on a
GPU host; a forked rank pays none of it. The fork is safe only while this process has one thread and never touched
CUDA ("Cannot re-initialize CUDA in forked subprocess").
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

DRIVER_THREAD = "cuda"


def preload(device: Literal["cpu", "cuda"]) -> None:
    """Import torch, megatron and (cuda) Transformer Engine. Call before any other import of `train_worker.megatron`.

    The caller sets OMP_NUM_THREADS and OPENBLAS_NUM_THREADS to 1 before Python starts. Raises RuntimeError where the
    process is not fit to be forked afterwards: more than one thread, or CUDA initialised.
    """
    _require_one_thread("before importing")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else torch.cuda.is_available() alone poisons forks
    import torch

    if device == "cuda" and importlib.util.find_spec("transformer_engine"):  # a trial without it is refused
        import transformer_engine.pytorch  # noqa: F401
    with _without_inductor() if device == "cpu" else nullcontext():
        import train_worker.megatron.trial  # noqa: F401
    _import_what_is_deferred()
    gc.collect()
    gc.freeze()  # forks then neither scan nor copy the pages of what was imported
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised while importing: trials forked from here could not use it")
    _require_one_thread("after importing")


def _require_one_thread(when: str) -> None:
    threads = thread_count()
    if threads > 1:
        raise RuntimeError(f"{threads} threads {when}, not 1: set OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1")


def thread_count() -> int:
    """Threads of this process that a fork could break, native ones included (Linux; 1 where /proc is missing).

    The driver's own idle thread ("cuda0000...") is not counted: importing megatron.core.dist_checkpointing starts it
    on a GPU host although CUDA stays uninitialised, and a child forked beside it uses CUDA as usual (seen on an H200,
    driver 580, torch 2.11).
    """
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text() for task in tasks.iterdir()] if tasks.exists() else ["python"]
    return len([name for name in names if not name.startswith(DRIVER_THREAD)])


def _import_what_is_deferred() -> None:
    """What the first build or step would import in every fork (sys.modules before and after a trial): 3 s each."""
    import megatron.core.models.mimo.model.base
    import megatron.core.models.mimo.optimizer  # noqa: F401  get_megatron_optimizer asks whether the model is one
    import torch._dynamo  # noqa: F401  torch's optimizers and dispatch modes are marked as not to be compiled


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Megatron decorates with torch.compile at import (jit.py:20), which loads inductor: 3.5 CPU-s, of no use here."""
    import torch

    def compile_nothing(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    real = torch.compile
    torch.compile = compile_nothing
    try:
        yield
    finally:
        torch.compile = real
