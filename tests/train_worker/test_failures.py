"""What the words of an error mean. The texts are those that the libraries were seen or are known to say.

Sources: runs on an H200, runs of Ray's failures on a laptop, and the strings inside the installed libnccl, libtorch
and Triton.
"""

import errno
import socket
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import ray.exceptions
import torch
import torch.distributed as dist
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from torch._C._distributed_c10d import TCPStore

from train_worker.failures import DETAIL_CHARACTERS, classify, is_collateral, out_of_memory_in
from train_worker.outcome import Crashed, OutOfMemory, Rejected

DEVICE = [
    "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 15.48 GiB is "
    "free. Including non-PyTorch memory, this process has 124.31 GiB memory in use.",
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    "Last error:\nFailed to CUDA calloc async 24 bytes",
    "Last error:\nFailed to CUDA calloc 1048576 bytes",
    "Last error:\nFailed to CUDA malloc 8388608 bytes",
]
HOST = [
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "[Errno 12] Cannot allocate memory",
    "unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)",
]
# Not known to `out_of_memory_in` yet; strict: the mark goes with the mistake.
UNKNOWN = [
    "CUDA driver error: out of memory",  # torch's expandable segments
    "Triton Error [CUDA]: out of memory",
    "Failed: CUDA error csrc/deep_ep.cpp:35 'out of memory'",  # DeepEP
]
NEITHER = [
    "The actor died unexpectedly before finishing this task. Some common causes include: (1) the process was killed "
    "by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer "
    "(verifiable by checking for OOM in dmesg of the OOMing node)",
    "Device compute capability 10.0 or higher required for MXFP8 execution.",
    "CUDA error: operation failed due to a previous error during capture\n"
    "Search for `cudaErrorStreamCaptureInvalidated' in https://docs.nvidia.com/cuda",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "Could not initialize NNPACK! Reason: Out of memory.",  # a warning that torch goes on from
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 milliseconds",
    "Connection closed by peer [127.0.0.1]:1234",
    "",
]
PEERS = [
    "Connection closed by peer [127.0.0.1]:45678",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer",
    "writev [127.0.0.1]:1: Broken pipe",
    "Timed out waiting 1800000ms for recv operation to complete",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "remote process exited or there was a network error, NCCL version 2.28\nncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed "
    "by remote peer host<1>",
]
UNKNOWN_PEERS = [
    "Application timeout caused pair closure",  # gloo, on the ranks that did not time out themselves
    "NCCL communicator was aborted on rank 0.",
]


@pytest.mark.parametrize("text", DEVICE)
def test_device_memory_in_all_its_disguises(text: str) -> None:
    assert out_of_memory_in(text) == "device"
    for error in (RuntimeError(text), dist.DistBackendError(text), torch.AcceleratorError(text)):
        found = classify(error, "measure", 7)
        assert isinstance(found, OutOfMemory)
        assert (found.where, found.phase) == ("device", "measure")
        assert not is_collateral(error)


@pytest.mark.parametrize("text", UNKNOWN)
def test_device_memory_in_disguises_not_known_yet(text: str) -> None:
    assert out_of_memory_in(text) == "device"


def test_another_failure_of_cuda_is_not_failure_2() -> None:
    assert out_of_memory_in("Cuda failure 217 'peer access is not supported between these two devices'") is None


@pytest.mark.parametrize("text", HOST)
def test_host_memory(text: str) -> None:
    assert out_of_memory_in(text) == "host"


@pytest.mark.parametrize("text", NEITHER)
def test_what_only_sounds_like_it(text: str) -> None:
    assert out_of_memory_in(text) is None
    assert isinstance(classify(RuntimeError(text), "measure", 3), Crashed)


def test_torch_s_own_class_is_the_device_and_ray_s_class_of_that_name_is_the_host() -> None:
    device = classify(torch.OutOfMemoryError("no words to go by"), "warmup")
    assert isinstance(device, OutOfMemory)
    assert device.where == "device"
    monitor = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    host = classify(monitor, "measure")
    assert isinstance(host, OutOfMemory)
    assert host.where == "host"


