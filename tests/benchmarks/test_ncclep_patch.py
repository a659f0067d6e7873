"""The patched copy of Megatron-Core: it says how many experts a token has, and that it is no released version."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.ncclep_patch import EDITS, copy_to, patched

# Transformer Engine is pretended: what of it is called, and how, is what the patch is about.
CALLED = """
from importlib.metadata import version
from types import SimpleNamespace
from megatron.core.transformer.moe import fused_a2a, token_dispatcher

fused_a2a.HAVE_TE_EP = True
fused_a2a.te_ep = SimpleNamespace(
    _BOOTSTRAPPED=False, ep_bootstrap=lambda group, **said: print(group, sorted(said.items()))
)
manager = SimpleNamespace(
    _bootstrapped=False, num_local_tokens=100, router_topk=8, rank_capacity_factor=2.0, alignment=0, group="group",
    num_experts=16, hidden_dim=32, zero_copy=False, config=SimpleNamespace(moe_flex_dispatcher_num_sms=None),
)
token_dispatcher._NCCLEPManager._ensure_bootstrap(manager)
print(version("megatron-core"), fused_a2a.__file__)
"""

# An operator as Transformer Engine's are: what it writes to may be left out.
OPERATOR = """
import torch

@torch.library.custom_op("moetune_test::send", mutates_args=("into", "scale"), device_types="cpu")
def send(tokens: torch.Tensor, into: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    into.copy_(tokens)
"""
SENT = """
import importlib
import sys

import torch
from megatron.core.transformer.moe import fused_a2a

assert not fused_a2a.HAVE_TE_EP
sys.path.append(sys.argv[1])  # a Transformer Engine of this one file, for this one module
importlib.reload(fused_a2a)
assert fused_a2a.HAVE_TE_EP
into, scale = torch.zeros(3), torch.zeros(3)
for given in ((), (None,), (scale,)):
    before = into._version
    torch.ops.moetune_test.send(torch.ones(3), into, *given)
    assert into._version == before + 1, (before, into._version)
print("sent", into.sum().item())
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    assert copy_to(folder) == f"{version('megatron-core')}+ncclep"
    return folder


def printed(code: str, copy: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="a real Transformer Engine is imported first")
def test_an_operator_may_be_called_without_an_argument_that_it_writes_to(copy: Path, tmp_path: Path) -> None:
    """And alone it fails, in this torch: where a newer one does not, the edit has had its day."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package / "ep.py").write_text(OPERATOR)
    done = printed(SENT, copy, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "sent 3.0"
    alone = OPERATOR + "send(torch.ones(3), torch.zeros(3))"
    assert "IndexError: tuple index out of range" in printed(alone, copy).stderr


def test_a_rank_says_how_many_experts_a_token_has(copy: Path) -> None:
    done = printed(CALLED, copy)
    assert done.returncode == 0, done.stderr
    called, which = done.stdout.splitlines()[-2:]
    assert called.startswith("group ")
    assert "('num_topk', 8)" in called
    assert "('max_tokens_per_rank', 128)" in called
    assert which.split()[0].endswith("+ncclep")
    assert str(copy) in which


def test_another_release_is_not_patched() -> None:
    for edits in EDITS.values():
        with pytest.raises(ValueError, match=r"not as in Megatron-Core 0\.19\.2"):
            patched("def ensure_nccl_ep_bootstrapped(): ...", edits)
