"""Whether a model can be trained in the memory of this machine: sums that can be done by hand, and who is told."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from search_spaces.errors import ResourceMissing
from search_spaces.named_spaces import NAMED_SPACES
from search_spaces.presets import load_model
from search_spaces.shapes import ClusterShape, TrainingShape
from tests.end_to_end.sweeps import write_sweep
from tuner.commands import run as run_command
from tuner.commands.plan import plan
from tuner.commands.run import RunOptions, run
from tuner.cpu_memory import Shortage, default_bytes, least_bytes, machine_bytes, shortage
from tuner.sweep import load_sweep

GIB = 2**30
TRAINING = TrainingShape(sequence_length=128, global_batch_size=16, params_dtype="fp32")
DEFAULT = NAMED_SPACES["laptop"].default()
CUT, WHOLE = load_model("qwen3-30b-a3b-4l"), load_model("qwen3-30b-a3b")


def ranks(count: int, at_once: int = 1) -> ClusterShape:
    every = count * at_once
    return ClusterShape(device="cpu", workers=every, workers_per_trial=count, workers_per_node=every)


def found(there_gib: float, cluster: ClusterShape, model: Any = CUT) -> Shortage | None:
    return shortage(model, cluster, TRAINING, DEFAULT, int(there_gib * GIB))


def test_each_parameter_is_held_once_at_least_with_its_gradient_and_two_moments() -> None:
    parameters = 30.53e9  # the model card's 30.5 B
    assert least_bytes(WHOLE, ranks(1), TRAINING) == pytest.approx(16 * parameters, rel=0.002)
    assert least_bytes(WHOLE, ranks(8), TRAINING) == least_bytes(WHOLE, ranks(1), TRAINING)
    assert least_bytes(WHOLE, ranks(2, 3), TRAINING) == 3 * least_bytes(WHOLE, ranks(1), TRAINING)
    sgd = TRAINING.model_copy(update={"optimizer": "sgd"})
    assert least_bytes(WHOLE, ranks(1), sgd) < least_bytes(WHOLE, ranks(1), TRAINING)


def test_the_default_has_every_rank_hold_the_model() -> None:
    """One layout: two data-parallel ranks without a distributed optimizer."""
    assert default_bytes(CUT, ranks(2), TRAINING, DEFAULT) > 2 * least_bytes(CUT, ranks(1), TRAINING)


def test_what_fits_what_does_not_by_default_and_what_never_does() -> None:
    assert found(24, ranks(2), load_model("tiny-moe")) is None
    never = found(24, ranks(2))
    assert never is not None
    assert never.hopeless
    assert "alone take 46.4 GiB; this machine has 24.0 GiB" in never.what
    assert "fit here: tiny-moe)" in never.next_step
    default = found(80, ranks(2))  # 46.4 GiB once, 95.8 on both ranks
    assert default is not None
    assert not default.hopeless
    assert "the default configuration of qwen3-30b-a3b-4l takes 95.8 GiB on 2 ranks" in default.what
    assert found(128, ranks(2)) is None
    larger = found(128, ranks(2), WHOLE)
    assert larger is not None
    assert "fit here: qwen3-30b-a3b-4l, tiny-moe)" in larger.next_step
    both = found(80, ranks(2, 2))
    assert both is not None
    assert both.hopeless
    assert "92.8 GiB, 2 trials at once" in both.what


def test_nothing_is_said_of_gpus_and_of_an_unknown_machine() -> None:
    gpus = ClusterShape(device="cuda", workers=2, workers_per_trial=2, workers_per_node=2, gpu_arch="H200 sm_90")
    assert found(1, gpus, WHOLE) is None
    assert shortage(WHOLE, ranks(2), TRAINING, DEFAULT, None) is None
    assert (machine_bytes() or 0) > GIB


@pytest.fixture
def on_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(*_: Any) -> Any:
        raise AssertionError("a worker was asked")

    monkeypatch.setattr("tuner.cpu_memory.machine_bytes", lambda: 2**20)
    monkeypatch.setattr(run_command, "_stack_of_workers", reach)


@pytest.mark.usefixtures("on_a_small_machine")
def test_plan_says_it_and_run_refuses_it_before_anything_is_asked_or_written(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path, 3))
    assert any("small cannot be trained here" in warning for warning in plan(sweep).warnings)
    with pytest.raises(ResourceMissing, match="small cannot be trained here") as caught:
        run(sweep, RunOptions(), Console(file=io.StringIO()))
    assert "use a smaller preset" in caught.value.next_step
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("on_a_small_machine")
def test_a_cluster_elsewhere_has_its_own_memory(tmp_path: Path) -> None:
    text = write_sweep(tmp_path, 3).read_text()
    (tmp_path / "far.yaml").write_text(text + "launch: {address: auto}\n")
    far = load_sweep(tmp_path / "far.yaml")
    assert not any("cannot be trained" in warning for warning in plan(far).warnings)
    for sweep, options in (
        (far, RunOptions()),
        (load_sweep(tmp_path / "small.yaml"), RunOptions(address="10.0.0.1:6379")),
    ):
        with pytest.raises(AssertionError, match="a worker was asked"):
            run(sweep, options, Console(file=io.StringIO()))
