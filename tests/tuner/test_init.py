"""`moetune init` writes files that load, for every known model and GPU."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.errors import InputError
from search_spaces.presets import GPUS, load_model, model_names
from search_spaces.screen import screen
from tuner.cli import main
from tuner.commands.init import InitResult, write_sweep
from tuner.sweep import LoadedSweep, load_sweep


def written(folder: Path, model: str, gpu: str, gpus: int) -> LoadedSweep:
    file = folder / f"{model}-{gpu}-{gpus}.yaml"
    file.unlink(missing_ok=True)
    made = write_sweep(model, gpu, gpus, file)
    assert made == InitResult(path=str(file), text=file.read_text(), warnings=made.warnings)
    assert not made.warnings or gpu == "cpu"
    return load_sweep(file)


@pytest.mark.parametrize(("model", "gpu"), list(product(model_names(), [*GPUS, "cpu"])))
def test_every_model_on_every_gpu_loads(tmp_path: Path, model: str, gpu: str) -> None:
    sweep = written(tmp_path, model, gpu, 2)
    assert sweep.model == load_model(model)
    assert sweep.spec.cluster.workers_per_trial == 2
    assert (sweep.spec.cluster.gpu_arch or "cpu").startswith(gpu)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(model_names()), st.sampled_from([*GPUS, "cpu"]), st.integers(1, 2048))
def test_any_count_loads_with_a_legal_default(
    tmp_path_factory: pytest.TempPathFactory, model: str, gpu: str, gpus: int
) -> None:
    """load_sweep refuses a file whose default breaks a rule."""
    assert written(tmp_path_factory.getbasetemp(), model, gpu, gpus).spec.cluster.workers == gpus


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [("qwen3-30b-a3b-4l", "h200", 1), ("mixtral-8x7b", "A100", 2), ("tiny-moe", "cpu", 2)],
)
def test_the_space_can_be_planned(tmp_path: Path, model: str, gpu: str, gpus: int) -> None:
    sweep = written(tmp_path, model, gpu, gpus)
    screening = screen(sweep.space, sweep.model, sweep.spec.cluster, sweep.spec.training)
    assert 100 < screening.count < 100_000


def test_without_a_file_the_text_is_returned() -> None:
    made = write_sweep("tiny-moe", "cpu", 2, None)
    assert made.path is None
    assert "preset: tiny-moe" in made.text
    assert str(made) == made.text


def test_everything_unknown_is_listed_at_once() -> None:
    with pytest.raises(InputError) as caught:
        write_sweep("qwen3-30b", "h2000", 0, None)
    assert [fault.hint for fault in caught.value.faults[:2]] == ["did you mean qwen3-30b-a3b?", "did you mean H200?"]
    assert len(caught.value.faults) == 3
    assert "GB300" in caught.value.next_step
    assert "mixtral-8x7b" in caught.value.next_step


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("mine")
    with pytest.raises(InputError, match="there is a file already"):
        write_sweep("tiny-moe", "cpu", 2, file)
    assert file.read_text() == "mine"
    with pytest.raises(InputError, match="cannot write it: no such file or directory"):
        write_sweep("tiny-moe", "cpu", 2, tmp_path / "none" / "sweep.yaml")


def test_a_model_too_large_for_this_machine_is_written_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuner.commands.init.machine_bytes", lambda: 24 * 2**30)
    (warning,) = write_sweep("qwen3-30b-a3b", "cpu", 2, None).warnings
    assert "qwen3-30b-a3b cannot be trained here" in warning
    assert "this machine has 24.0 GiB" in warning
    assert "fit here: tiny-moe)" in warning
    assert write_sweep("tiny-moe", "cpu", 2, None).warnings == ()
    assert write_sweep("qwen3-30b-a3b", "H200", 2, None).warnings == ()
    assert main(["init", "--model", "qwen3-30b-a3b", "--gpu", "cpu", "--gpus", "2"]) == 0
    out, err = capfd.readouterr()
    assert f"moetune: warning: {warning}" in err
    assert "warning" not in out
