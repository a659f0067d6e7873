"""Real ranks, forked from real parents, failing for real: killed, stopped, starved of memory, diverging."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from train_worker.gang import LocalGang, place_of
from train_worker.host_memory import host_memory
from train_worker.job import Phase, TrialJob
from train_worker.outcome import Crashed, Diverged, Hung, Measured, Outcome, OutOfMemory, Rejected
from train_worker.parent import end_group
from train_worker.progress import read_progress
from train_worker.rank import progress_path
from train_worker.rank_report import UNREPORTED

CGROUPS = Path("/sys/fs/cgroup/memory")
MODEL = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=128,
    vocab_size=128,
    max_position_embeddings=256,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=64,
)


def job(
    name: str,
    *,
    limit_s: float = 60.0,
    steps: int = 2,
    memory_bytes: int | None = None,
    learning_rate: float = 1e-3,
    sequences: int = 4,
    env: dict[str, str] | None = None,
    **knobs: KnobValue,
) -> TrialJob:
    return TrialJob(
        trial_id=name,
        candidate=Candidate(knobs={"micro_batch_size": 1, **knobs}, env=env or {}),
        model=MODEL,
        cluster=ClusterShape(
            device="cpu", workers=2, workers_per_trial=2, workers_per_node=2, memory_bytes=memory_bytes
        ),
        training=TrainingShape(
            sequence_length=64,
            global_batch_size=sequences,
            warmup_steps=1,
            measured_steps=steps,
            params_dtype="fp32",
            learning_rate=learning_rate,
        ),
        seed=1,
        time_limit_s=limit_s,
    )


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGang]:
    folder = tmp_path_factory.mktemp("gang")
    with LocalGang(2, "cpu", folder) as running:
        yield running
        parents = [host.parent_pid or 0 for host in running.hosts]
        assert all(alive(pid) for pid in parents)
    assert not any(alive(pid) for pid in parents)
    assert list(folder.glob("*/*/rank-*")) == []


def run_and_disturb(
    gang: LocalGang, trial: TrialJob, disturb: Callable[[LocalGang], None], phase: Phase = "measure"
) -> Outcome:
    """Run `trial`, and call `disturb` once rank 1 is in `phase`."""
    outcomes: list[Outcome] = []
    runner = threading.Thread(target=lambda: outcomes.append(gang.run(trial)))
    runner.start()
    progress = progress_path(gang.hosts[1].folder / trial.trial_id, 1)
    deadline = time.monotonic() + 60
    while read_progress(progress)[0] != phase and runner.is_alive():
        assert time.monotonic() < deadline, f"the rank never reached {phase}"
        time.sleep(0.005)
    disturb(gang)
    runner.join(90)
    assert not runner.is_alive()
    return outcomes[0]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_take_fewer_gpus_in_turn(tmp_path: Path) -> None:
    """The first on a GPU waits until it is free; those after it find it in use by their own trial."""
    shared, apart = LocalGang(3, "cpu", tmp_path, gpus=2), LocalGang(3, "cpu", tmp_path)
    trial = job("shared")
    places = [shared.place(rank, trial, ("127.0.0.1", 4000)) for rank in range(3)]
    assert [(place.rank, place.local_rank, place.first_on_gpu) for place in places] == [
        (0, 0, True), (1, 1, True), (2, 0, False),
    ]  # fmt: skip
    alone = [apart.place(rank, trial, None) for rank in range(3)]
    assert [(place.local_rank, place.first_on_gpu) for place in alone] == [(0, True), (1, True), (2, True)]


def test_a_trial_is_measured_and_its_cost_is_complete(gang: LocalGang) -> None:
    outcome = gang.run(job("plain"))
    assert isinstance(outcome, Measured)
    assert len(outcome.steps) == 2
    assert len(outcome.warmup) == 1
    assert outcome.peak_memory_bytes > 0
    phases = outcome.phases
    assert min(phases.launch_s, phases.process_group_s, phases.build_s, phases.warmup_s, phases.measure_s) > 0
    assert phases.measure_s >= sum(step.step_time_s for step in outcome.steps) * 0.9
    assert outcome.profile_error is None
    assert outcome.profile is not None
    assert {"gemm", "moe", "communication"} <= set(outcome.profile.categories_s)  # real Megatron under gloo
    assert 0 < phases.profile_s < phases.fixed_s


def test_a_rank_that_dies_in_the_profiled_step_costs_no_measurement(gang: LocalGang) -> None:
    """Thirty-two micro-batches a rank: the step is long enough to be hit."""

    def kill(running: LocalGang) -> None:
        os.kill(running.hosts[1].rank_pid or 0, signal.SIGKILL)

    outcome = run_and_disturb(gang, job("profiled", steps=1, sequences=64), kill, "profile")
    assert isinstance(outcome, Measured)
    assert outcome.profile is None
    assert "by peer" in (outcome.profile_error or "")  # closed, or reset where it had not read all
    assert isinstance(gang.run(job("after-profile")), Measured)


def test_a_killed_rank_is_a_crash_and_the_gang_goes_on(gang: LocalGang) -> None:
    pids: list[int] = []

    def kill(running: LocalGang) -> None:
        pids.extend(host.rank_pid or 0 for host in running.hosts)
        os.kill(pids[1], signal.SIGKILL)

    outcome = run_and_disturb(gang, job("killed", steps=2000), kill)
    assert isinstance(outcome, Crashed)
    assert outcome.signal == signal.SIGKILL
    assert outcome.phase == "measure"
    assert not any(alive(pid) for pid in pids)
    assert isinstance(gang.run(job("after-kill")), Measured)


def test_a_rank_that_cannot_write_its_report_is_the_machines_fault(gang: LocalGang) -> None:
    """As on a full disk: the search must not learn from it that the configuration does not run."""

    def no_place(running: LocalGang) -> None:
        shutil.rmtree(running.hosts[1].folder / "unwritten")

    outcome = run_and_disturb(gang, job("unwritten", steps=20), no_place)
    assert isinstance(outcome, Crashed)
    assert (outcome.exit_code, outcome.infrastructure) == (UNREPORTED, True)
    assert "disk full" in outcome.detail
    assert isinstance(gang.run(job("after-unwritten")), Measured)


def test_a_stopped_rank_is_hung_and_the_gang_goes_on(gang: LocalGang) -> None:
    pids: list[int] = []

    def freeze(running: LocalGang) -> None:
        pids.extend(host.rank_pid or 0 for host in running.hosts)
        os.kill(pids[1], signal.SIGSTOP)

    outcome = run_and_disturb(gang, job("stopped", steps=100_000, limit_s=12), freeze)
    assert isinstance(outcome, Hung)
    assert outcome.phase == "measure"
    assert outcome.time_limit_s == 12
    assert not any(alive(pid) for pid in pids)
    assert isinstance(gang.run(job("after-hang")), Measured)


def test_a_rank_past_its_memory_is_out_of_memory_alone(gang: LocalGang) -> None:
    outcome = gang.run(job("starved", memory_bytes=1 << 30, sequences=1024, micro_batch_size=512))
    assert isinstance(outcome, OutOfMemory)
    assert outcome.where == "host"
    assert isinstance(gang.run(job("after-oom")), Measured)


def test_a_rank_goes_before_the_machines_memory_does(gang: LocalGang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real memory, with the limit set 1.2 GiB above what is in use now: Ray's monitor would kill everybody."""
    for host in gang.hosts:
        monkeypatch.setattr(host, "_memory_limit", host_memory().share + (1.2 * 2**30) / host_memory().total_bytes)
    outcome = gang.run(job("hungry", sequences=8192, micro_batch_size=4096))
    assert isinstance(outcome, OutOfMemory)
    assert outcome.where == "host"
    assert "GiB in use on this machine" in outcome.detail
    monkeypatch.undo()
    assert isinstance(gang.run(job("after-hunger")), Measured)


