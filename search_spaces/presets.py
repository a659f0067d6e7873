"""Known models (`presets/*.yaml`) and GPUs, by name. To add a model: one YAML file with its source in a comment."""

import re
from functools import cache, lru_cache
from pathlib import Path

from pydantic import Field, PositiveInt
from ruamel.yaml import YAML

from search_spaces.errors import Fault, InputError
from search_spaces.shapes import ModelShape, Noun
from search_spaces.space import nearest

_FOLDER = Path(__file__).parent / "presets"
_GB, _GIB = 10**9, 2**30


class GpuShape(Noun):
    """One GPU model.

    `memory_bytes` of one GPU as CUDA reports it, where that is known (H200: 139.8 GiB, measured; B200: pytorch/ao#4002;
    A100, H100: what torch's messages of 80 GB cards say), else the datasheet's figure, which is less.
    """

    name: str
    gpu_arch: str = Field(description='name and compute capability, such as "H200 sm_90"')
    memory_bytes: PositiveInt
    gpus_per_node: PositiveInt = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuShape(name="A100", gpu_arch="A100 sm_80", memory_bytes=int(79.1 * _GIB)),
        GpuShape(name="RTX3090", gpu_arch="RTX3090 sm_86", memory_bytes=24 * _GB),
        GpuShape(name="RTX4090", gpu_arch="RTX4090 sm_89", memory_bytes=24 * _GB),
        GpuShape(name="L40S", gpu_arch="L40S sm_89", memory_bytes=48 * _GB),
        GpuShape(name="H100", gpu_arch="H100 sm_90", memory_bytes=int(79.1 * _GIB)),
        GpuShape(name="H20", gpu_arch="H20 sm_90", memory_bytes=96 * _GB),
        GpuShape(name="GH200", gpu_arch="GH200 sm_90", memory_bytes=96 * _GB, gpus_per_node=4),
        GpuShape(name="H200", gpu_arch="H200 sm_90", memory_bytes=int(139.8 * _GIB)),
        GpuShape(name="B200", gpu_arch="B200 sm_100", memory_bytes=int(178.3 * _GIB)),
        GpuShape(name="GB200", gpu_arch="GB200 sm_100", memory_bytes=186 * _GB, gpus_per_node=4),
        GpuShape(name="B300", gpu_arch="B300 sm_103", memory_bytes=262 * _GB),
        GpuShape(name="GB300", gpu_arch="GB300 sm_103", memory_bytes=278 * _GB, gpus_per_node=4),
        GpuShape(name="RTX5090", gpu_arch="RTX5090 sm_120", memory_bytes=32 * _GB),
        GpuShape(name="RTXPRO6000", gpu_arch="RTXPRO6000 sm_120", memory_bytes=96 * _GB),
    )
}


@cache
def model_names() -> tuple[str, ...]:
    """Every model preset, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def load_model(name: str) -> ModelShape:
    """A preset's facts. Raises InputError with the nearest name, or the known ones."""
    if name not in model_names():
        fault = Fault(f"no model preset {name!r}", hint=nearest(name, model_names()))
        raise InputError([fault], f"use one of: {', '.join(model_names())}; or give model.hf_config or model.facts")
    return ModelShape.model_validate(YAML(typ="safe", pure=True).load(_FOLDER / f"{name}.yaml"))


def load_gpu(name: str) -> GpuShape:
    """A GPU's facts; upper and lower case are one. Raises InputError with the nearest name, or the known ones."""
    if name.upper() not in GPUS:
        fault = Fault(f"no GPU {name!r}", hint=nearest(name.upper(), list(GPUS)))
        raise InputError([fault], f"use one of: {', '.join(GPUS)}")
    return GPUS[name.upper()]


# Compute capabilities that CUDA 12 and 13 know, as "sm_90" has them.
ARCHITECTURES = ("70", "75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121")


_MAKERS = frozenset({"NVIDIA", "GEFORCE", "TESLA", ""})
_BUILD = re.compile(r"(SXM\d?|PCIE|NVL\d*|\d+GB.*)?")  # what follows a model: "H100SXM5", "H10080GB"


def _listed(name: str) -> GpuShape | None:
    """The listed GPU that a name means: "NVIDIA RTX PRO 6000 Blackwell", "gb200-nvl72"; "H1000" is none."""
    words = [word for word in re.split(r"[\s_/-]+", name.upper()) if word not in _MAKERS]
    leading = ["".join(words[:count]) for count in range(1, 4)]
    for lead in leading:
        for key, gpu in GPUS.items():
            if lead.startswith(key) and _BUILD.fullmatch(lead.removeprefix(key)):
                return gpu
    return None


@lru_cache(maxsize=1000)
def gpu_named(text: str) -> GpuShape:
    """A GPU by name ("H100", "NVIDIA H100 80GB HBM3"), or by name and architecture ("X100 sm_90"), listed or not.

    Of an unlisted one the memory is told as the smallest there is. Raises InputError with the known ones, and where
    a listed one is said to be of another architecture.
    """
    name, mark, digits = (part.strip() for part in text.rpartition("sm_"))
    name, digits = name or (text.strip() if not mark else ""), digits.rstrip("af") if mark else ""
    if mark and digits not in ARCHITECTURES:
        known = ", ".join(f"sm_{each}" for each in ARCHITECTURES)
        raise InputError([Fault(f"no GPU architecture {text!r}", hint=f"known: {known}")])
    listed = _listed(name)
    if listed is not None and (not mark or listed.gpu_arch.endswith(f"sm_{digits}")):
        return listed
    if listed is not None:
        hint = "give its own architecture, or leave it out"
        raise InputError([Fault(f"{listed.name} is {listed.gpu_arch.split()[-1]}, not sm_{digits}", hint=hint)])
    if not mark:
        hint = f'known: {", ".join(GPUS)}; or give the architecture too, such as "X100 sm_90"'
        raise InputError([Fault(f"no GPU {text!r}", hint=hint)])
    smallest = min(gpu.memory_bytes for gpu in GPUS.values())
    return GpuShape(name=name or text, gpu_arch=text.strip(), memory_bytes=smallest)
