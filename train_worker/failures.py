"""From an exception inside a rank to an `Outcome`. Text tests only: no torch, ray or megatron is imported.

Sources of the texts: torch's allocator, NCCL's disguises of an out-of-memory (`ncclUnhandledCudaError` with
"Cuda failure 2" or "Failed to CUDA calloc async", seen after an OOM on an H200), cuBLAS, gloo.
"""

import errno
import os
import re
import traceback
from pathlib import Path
from typing import Literal

from train_worker.outcome import Crashed, Outcome, OutOfMemory, Rejected

# "Cuda failure 2" is out of memory, "Cuda failure 217" is not. CUDA, Triton and DeepEP differ in the middle.
DEVICE_OUT_OF_MEMORY = re.compile(
    r"\bcuda\b[^\n]{0,120}\bout of memory|\bcuda failure 2\b|failed to cuda (calloc|malloc)"
    r"|cu(blas|dnn)_status_alloc_failed|cudaerrormemoryallocation"
)
HOST_OUT_OF_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "cannot allocate memory",
    "unable to mmap",
)
PEER_LOST = (
    "connection closed by peer",
    "closed by remote peer",
    "caused pair closure",
    "communicator was aborted",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
    "timed out after",
    "ncclremoteerror",
    "connection refused",
)
# While the gang meets, these are the network's fault or a node's: another attempt may work.
NETWORK = (*PEER_LOST, "address already in use", "eaddrinuse", "no route to host", "failed to connect to")
# Raised while the objects are built or first used, these say that the stack refuses the configuration: Megatron
# has checks in its layers (TP without sequence parallelism) that speak in the first forward only.
REFUSALS = (ValueError, AssertionError, NotImplementedError, ImportError)
# A layout that does not divide (tensor_parallel/utils.py), a kernel of APEX (tensor_parallel/layers.py:1070), a recipe
# of a newer GPU (Transformer Engine pytorch/quantization.py:168: MXFP8 in the first forward, seen on one H200).
REFUSING_WORDS = ("is not divisible by", "custom CUDA extension", "Device compute capability")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
DETAIL_CHARACTERS = 4000


class MachineFault(RuntimeError):
    """The worker's machine is not fit for a trial, whichever it is: another attempt may work."""


def is_collateral(error: BaseException) -> bool:
    """True where the error only says that another rank went away."""
    return not _out_of_memory(error) and any(text in _words(error) for text in PEER_LOST)


def classify(error: BaseException, phase: str, step: int = -1) -> Outcome:
    """The outcome of a rank that raised `error` in `phase`, at optimizer step `step` (-1: before the first)."""
    where = _out_of_memory(error)
    detail = _detail(error)
    if where:
        return OutOfMemory(where=where, phase=phase, detail=detail)
    # After the warm-up what was built is read back ("build" again): a fault there is ours, and no refusal of the stack.
    refusing = phase in ("build", "warmup") and step <= 0
    if refusing and (isinstance(error, REFUSALS) or any(text in str(error) for text in REFUSING_WORDS)):
        reason = without_home(f"{type(error).__name__}: {error}")[:DETAIL_CHARACTERS]
        return Rejected(rule="stack-refuses", reason=reason)
    network = any(text in _words(error) for text in NETWORK) and phase == "process_group"
    machine = isinstance(error, MachineFault) or (isinstance(error, OSError) and error.errno in NO_ROOM)
    return Crashed(phase=phase, detail=detail, infrastructure=network or machine)


def out_of_memory_in(text: str) -> Literal["device", "host"] | None:
    """Which memory ran out, by the words of an error or a log; None where they do not say so."""
    words = text.lower()
    if DEVICE_OUT_OF_MEMORY.search(words):
        return "device"
    return "host" if any(each in words for each in HOST_OUT_OF_MEMORY) else None


def _out_of_memory(error: BaseException) -> Literal["device", "host"] | None:
    """By class, then by words, then the same for the error it was raised from."""
    if type(error).__name__ == "OutOfMemoryError":
        return "host" if type(error).__module__.startswith("ray") else "device"
    if isinstance(error, MemoryError):
        return "host"
    return out_of_memory_in(str(error)) or (_out_of_memory(error.__cause__) if error.__cause__ else None)


def _words(error: BaseException) -> str:
    return str(error).lower()


def _detail(error: BaseException) -> str:
    """The error and the end of its traceback; the end is what names the call."""
    return without_home("".join(traceback.format_exception(error)))[-DETAIL_CHARACTERS:]


def without_home(text: str) -> str:
    """The text with this user's home folder as "~": tracebacks are full of it, and it names the user.

    Also where it is spelled as what a link of that name leads to. Cut a text afterwards: half a path is not found.
    """
    try:
        home = Path.home()
    except RuntimeError:  # a user without one, as in many containers
        return text
    if not home.is_absolute() or home == home.parent:
        return text
    for folder in (str(home), os.path.realpath(home)):
        text = re.sub(rf"{re.escape(folder)}(?![\w-]|\.\w)", "~", text)  # not a longer name, such as somebodyelse
    return text