@pytest.mark.skipif(
    not (CGROUPS / "memory.limit_in_bytes").exists() or not os.access(CGROUPS, os.W_OK),
    reason="needs a writable memory cgroup (v1) to provoke the kernel's OOM killer",
)
def test_the_kernels_oom_killer_is_recognised(gang: LocalGang) -> None:
    group, victim = CGROUPS / f"moetune-test-{os.getpid()}", str(gang.hosts[1].parent_pid)
    home = next(line for line in Path(f"/proc/{victim}/cgroup").read_text().splitlines() if ":memory:" in line)
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(victim)
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + (1 << 30)))
        outcome = gang.run(job("oom-killed", sequences=2048, micro_batch_size=1024))
    finally:
        (CGROUPS / home.split(":", 2)[2].lstrip("/") / "cgroup.procs").write_text(victim)
        group.rmdir()
    assert isinstance(outcome, OutOfMemory)
    assert outcome.where == "host"
    assert "OOM killer" in outcome.detail
    assert isinstance(gang.run(job("after-oom-kill")), Measured)


def test_a_diverging_rank_is_diverged(gang: LocalGang) -> None:
    assert isinstance(gang.run(job("diverged", learning_rate=1e18, steps=8)), Diverged)


def test_what_the_stack_refuses_is_a_rejection_with_its_words(gang: LocalGang) -> None:
    outcome = gang.run(job("refused", tensor_model_parallel_size=2, sequence_parallel=False))
    assert isinstance(outcome, Rejected)
    assert "sequence parallel" in outcome.reason.lower()


