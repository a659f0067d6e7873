"""Stand-ins for what Megatron Bridge imports and a CPU lacks: Transformer Engine, large packages, a GPU with a name.

Every name of a stand-in package is a class, so that Megatron's layers can be derived from it; nothing can be run.
"""

import abc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

ENGINE = "2.20.2"
# The first three need a GPU or a build; the others are large, and no configuration touches them.
PACKAGES = (
    "transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext", "datasets", "diffusers",
    "megatron.energon", "tensorboard",
)  # fmt: skip
# Torch's names of the GPUs, and their compute capability.
DEVICES = {
    "A100": ("NVIDIA A100-SXM4-80GB", 8, 0), "H100": ("NVIDIA H100 80GB HBM3", 9, 0), "B200": ("NVIDIA B200", 10, 0),
    "GB200": ("NVIDIA GB200", 10, 0), "B300": ("NVIDIA B300", 10, 3), "GB300": ("NVIDIA GB300", 10, 3),
    "VR200": ("NVIDIA VR200", 10, 7), "RTX PRO 6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0),
}  # fmt: skip


class FusedAdam:
    """Megatron-Core looks at the names of its arguments (core/optimizer/optimizer_config.py:452)."""

    def __init__(
        self,
        params: Any = None,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        del params, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad, store_param_remainders


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _decorate(_: Any, function: Any = None, *__: Any, **___: Any) -> Any:
    return function


_BODY = {"__init__": _nothing, "__call__": _decorate}


class _Anything(abc.ABCMeta):
    """A class that has every attribute, each a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), dict(_BODY))
        setattr(cls, name, made)
        return made


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = FusedAdam if name == "FusedAdam" else _Anything(name, (), dict(_BODY))
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        known = any(f"{fullname}.".startswith(f"{package}.") for package in PACKAGES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__version__ = ENGINE  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Before megatron is imported; without inductor, which saves seconds."""
    import torch

    def as_it_is(model: Any = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = as_it_is
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def device(gpu: str) -> Iterator[None]:
    """As if the first GPU were this one."""
    name, major, minor = DEVICES[gpu]
    properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.get_device_name", return_value=name),
        mock.patch("torch.cuda.get_device_capability", return_value=(major, minor)),
    ):
        yield
