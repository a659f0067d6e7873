"""Which optional packages this worker can really use: importable, with the names that Megatron-Core takes from them.

Asked in short-lived processes of their own: importing them starts threads and touches CUDA, which would make the clean
parent unfit to be forked, and a package built for another torch can end the process that imports it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

PROBE_LIMIT_S = 120.0
DETAIL_CHARACTERS = 200


class Package(NamedTuple):
    """`module` must import and have `names`; "a.b:c" names c of the submodule a.b.

    `after`: what must be imported before it. `distribution`: who brings it, where its name does not say so.
    """

    word: str
    module: str
    names: tuple[str, ...] = ()
    after: str = ""
    distribution: str = ""


# As megatron/core 0.19.2 imports them: transformer/moe/fused_a2a.py:11,271,610, extensions/transformer_engine.py and
# tensor_parallel/layers.py:51,680,684 (Apex builds a module of its own for it, which others build alone).
# There are wheels of DeepEP without EventOverlap; Megatron then says that DeepEP is not installed.
PACKAGES = (
    Package("transformer_engine", "transformer_engine.pytorch"),
    Package("deep_ep", "deep_ep", ("Buffer", "deep_ep.utils:EventHandle", "deep_ep.utils:EventOverlap")),
    Package("hybrid_ep", "deep_ep", ("HybridEPBuffer",)),
    Package(
        "apex", "fused_weight_gradient_mlp_cuda", ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), "torch", "apex"
    ),
)


class Usable(NamedTuple):
    """`version` None: it cannot be used, and `why` says why ("" where it is simply not there)."""

    version: str | None
    why: str = ""


class Probe:
    """Asks from the moment it is made; `answers` waits. Costs no process where none of the packages is there."""

    def __init__(self, packages: tuple[Package, ...] = PACKAGES) -> None:
        self._found = {each.word: Usable(None) for each in packages}
        self._left = [each for each in packages if importlib.util.find_spec(each.module.partition(".")[0])]
        self._process = _ask(self._left) if self._left else None

    def answers(self) -> dict[str, Usable]:
        while self._process is not None:
            answered = dict(_answers(self._process, self._left))
            self._found |= answered
            self._left = [each for each in self._left if each.word not in answered]
            self._process = _ask(self._left) if self._left else None
        return self._found


_known: dict[str, Usable] = {}


def usable_packages(probe: Probe | None = None) -> dict[str, Usable]:
    """Each word of `PACKAGES`, asked once a process (by `probe`, where one was begun before); forks inherit it."""
    if not _known:
        _known.update((probe or Probe()).answers())
    return _known


def _ask(packages: list[Package]) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "train_worker.packages", json.dumps(packages)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _answers(process: "subprocess.Popen[bytes]", packages: list[Package]) -> Iterator[tuple[str, Usable]]:
    """The answers of one process; where it died, the last is about the package that it died of."""
    try:
        output, _ = process.communicate(timeout=PROBE_LIMIT_S)
        why = f"importing it ended the process with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        why = f"importing it took more than {PROBE_LIMIT_S:.0f} s"
    lines = [json.loads(line) for line in output.decode().splitlines() if line.startswith('["answer"')]
    yield from ((word, Usable(version, reason)) for _, word, version, reason in lines)
    if len(lines) < len(packages):
        yield packages[len(lines)].word, Usable(None, why)


def look(package: Package) -> Usable:
    """Import it here. Meant for the short-lived process."""
    try:
        if package.after:
            importlib.import_module(package.after)
        module = importlib.import_module(package.module)
        for name in package.names:
            owner, _, attribute = name.rpartition(":")
            getattr(importlib.import_module(owner or package.module), attribute)
    except Exception as error:  # noqa: BLE001 - a broken package raises anything
        said = " ".join(f"{type(error).__name__}: {error}".split(" (/")[0].split())  # without the file's path
        return Usable(None, said[:DETAIL_CHARACTERS])
    top = package.module.partition(".")[0]
    return Usable(_version(top, module, package.distribution or top.replace("_", "-")))


def _version(name: str, module: object, distribution: str) -> str:
    """By its own word, else by what pip knows, else "unknown"."""
    from importlib import metadata

    own = getattr(module, "__version__", None) or getattr(sys.modules.get(name), "__version__", None)
    try:
        return str(own or metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return "unknown"


def main() -> None:
    for package in json.loads(sys.argv[1]):
        asked = Package(*package)
        found = look(asked)
        print(json.dumps(["answer", asked.word, *found]), flush=True)


if __name__ == "__main__":
    main()
