"""The versions that the rules of a run judge by: the sweep file's, or a worker's; and what a resumed run is told."""

import importlib.metadata
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.errors import InputError, ResourceMissing
from search_spaces.screen import screen
from search_spaces.shapes import ClusterShape, StackVersions
from tests.end_to_end.sweeps import write_sweep
from tracking.journal import Journal
from tuner.begin import begun, resumed
from tuner.commands.fingerprint import fingerprint_of, seen_on_a_worker
from tuner.commands.run import RunOptions, _same_rules, _screened, _stack_of_workers, _words
from tuner.sweep import load_sweep

HERE = ClusterShape(device="cpu", workers=1, workers_per_trial=1, workers_per_node=1)
NEWER = StackVersions(megatron_core="0.20.0", torch="2.12.0", deep_ep="1.2.1")


def test_a_private_run_is_judged_by_this_machine(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path, 3))
    found = _stack_of_workers(sweep, RunOptions())
    assert found == seen_on_a_worker(HERE, None).stack == fingerprint_of("cpu", None).fingerprint.stack
    assert found.megatron_core == importlib.metadata.version("megatron-core")


def test_no_gpu_here_is_said_before_anything_is_asked_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sweep = load_sweep(write_sweep(tmp_path, 3))
    cluster = sweep.spec.cluster.model_copy(update={"device": "cuda", "gpu_arch": "H200 sm_90"})
    sweep = replace(sweep, spec=sweep.spec.model_copy(update={"cluster": cluster}))
    with pytest.raises(ResourceMissing, match="0 visible NVIDIA GPUs"):
        _stack_of_workers(sweep, RunOptions())


def test_a_release_that_no_rule_set_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fingerprint_of("cpu", None).fingerprint
    old = old.model_copy(update={"stack": old.stack.model_copy(update={"megatron_core": "0.12.1"})})
    monkeypatch.setattr("tuner.commands.fingerprint.fingerprint_apart", lambda _: old)
    with pytest.raises(ResourceMissing, match=r"on the workers: unknown version '0\.12\.1' of megatron_core"):
        _stack_of_workers(load_sweep(write_sweep(tmp_path, 3)), RunOptions())


def test_versions_are_told_in_one_line() -> None:
    there, _, without = _words(NEWER).partition("; ")
    assert there == "megatron_core 0.20.0, torch 2.12.0, deep_ep 1.2.1"
    assert without == "without transformer_engine, hybrid_ep, apex"


def test_a_resumed_run_that_is_judged_otherwise_is_told_of_the_software(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path, 3))
    spec = sweep.spec
    then = _screened(screen(sweep.space, sweep.model, spec.cluster, spec.training))
    with ExitStack() as stack:
        _, journal = begun(sweep, False, stack)
        _same_rules(journal, then, NEWER)  # nothing was screened yet
        _same_rules(_with(journal, then), then, NEWER)
        now = then.model_copy(update={"accepted": then.accepted - 1})
        with pytest.raises(InputError, match=r"the workers' software did, which is now megatron_core 0\.20\.0"):
            _same_rules(journal, now, NEWER)


def test_a_changed_sweep_lets_go_of_its_journal(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, 3)
    sweep = load_sweep(path)
    with ExitStack() as stack:
        _, journal = begun(sweep, False, stack)
        _with(journal, None, sweep.digest)
    with ExitStack() as stack, pytest.raises(InputError, match="the sweep file changed"):
        resumed(sweep, False, stack)
    with ExitStack() as stack, pytest.raises(InputError, match="the sweep file changed"):
        resumed(sweep, False, stack)  # not "another driver has it"


def _with(journal: Journal, screened: object, digest: str = "") -> Journal:
    from tracking.record import Screened, SweepStarted

    head = SweepStarted(
        sweep_name="small",
        run_name="001",
        sweep_digest="of another file" if digest else "",
        space_digest="",
        sweep_text="",
        seed=3,
        started_at="2026-01-01T00:00:00",
    )
    journal.put(head)
    if isinstance(screened, Screened):
        journal.put(screened)
    return journal
