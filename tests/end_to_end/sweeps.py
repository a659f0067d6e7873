"""A small real sweep and how to run the command line on it, as a user would: a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracking.journal import read_events
from tracking.record import Proposed, TrialRecord

SWEEP = """\
schema_version: 1
name: small
model:
  facts:
    name: small
    num_layers: 2
    hidden_size: 64
    num_attention_heads: 4
    num_query_groups: 2
    kv_channels: 16
    ffn_hidden_size: 128
    vocab_size: 128
    max_position_embeddings: 256
    num_moe_experts: 4
    moe_router_topk: 2
    moe_ffn_hidden_size: 64
cluster: {device: cpu, workers: 2, workers_per_trial: 2, workers_per_node: 2}
training:
  sequence_length: 64
  global_batch_size: 8
  warmup_steps: 1
  measured_steps: 3
  params_dtype: fp32
space:
  name: laptop
  choices:
    pipeline_model_parallel_size: [1]
budget: {trials: TRIALS, trial_time_limit_s: 60}
verify: {rounds: 2}
tracking: {folder: FOLDER}
seed: 3
"""
LIMIT_S = 240.0


def write_sweep(folder: Path, trials: int, text: str = SWEEP) -> Path:
    """The small sweep with its runs under `folder`/runs."""
    path = folder / "small.yaml"
    path.write_text(text.replace("TRIALS", str(trials)).replace("FOLDER", str(folder / "runs")))
    return path


def start(*arguments: object, cwd: Path | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tuner.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def moetune(*arguments: object, limit_s: float = LIMIT_S) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end."""
    process = start(*arguments)
    out, err = process.communicate(timeout=limit_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def answer(done: "subprocess.CompletedProcess[str]") -> Any:
    """The one JSON document on stdout."""
    return json.loads(done.stdout)


def journal_of(folder: Path, run: str = "001") -> Path:
    return folder / "runs" / "small" / run / "journal.jsonl"


def finished(journal: Path) -> list[TrialRecord]:
    return [event for event in _events(journal) if isinstance(event, TrialRecord)]


def proposed(journal: Path) -> list[Proposed]:
    return [event for event in _events(journal) if isinstance(event, Proposed)]


def _events(journal: Path) -> list[Any]:
    return read_events(journal) if journal.exists() else []


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"ended early with {process.returncode}\n{out[-2000:]}\n{err[-4000:]}")
        assert time.monotonic() < deadline, "the sweep did not get there in time"
        time.sleep(0.02)


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, by /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found, before = {pid}, set[int]()
    while found != before:
        before = set(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def gone(pids: set[int], limit_s: float = 30.0) -> set[int]:
    """Those of `pids` that are still there after `limit_s`; empty at once where all have ended."""
    deadline = time.monotonic() + limit_s
    while (left := {pid for pid in pids if _alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    os.kill(process.pid, number)
