"""The stack and hardware as seen on this worker. No host name, no user name."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Any, Literal

from search_spaces.shapes import StackVersions
from train_worker.outcome import Fingerprint


def fingerprint(device: Literal["cpu", "cuda"]) -> Fingerprint:
    """Versions come from installed metadata, nothing heavy is imported for them; on cuda torch is asked for the GPU.

    Raises importlib.metadata.PackageNotFoundError where megatron-core or torch is not installed.
    """
    nccl, cuda, gpu = _accelerator() if device == "cuda" else (None, None, {})
    stack = StackVersions(
        megatron_core=importlib.metadata.version("megatron-core"),
        torch=importlib.metadata.version("torch"),
        transformer_engine=_version("transformer-engine"),
        nccl=nccl,
        cuda=cuda,
        deep_ep=_version("deep-ep"),
        hybrid_ep=None,
    )
    return Fingerprint(
        stack=stack,
        python=platform.python_version(),
        device=device,
        device_name=gpu.get("device_name") or cpu_model_name(),
        driver=gpu.get("driver"),
        compute_capability=gpu.get("compute_capability"),
    )


def require_transformer_engine() -> None:
    """Raises ImportError where Transformer Engine is missing: Megatron's local layers would be other kernels.

    Raised while a trial is built it becomes `Rejected` with rule "stack-refuses" (`train_worker.failures`).
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise ImportError("transformer-engine is not installed on this worker: trials on cuda are built from it")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, such as "AMD EPYC 9B14"; the machine type where /proc does not tell."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _accelerator() -> tuple[str | None, str | None, dict[str, Any]]:
    """(NCCL version, CUDA version, facts of GPU 0)."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    facts = {
        "device_name": properties.name,
        "driver": driver_version(),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }
    return nccl, torch.version.cuda, facts


def driver_version(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA kernel driver: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  ..."."""
    if not version_file.exists():
        return None
    words = version_file.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)
