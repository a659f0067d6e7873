"""Where compilers keep what they made, one folder a stack: a kernel compiled once is never compiled again.

The first step of a first trial compiles (PTX for this GPU, Triton, Inductor): 6 to 11 s on one H200 against 2 to 3 s
with warm caches. The caches are content-addressed; a folder of their own for each stack keeps an upgrade from reading
what another version wrote, and lets the old one be deleted by hand.
"""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

from train_worker.environment import driver_version
from train_worker.gpu_memory import device_names

FOLDER = "MOETUNE_CACHE"  # the user's word for where; default $XDG_CACHE_HOME/moetune or ~/.cache/moetune
PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "nvidia-nccl-cu13",
)
VARIABLES = {
    "CUDA_CACHE_PATH": "cuda", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "NCCL_EP_JIT_CACHE_DIR": "nccl_ep",
}  # fmt: skip


def cache_environment(root: Path | None = None) -> dict[str, str]:
    """Variables for the clean parent and every rank; {} where `root` is read-only or nobody's home can be found. What
    the user has set stays."""
    try:
        folder = (root or cache_root()) / stack_key()
        for name in VARIABLES.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: `expanduser` of a user without a home, as in many containers
        return {}
    if not os.access(folder, os.W_OK):
        return {}
    return {variable: str(folder / name) for variable, name in VARIABLES.items() if variable not in os.environ}


def cache_root() -> Path:
    """$MOETUNE_CACHE, else the user's cache folder."""
    if chosen := os.environ.get(FOLDER):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "moetune"


def stack_key() -> str:
    """12 hex digits of what compiles and for what: packages, Python, driver, GPU names. Asks nothing of CUDA."""
    facts = [
        platform.python_version(),
        str(driver_version()),
        *device_names(),
        *(f"{p} {_version(p)}" for p in PACKAGES),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
