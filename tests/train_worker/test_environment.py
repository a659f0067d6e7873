"""The fingerprint names the stack and the hardware, and nobody."""

import getpass
import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from train_worker.environment import cpu_model_name, driver_version, fingerprint, fingerprint_apart, gpu_arch
from train_worker.outcome import Fingerprint


def test_cpu_fingerprint_has_the_installed_versions() -> None:
    found = fingerprint("cpu")
    assert found.stack.megatron_core == importlib.metadata.version("megatron-core")
    assert found.stack.torch == importlib.metadata.version("torch")
    assert (found.stack.nccl, found.stack.cuda, found.driver, found.compute_capability) == (None, None, None, None)
    assert found.python == platform.python_version()
    assert found.device_name
    assert found.digest == fingerprint("cpu").digest


def test_fingerprint_names_no_host_and_no_user() -> None:
    text = fingerprint("cpu").model_dump_json()
    assert f'"{socket.gethostname()}"' not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags: x\nmodel name\t: other\n", "AMD EPYC 9B14"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", platform.machine()),  # Arm's file has no model name
    ],
)
def test_cpu_model_name(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model_name(tmp_path / "cpuinfo") == name


def test_cpu_model_name_without_proc(tmp_path: Path) -> None:
    assert cpu_model_name(tmp_path / "missing") == platform.machine()


def test_the_version_of_nccl_is_that_of_the_loaded_library() -> None:
    """In a process of its own: which libraries this one has loaded, other tests decide."""
    code = (
        "from train_worker.environment import loaded_nccl as found; before = found(); import torch; "
        "built = torch.version.cuda and '.'.join(map(str, torch.cuda.nccl.version())); "
        "print(before, found() == built, found('libc.so.6'), found('libno.so.1'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["None", "True", "None", "None"]


def test_driver_version(tmp_path: Path) -> None:
    assert driver_version(tmp_path / "missing") is None
    line = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version:  gcc 12.3.0\n"
    )
    (tmp_path / "version").write_text(line)
    assert driver_version(tmp_path / "version") == "580.82.07"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (("NVIDIA H200", 9, 0), "H200 sm_90"),
        (("NVIDIA H100 80GB HBM3", 9, 0), "H100 sm_90"),
        (("NVIDIA A100-SXM4-80GB", 8, 0), "A100 sm_80"),
        (("NVIDIA GB200", 10, 0), "GB200 sm_100"),
        (("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0), "RTX PRO 6000 sm_120"),
    ],
)
def test_gpu_arch_is_written_as_in_a_sweep_file(name: tuple[str, int, int], words: str) -> None:
    assert gpu_arch(*name) == words


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_a_gpu_is_asked_in_a_process_of_its_own_and_its_absence_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)nvidia|cuda"):
        fingerprint_apart("cuda")


def test_the_digest_of_a_stack_seen_by_an_earlier_release_is_as_it_was() -> None:
    """Or every store would say that the stack had changed."""
    tables = Path(__file__).parents[2] / "benchmarks" / "tables"
    lines = [line for path in tables.glob("two_gpus_*.jsonl") for line in path.read_text().splitlines()]
    rows = [row for row in map(json.loads, lines) if "fingerprint" in row]
    assert len(rows) > 50
    found = [(Fingerprint.model_validate(row["fingerprint"]), row["fingerprint_digest"]) for row in rows]
    assert all(kept.digest == digest for kept, digest in found)
    kept, digest = found[0]
    with_apex = kept.model_copy(update={"stack": kept.stack.model_copy(update={"apex": "0.1"})})
    assert with_apex.digest != digest
