"""Known models (`presets/*.yaml`) and GPUs, by name. To add a model: one YAML file with its source in a comment."""

from pathlib import Path

from pydantic import Field, PositiveInt
from ruamel.yaml import YAML

from search_spaces.errors import Fault, InputError
from search_spaces.shapes import ModelShape, Noun
from search_spaces.space import nearest

_FOLDER = Path(__file__).parent / "presets"
_GB = 10**9


class GpuShape(Noun):
    """One GPU model. `memory_bytes` is the datasheet's figure for one GPU in a full node."""

    name: str
    gpu_arch: str = Field(description='name and compute capability, such as "H200 sm_90"')
    memory_bytes: PositiveInt
    gpus_per_node: PositiveInt = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuShape(name="A100", gpu_arch="A100 sm_80", memory_bytes=80 * _GB),
        GpuShape(name="L40S", gpu_arch="L40S sm_89", memory_bytes=48 * _GB),
        GpuShape(name="H100", gpu_arch="H100 sm_90", memory_bytes=80 * _GB),
        GpuShape(name="H200", gpu_arch="H200 sm_90", memory_bytes=141 * _GB),
        GpuShape(name="B200", gpu_arch="B200 sm_100", memory_bytes=180 * _GB),
        GpuShape(name="GB200", gpu_arch="GB200 sm_100", memory_bytes=186 * _GB, gpus_per_node=4),
        GpuShape(name="B300", gpu_arch="B300 sm_103", memory_bytes=262 * _GB),
        GpuShape(name="GB300", gpu_arch="GB300 sm_103", memory_bytes=278 * _GB, gpus_per_node=4),
    )
}


def model_names() -> tuple[str, ...]:
    """Every model preset, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


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
