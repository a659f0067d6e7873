"""A user's mistakes, through the command: what is wrong, where, the next step, the exit code, never a traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.sweeps import SWEEP, moetune, write_sweep


def refused(*arguments: object, code: int) -> str:
    done = moetune(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "next:" in done.stderr or "did you mean" in done.stderr or "known:" in done.stderr
    return done.stderr


def test_every_fault_of_a_sweep_file_at_once_with_line_and_column(tmp_path: Path) -> None:
    text = SWEEP.replace("warmup_steps", "warmupsteps").replace("seed: 3", "seed: three")
    text = text.replace("pipeline_model_parallel_size", "pipline_model_parallel_size")
    sweep = write_sweep(tmp_path, 3, text)
    err = refused("run", sweep, code=2)
    lines = text.splitlines()
    for found, words in (("warmupsteps", "warmup_steps"), ("pipline", "pipeline_model_parallel"), ("three", "seed")):
        line = next(number for number, each in enumerate(lines, start=1) if found in each)
        assert f"{sweep}:{line}:" in err
        assert words in err
    assert not (tmp_path / "runs").exists()


def test_a_sweep_file_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, 3, SWEEP.replace("schema_version: 1", "schema_version: 9"))
    err = refused("run", sweep, code=2)
    assert f"{sweep}:1:" in err
    assert "schema_version 9 is unknown" in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("model:\n  facts:", "model:\n  preset: qwen3-30b\n  facts:", "exactly one"),
        ("workers_per_trial: 2", "workers_per_trial: 3", "workers"),
        ("num_moe_experts: 4", "num_moe_experts: 0", "num_moe_experts"),
        ("num_attention_heads: 4", "num_attention_heads: 5", "divisible"),
        ("global_batch_size: 8", "global_batch_size: 7", "global_batch_size"),
        ("name: laptop", "name: lapptop", "laptop"),
    ],
)
def test_an_impossible_sweep_is_refused_with_its_reason(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in SWEEP
    err = refused("plan", write_sweep(tmp_path, 3, SWEEP.replace(old, new)), code=2)
    assert words in err


def test_an_unknown_model_names_the_nearest() -> None:
    err = refused("init", "--model", "qwen3-30b", "--gpu", "H200", "--gpus", "1", code=2)
    assert "qwen3-30b-a3b" in err


def test_an_unreachable_ray_is_a_missing_resource(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        err = refused("run", write_sweep(tmp_path, 3), "--address", f"127.0.0.1:{taken.getsockname()[1]}", code=4)
    assert "no Ray cluster answers" in err


def test_what_is_no_address_is_said_to_be_none(tmp_path: Path) -> None:
    assert "not a Ray address" in refused("run", write_sweep(tmp_path, 3), "--address", "nonsense", code=4)


def test_an_unwritable_folder_is_a_missing_resource(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, 3)
    (tmp_path / "runs").write_text("a file where the folder should be")
    err = refused("run", sweep, code=4)
    assert str(tmp_path / "runs") in err


def test_faults_are_data_with_json(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, 3, SWEEP.replace("seed: 3", "sed: 3"))
    done = moetune("plan", sweep, "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == 2
    assert any(fault["line"] for fault in answer["faults"])


def test_a_report_of_no_run_and_of_a_missing_file(tmp_path: Path) -> None:
    assert "moetune run" in refused("report", write_sweep(tmp_path, 3), code=2)
    missing = moetune("plan", tmp_path / "absent.yaml")
    assert missing.returncode == 2
    assert "absent.yaml" in missing.stderr


def test_a_changed_sweep_is_not_resumed(tmp_path: Path) -> None:
    """The first run ends before Ray starts (a bad address), which leaves a journal to resume: its file names a stack.

    Without one the workers are asked for it first, and a run that cannot reach them leaves nothing behind.
    """
    sweep = write_sweep(tmp_path, 3)
    refused("run", sweep, "--address", "nonsense", code=4)
    assert not (tmp_path / "runs").exists()
    sweep.write_text(sweep.read_text() + 'stack: {megatron_core: "0.19.2", torch: "2.11.0"}\n')
    refused("run", sweep, "--address", "nonsense", code=4)
    sweep.write_text(sweep.read_text().replace("seed: 3", "seed: 4"))
    assert "changed" in refused("run", sweep, "--resume", "--address", "nonsense", code=2)
    sweep.write_text(sweep.read_text().replace("seed: 4", "seed: 3").replace("trials: 3", "trials: 5"))
    assert "not a Ray address" in refused("run", sweep, "--resume", "--address", "nonsense", code=4)


def into_a_closed_pipe(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run the command with a stdout that nobody reads any more, as after `| head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli", *map(str, arguments)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    os.close(write_end)
    return done


def test_output_into_a_closed_pipe_is_no_fault(tmp_path: Path) -> None:
    done = into_a_closed_pipe("plan", write_sweep(tmp_path, 3), "--json")
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    """`moetune plan SWEEP | head -1` writes through the same console as a sweep does."""
    done = into_a_closed_pipe("plan", write_sweep(tmp_path, 3))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
