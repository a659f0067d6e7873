"""The patched copy of Megatron-Core: it says how many experts a token has, and that it is no released version."""

import os
import subprocess
import sys
from importlib.metadata import version
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


def test_a_rank_says_how_many_experts_a_token_has(tmp_path: Path) -> None:
    said = copy_to(tmp_path)
    assert said == f"{version('megatron-core')}+ncclep"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", CALLED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    called, which = done.stdout.splitlines()[-2:]
    assert called.startswith("group ")
    assert "('num_topk', 8)" in called
    assert "('max_tokens_per_rank', 128)" in called
    assert which.split()[0] == said
    assert str(tmp_path) in which


def test_another_release_is_not_patched() -> None:
    for edits in EDITS.values():
        with pytest.raises(ValueError, match=r"not as in Megatron-Core 0\.19\.2"):
            patched("def ensure_nccl_ep_bootstrapped(): ...", edits)
