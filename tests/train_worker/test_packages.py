"""What can really be used is asked by importing it, in processes that may die of it: here on small packages made up."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from train_worker.environment import fingerprint
from train_worker.packages import PACKAGES, Package, Probe, Usable, usable_packages

WHOLE = "class EventHandle: pass\nclass EventOverlap: pass\n"
OLD = "class EventHandle: pass\n"
BUFFERS = "class Buffer: pass\nclass HybridEPBuffer: pass\n"
Add = Callable[[str, dict[str, str]], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Puts a package on the path of this process: its name, and the text of each of its modules."""

    def install(name: str, modules: dict[str, str]) -> None:
        (tmp_path / name).mkdir()
        for module, text in modules.items():
            (tmp_path / name / f"{module}.py").write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def thread_count() -> int:
    """Native ones too: a process with a second one could not be forked safely."""
    return len(list(Path("/proc/self/task").iterdir()))


def asked() -> dict[str, Usable]:
    return Probe().answers()


def test_a_whole_package_counts_with_its_version(add: Add) -> None:
    add("deep_ep", {"__init__": f'__version__ = "1.2.1"\n{BUFFERS}', "utils": WHOLE})
    found = asked()
    assert found["deep_ep"] == found["hybrid_ep"] == Usable("1.2.1")
    assert "deep_ep" not in sys.modules


def test_the_main_branch_has_no_hybrid_buffer(add: Add) -> None:
    add("deep_ep", {"__init__": "class Buffer: pass", "utils": WHOLE})
    assert asked()["deep_ep"] == Usable("unknown")
    assert asked()["hybrid_ep"] == Usable(None, "AttributeError: module 'deep_ep' has no attribute 'HybridEPBuffer'")


def test_apex_counts_by_the_kernel_that_megatron_takes_from_it(add: Add) -> None:
    assert asked()["apex"] == Usable(None)
    torch_first = "import sys\nassert 'torch' in sys.modules\n"
    half = f"{torch_first}def wgrad_gemm_accum_fp32(): ...\n"
    add("fused_weight_gradient_mlp_cuda", {"__init__": half})
    assert "wgrad_gemm_accum_fp16" in asked()["apex"].why  # what it takes where gradients are not in fp32
    module = Path(sys.path[0]) / "fused_weight_gradient_mlp_cuda" / "__init__.py"
    module.write_text(f"{half}def wgrad_gemm_accum_fp16(): ...\n")
    assert asked()["apex"] == Usable("unknown")
    add("apex-0.1.dist-info", {"METADATA": ""})
    metadata = Path(sys.path[0]) / "apex-0.1.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    assert asked()["apex"] == Usable("0.1")


def test_an_old_wheel_without_event_overlap_counts_as_missing(add: Add) -> None:
    add("deep_ep", {"__init__": BUFFERS, "utils": OLD})
    assert asked()["deep_ep"].version is None
    assert "EventOverlap" in asked()["deep_ep"].why
    assert asked()["hybrid_ep"].version == "unknown"


def test_a_package_that_raises_counts_as_missing_and_names_no_path(add: Add) -> None:
    add("transformer_engine", {"__init__": "", "pytorch": "from transformer_engine import nothing_of_the_kind"})
    found = asked()["transformer_engine"]
    assert found.version is None
    assert found.why.startswith("ImportError: cannot import name 'nothing_of_the_kind'")
    assert "/" not in found.why


def test_a_package_that_kills_its_process_hides_no_other(add: Add) -> None:
    add("transformer_engine", {"__init__": "", "pytorch": "import os; os.abort()"})
    add("deep_ep", {"__init__": BUFFERS, "utils": WHOLE})
    found = asked()
    assert found["transformer_engine"] == Usable(None, "importing it ended the process with status -6")
    assert found["deep_ep"].version == "unknown"


def test_a_package_that_hangs_is_given_up(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_worker.packages.PROBE_LIMIT_S", 1.0)
    add("sleepy", {"__init__": "import time; time.sleep(60)"})
    found = Probe((Package("sleepy", "sleepy"),)).answers()
    assert found == {"sleepy": Usable(None, "importing it took more than 1 s")}


def test_what_a_package_prints_is_no_answer(add: Add) -> None:
    add("deep_ep", {"__init__": f"print('hello')\n{BUFFERS}", "utils": WHOLE})
    assert asked()["deep_ep"].version == "unknown"


def test_nothing_is_started_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    absent = (Package("absent", "no_such_package"), Package("deeper", "no_such_package.inside"))
    assert Probe(absent).answers() == {"absent": Usable(None), "deeper": Usable(None)}


def test_asking_leaves_one_thread_and_is_remembered(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_worker.packages._known", {})
    add("deep_ep", {"__init__": BUFFERS, "utils": WHOLE})
    before = thread_count()
    first = dict(usable_packages(Probe()))
    assert thread_count() == before
    assert set(first) == {package.word for package in PACKAGES}
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("asked again"))
    assert usable_packages() == first


def test_the_fingerprint_has_what_can_be_used_and_says_what_cannot(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_worker.packages._known", {})
    add("deep_ep", {"__init__": BUFFERS, "utils": OLD})
    found = fingerprint("cpu")
    assert (found.stack.deep_ep, found.stack.hybrid_ep) == (None, "unknown")
    assert "EventOverlap" in found.unusable["deep_ep"]
    assert found.digest == found.model_copy(update={"unusable": {}}).digest