def test_a_lost_parent_takes_its_rank_along_and_is_replaced(gang: LocalGang) -> None:
    seen: list[int] = []

    def orphan(running: LocalGang) -> None:
        seen.extend((running.hosts[1].rank_pid or 0, running.hosts[1].parent_pid or 0))
        os.kill(seen[1], signal.SIGKILL)

    outcome = run_and_disturb(gang, job("orphaned", steps=2000), orphan)
    assert isinstance(outcome, Crashed)
    deadline = time.monotonic() + 5
    while alive(seen[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(seen[0])
    assert isinstance(gang.run(job("after-parent")), Measured)
    assert gang.hosts[1].parent_pid != seen[1]


def test_nothing_is_carried_from_one_trial_to_the_next(gang: LocalGang) -> None:
    """Environment and random state die with the rank: the same trial before and after another is the same."""
    first = gang.run(job("twin-1"))
    gang.run(job("other", env={"NVTE_FUSED_ATTN": "0"}, learning_rate=0.5))
    second = gang.run(job("twin-2"))
    assert isinstance(first, Measured)
    assert isinstance(second, Measured)
    assert first.losses == second.losses
    assert first.peak_memory_bytes == second.peak_memory_bytes


def test_a_rank_told_to_die_while_it_is_being_forked_dies(gang: LocalGang) -> None:
    """The order comes before the parent has named the process: it must not be forgotten."""
    host = gang.hosts[0]
    host.begin(job("early", steps=100_000), place_of(0, 0, job("early"), None, "127.0.0.1"))
    host.kill("stop")
    deadline = time.monotonic() + 20
    while (report := host.poll(0.05)) is None:
        assert time.monotonic() < deadline, "the kill was forgotten"
    assert report.killed == "stop"
    assert report.signal == signal.SIGKILL
    assert not host.busy


def test_what_a_rank_started_dies_with_it() -> None:
    """A rank's own children (compilers, loaders) are in its process group, which ends after the rank itself."""
    code = "import os, subprocess; os.setsid(); print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # it has exited and is not reaped yet
        assert alive(child)
        end_group(rank.pid)
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)
