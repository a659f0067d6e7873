"""The stack and hardware as seen on this worker. No host name, no user name."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from search_spaces.shapes import StackVersions
from train_worker.outcome import Fingerprint
from train_worker.packages import usable_packages

APART_LIMIT_S = 300.0


def fingerprint(device: Literal["cpu", "cuda"]) -> Fingerprint:
    """Versions come from installed metadata; optional packages count only where they can be used (`packages`).

    On cuda torch is asked for the GPU, in this process. Raises importlib.metadata.PackageNotFoundError where
    megatron-core or torch is not installed.
    """
    nccl, cuda, gpu = _accelerator() if device == "cuda" else (None, None, {})
    packages = usable_packages()
    stack = StackVersions(
        megatron_core=importlib.metadata.version("megatron-core"),
        torch=importlib.metadata.version("torch"),
        nccl=nccl,
        cuda=cuda,
        **{word: found.version for word, found in packages.items()},
    )
    return Fingerprint(
        stack=stack,
        python=platform.python_version(),
        device=device,
        device_name=gpu.get("device_name") or cpu_model_name(),
        driver=gpu.get("driver"),
        compute_capability=gpu.get("compute_capability"),
        gpu_arch=gpu.get("gpu_arch"),
        unusable={word: found.why for word, found in packages.items() if found.why},
    )


def fingerprint_apart(device: Literal["cpu", "cuda"]) -> Fingerprint:
    """This machine's, from a process of its own on cuda: a driver that asked itself would keep a context on the GPU.

    Raises RuntimeError with the words of what failed there.
    """
    if device == "cpu":
        return fingerprint(device)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "train_worker.environment", device]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=APART_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"no answer in {APART_LIMIT_S:.0f} s") from late
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return Fingerprint.model_validate_json(done.stdout.strip().splitlines()[-1])


def require_transformer_engine() -> None:
    """Raises ImportError where Transformer Engine is missing: Megatron's local layers would be other kernels.

    Raised while a trial is built it becomes `Rejected` with rule "stack-refuses" (`train_worker.failures`).
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise ImportError("transformer-engine is not installed on this worker: trials on cuda are built from it")


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
    nccl = loaded_nccl() or ".".join(str(part) for part in torch.cuda.nccl.version())
    facts = {
        "device_name": properties.name,
        "gpu_arch": gpu_arch(properties.name, properties.major, properties.minor),
        "driver": driver_version(),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }
    return nccl, torch.version.cuda, facts


def loaded_nccl(library: str = "libnccl.so.2") -> str | None:
    """The version of the NCCL that this process uses, such as "2.30.7"; None where no such library is loaded.

    torch.cuda.nccl.version() names the one that torch was compiled with. NCCL packs from 2.9 on as 10000 x major +
    100 x minor + patch (nccl.h.in).
    """
    packed = ctypes.c_int()
    try:
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        if loaded.ncclGetVersion(ctypes.byref(packed)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{packed.value // 10_000}.{packed.value // 100 % 100}.{packed.value % 100}"


def gpu_arch(name: str, major: int, minor: int) -> str:
    """As a sweep file says it: ("NVIDIA H100 80GB HBM3", 9, 0) -> "H100 sm_90"."""
    words = name.removeprefix("NVIDIA ").split()
    numbered = next((place for place, word in enumerate(words) if any(letter.isdigit() for letter in word)), 0)
    return f"{' '.join(words[: numbered + 1]).split('-')[0]} sm_{major}{minor}"


def driver_version(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA kernel driver: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  ..."."""
    if not version_file.exists():
        return None
    words = version_file.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def main() -> None:
    print(fingerprint("cuda" if sys.argv[1] == "cuda" else "cpu").model_dump_json())


if __name__ == "__main__":
    main()