def test_a_dead_actor_of_ray_is_not_out_of_memory() -> None:
    died = ActorDiedErrorContext(error_message=NEITHER[0], actor_id=b"0" * 16, class_name="Worker")
    error = ray.exceptions.ActorDiedError(died)
    assert "OOM killer" in str(error)
    assert isinstance(classify(error, "measure"), Crashed)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(1 << 50),
        lambda: bytearray(1 << 62),
        lambda: np.empty(1 << 60, dtype=np.uint8),
    ],
    ids=["torch", "python", "numpy"],
)
@pytest.mark.parametrize("phase", ["build", "warmup", "measure"])
def test_a_real_allocation_that_fails_is_host_memory(allocate: Callable[[], object], phase: str) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    found = classify(caught.value, phase, 0)
    assert isinstance(found, OutOfMemory)
    assert (found.where, found.phase) == ("host", phase)


@pytest.mark.parametrize("text", PEERS)
def test_a_lost_peer_is_collateral(text: str) -> None:
    for error in (RuntimeError(text), dist.DistBackendError(text), dist.DistNetworkError(text)):
        assert is_collateral(error)


@pytest.mark.parametrize("text", UNKNOWN_PEERS)
def test_a_lost_peer_in_words_not_known_yet(text: str) -> None:
    assert is_collateral(RuntimeError(text))


@pytest.mark.parametrize("text", [*DEVICE, *HOST, *NEITHER[:-2]])
def test_a_cause_is_not_collateral(text: str) -> None:
    assert not is_collateral(RuntimeError(text))


def test_memory_comes_before_the_peer_that_it_cost() -> None:
    """NCCL names both where a rank ran out of memory while it connected."""
    both = dist.DistBackendError(f"{DEVICE[4]}\nsocketProgress: Connection closed by peer")
    assert not is_collateral(both)
    assert isinstance(classify(both, "measure", 1), OutOfMemory)


@pytest.mark.parametrize(
    ("error", "phase", "step"),
    [
        (AssertionError("DeepEP dispatcher requires TPxEP > 1"), "build", -1),
        (ValueError("sequence parallelism must be used"), "warmup", 0),
        (NotImplementedError("x"), "build", -1),
        (ImportError("no transformer_engine"), "build", -1),
        (RuntimeError("24 is not divisible by 5"), "warmup", 0),
        (RuntimeError("the custom CUDA extension fused_weight_gradient_mlp_cuda module is not found"), "build", -1),
        (RuntimeError("Device compute capability 10.0 or higher required for MXFP8 execution."), "warmup", 0),
    ],
)
def test_what_the_stack_refuses_is_rejected_with_its_words(error: Exception, phase: str, step: int) -> None:
    found = classify(error, phase, step)
    assert found == Rejected(rule="stack-refuses", reason=f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("error", "phase", "step"),
    [
        (ValueError("x"), "warmup", 1),
        (ValueError("knob 'x' is in no built object"), "build", 2),
        (AssertionError("x"), "measure", 3),
        (ImportError("x"), "import", -1),
        (RuntimeError("x"), "build", -1),
        (KeyError("x"), "build", -1),
    ],
)
def test_a_fault_later_or_of_another_kind_is_a_crash(error: Exception, phase: str, step: int) -> None:
    found = classify(error, phase, step)
    assert isinstance(found, Crashed)
    assert (found.phase, found.infrastructure) == (phase, False)


def test_ranks_that_cannot_meet_are_the_infrastructure_s_fault_only_while_they_meet() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(dist.DistError) as nobody:
        TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))
    first = TCPStore("127.0.0.1", 0, 1, is_master=True)
    with pytest.raises(dist.DistError) as taken:
        TCPStore("127.0.0.1", first.port, 1, is_master=True)
    for error in (nobody.value, taken.value):
        meeting = classify(error, "process_group")
        assert isinstance(meeting, Crashed)
        assert meeting.infrastructure, error
        training = classify(error, "measure", 4)
        assert isinstance(training, Crashed)
        assert not training.infrastructure


def test_a_full_disk_is_the_machines_fault() -> None:
    found = [classify(OSError(number, "no"), "warmup", 3) for number in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)]
    assert [isinstance(each, Crashed) and each.infrastructure for each in found] == [True, True, False]


def test_the_detail_ends_with_the_error_and_has_an_end() -> None:
    def deep(levels: int) -> None:
        if not levels:
            raise KeyError("the reason")
        deep(levels - 1)

    with pytest.raises(KeyError) as caught:
        deep(200)
    found = classify(caught.value, "measure")
    assert isinstance(found, Crashed)
    assert found.detail.strip().endswith("KeyError: 'the reason'")
    assert len(found.detail) <= DETAIL_CHARACTERS
    refused = classify(ValueError("x" * 10_000), "build")
    assert isinstance(refused, Rejected)
    assert len(refused.reason) == DETAIL_CHARACTERS
