"""The MLflow view on real SQLite files and a real server: complete, idempotent, and never in the sweep's way."""

import math
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from mlflow import MlflowClient

from search_spaces.errors import MoetuneError
from tests.tracking.runs import prepare, read_runs
from tests.tracking.sample import (
    candidate,
    finished,
    head,
    measured,
    profiled,
    proposed,
    screened,
    sweep,
    two_finalists,
)
from tracking import mlflow_payload as words
from tracking.mlflow_store import MlflowFailed, MlflowStore
from tracking.mlflow_view import MlflowView, missing, sync
from tracking.record import Event
from tracking.traces import store_trace
from train_worker.outcome import Work
from train_worker.timing import step_timing
from tuner.sweep_spec import Tracking

ROOT = Path(__file__).parents[2]
FAST = candidate(moe_token_dispatcher_type="alltoall")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return prepare(tmp_path)


def test_a_sweep_is_one_parent_and_a_child_a_trial(uri: str) -> None:
    assert sync(sweep(), uri).failed == 0
    runs = read_runs(uri)
    assert len(runs) == 10
    parent = runs["laptop/001"]
    assert parent.texts["sweep.yaml"] == "name: laptop # <b>&\n"
    assert "fp8-needs-sm89" in parent.texts["screening.json"]
    assert parent.history["space.rejected.fp8-needs-sm89"] == [(0, 8.0)]
    assert parent.tags["verdict"] == "faster"
    assert parent.status == "FINISHED"

    child = runs[f"laptop/001/0001-{FAST.id}"]
    assert child.parent == "laptop/001"
    assert child.status == "FINISHED"
    assert child.end_ms is not None
    assert child.end_ms - child.start_ms == 2500
    assert child.params["req.moe_token_dispatcher_type"] == "alltoall"
    assert child.params["eff.sequence_parallel"] == "False"
    assert child.params["label"] == "moe_token_dispatcher_type=alltoall"
    assert child.tags["outcome"] == "measured"
    assert child.tags["purpose"] == "search"
    assert child.tags["fingerprint"] == measured(1).fingerprint.digest
    assert [step for step, _ in child.history["loss"]] == list(range(10))
    assert [step for step, _ in child.history["step_time_s"]] == list(range(2, 10))  # warm-up is not timed
    assert child.history["peak_memory_bytes"] == [(0, 10_000_000)]
    assert child.history["fixed_cost_s"][0][1] == pytest.approx(0.91)
    assert child.history["phase.build_s"] == [(0, 0.4)]


def test_every_finalist_is_in_the_run_of_the_sweep(uri: str) -> None:
    assert sync([*sweep()[:-1], two_finalists()], uri).failed == 0
    parent = read_runs(uri)["laptop/001"]
    assert (parent.tags["finalist"], parent.tags["finalist_2"]) == (FAST.id, candidate(micro_batch_size=8).id)
    assert parent.tags["verdict_2_against_default"] == "faster"
    assert parent.tags["verdict_2_against_finalist"] == "tie"
    assert parent.history["compare.ratio"] == [(0, 0.75)]
    assert parent.history["compare.finalist_2.against_default.ratio"] == [(0, 0.76)]
    assert parent.history["compare.finalist_2.against_finalist.ratio_high"] == [(0, 1.03)]


def test_a_run_of_an_earlier_release_is_found_again() -> None:
    """Its parent's name in MLflow is of its head, as it was written then."""
    assert words.parent_uid(head()) == "8fdae77607c2e828"
    assert words.parent_uid(head().model_copy(update={"finalists": 2})) == "8fdae77607c2e828"


def test_a_profiled_step_and_the_trace_of_a_finalist_are_there(uri: str, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    store_trace(run_folder, "t0001", b"packed")
    events: list[Event] = [
        head(),
        finished(0, candidate(), profiled(0.2), "baseline"),
        finished(1, FAST, profiled(0.1), "verify"),
    ]
    assert sync(events, uri, run_folder=run_folder).failed == 0
    client = MlflowClient(tracking_uri=uri)
    runs = {run.info.run_name: run for run in client.search_runs([_experiment(client)])}
    default, fast = runs[f"laptop/001/0000-{candidate().id}"], runs[f"laptop/001/0001-{FAST.id}"]
    assert fast.data.metrics["gpu_busy_s"] == pytest.approx(0.06)
    assert fast.data.metrics["exposed_host_s"] == pytest.approx(0.04)
    assert fast.data.metrics["kernels.gemm_s"] == pytest.approx(0.045)
    assert fast.data.tags["wall"] == "host"
    assert [file.path for file in client.list_artifacts(fast.info.run_id, "traces")] == ["traces/t0001.json.gz"]
    assert client.list_artifacts(default.info.run_id, "traces") == []
    assert "profile.json" in {file.path for file in client.list_artifacts(default.info.run_id)}


def _experiment(client: MlflowClient) -> str:
    (experiment,) = (each for each in client.search_experiments() if each.name == words.EXPERIMENT)
    return str(experiment.experiment_id)


def test_a_failed_trial_says_why(uri: str) -> None:
    sync(sweep(), uri)
    failed = {run.tags["outcome"]: run for run in read_runs(uri).values() if run.status == "FAILED"}
    assert set(failed) == {"out_of_memory", "diverged", "crashed", "hung"}
    assert failed["crashed"].texts["error.txt"].count("boom") == 50
    assert failed["out_of_memory"].tags["reason"] == "out of device memory in measure"
    assert failed["diverged"].history["loss"] == [(0, 4.0)]


def test_throughput_precision_and_routing_of_a_trial_are_written(uri: str) -> None:
    plain = measured(0.1, steps=6)
    steps = tuple(sample.model_copy(update={"gpu_time_s": 0.09}) for sample in plain.steps)
    times = [sample.step_time_s for sample in steps]
    work = Work(ranks=4, tokens_per_step=512, flops_per_token=1e9, routing="forced")
    outcome = plain.model_copy(update={"steps": steps, "work": work, "timing": step_timing(times)})
    assert sync([head(), finished(0, candidate(), outcome, "baseline")], uri).failed == 0
    (child,) = (run for run in read_runs(uri).values() if run.parent)
    assert child.tags["routing"] == "forced"
    assert child.history["tokens_per_s_per_gpu"][0][1] == pytest.approx(512 / 4 / median(times))
    assert child.history["model_tflops_per_gpu"][0][1] == pytest.approx(512 / 4 / median(times) * 1e-3)
    assert child.history["timing.relative_standard_error"][0][1] < 0.01
    assert child.history["median_gpu_time_s"] == [(0, 0.09)]
    assert child.history["gpu_time_s"] == [(step, 0.09) for step in range(2, 8)]


def test_numbers_that_are_none_are_never_written(uri: str) -> None:
    record = finished(0, candidate(), measured(0.1, loss=math.nan), "baseline")
    assert sync([head(), record], uri).failed == 0
    (child,) = (run for run in read_runs(uri).values() if run.parent)
    assert "loss" not in child.history
    assert all(math.isfinite(value) for points in child.history.values() for _, value in points)


def test_many_and_long_knobs_fit(uri: str) -> None:
    wide = candidate(**{f"knob_{number}": "x" * (10_000 if number == 3 else 3) for number in range(250)})
    assert sync([head(), finished(0, wide, measured(0.1, steps=600), "baseline")], uri).failed == 0
    (child,) = (run for run in read_runs(uri).values() if run.parent)
    assert sum(name.startswith("req.knob_") for name in child.params) == 250
    assert child.params["req.knob_3"].endswith("...")
    assert len(child.history["loss"]) == 602


def test_a_run_left_half_written_is_mended(uri: str) -> None:
    from mlflow import MlflowClient

    sync(sweep(), uri)
    whole = read_runs(uri)
    client = MlflowClient(tracking_uri=uri)
    name = f"laptop/001/0001-{FAST.id}"
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"run_name = '{name}'")
    client.delete_tag(run.info.run_id, words.COMPLETE)
    client.delete_tag(run.info.run_id, "outcome")
    client.update_run(run.info.run_id, "RUNNING")
    assert missing(sweep(), uri) == [name]
    assert sync(sweep(), uri).written == 1
    assert missing(sweep(), uri) == []
    assert read_runs(uri) == whole


def test_two_runs_of_one_name_stay_apart(uri: str) -> None:
    """A folder that was deleted and begun anew, on a server that remembers the old one."""
    other = head(started_at="2026-02-01T00:00:00+00:00")
    sync([head(), finished(0, candidate(), measured(0.1), "baseline")], uri)
    result = sync([other, finished(0, candidate(), measured(0.2), "baseline")], uri)
    assert (result.written, result.already) == (2, 0)


def test_an_interrupted_sweep_is_killed_and_runs_again_on_resume(uri: str) -> None:
    begun: list[Event] = [head(), screened(), proposed(0, candidate(), "baseline")]
    view = MlflowView(uri)
    for event in begun:
        view.put(event)
    view.close()
    assert {run.status for run in read_runs(uri).values()} == {"KILLED"}
    again: list[Event] = [*begun, head(resumed=True, started_at="2026-01-03T00:00:00+00:00")]
    sync(again, uri, ended=False)
    assert read_runs(uri)["laptop/001"].status == "RUNNING"
    sync([*again, finished(0, candidate(), measured(0.1), "baseline")], uri)
    assert {run.status for run in read_runs(uri).values()} == {"FINISHED"}


def experiment_names(uri: str) -> set[str]:
    from mlflow import MlflowClient

    return {found.name for found in MlflowClient(tracking_uri=uri).search_experiments()} - {"Default"}


def test_a_sweep_goes_into_the_experiment_that_its_file_names(uri: str) -> None:
    """By the view and by a later filling alike; two sweeps may share one."""
    view = MlflowView(uri, experiment="team/moe")
    for event in sweep()[:6]:
        view.put(event)
    view.close()
    assert missing(sweep(), uri, experiment="team/moe")
    assert sync(sweep(), uri, experiment="team/moe").already == 6
    assert missing(sweep(), uri, experiment="team/moe") == []
    assert sync([head().model_copy(update={"sweep_name": "other"})], uri, experiment="team/moe").written == 1
    assert experiment_names(uri) == {"team/moe"}
    assert len(read_runs(uri)) == 11


def test_an_experiment_that_somebody_deleted_is_named_as_the_reason(uri: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    client.delete_experiment(client.create_experiment("gone"))
    view = MlflowView(uri, experiment="gone")
    for event in sweep():
        view.put(event)
    view.close()
    assert view.pending == len(sweep())
    assert "deleted" in view.status()
    result = sync(sweep(), uri, experiment="gone")
    assert result.failed == len(sweep())
    assert "deleted" in result.error


def test_without_a_name_it_is_the_one_that_a_sweep_file_has_by_default(uri: str) -> None:
    sync([head()], uri)
    assert experiment_names(uri) == {Tracking().experiment}


def test_a_resumed_head_alone_is_refused(uri: str) -> None:
    for store in (MlflowStore(uri), MlflowView(uri)):
        with pytest.raises(MoetuneError, match="as the journal has it first"):
            store.put(head(resumed=True))


def test_a_locked_database_holds_nobody_up(uri: str, tmp_path: Path) -> None:
    lock = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    view = MlflowView(uri, retry_s=(0.1,))
    for event in sweep():
        view.put(event)  # comes back, though nothing can be written
    view.close(timeout_s=0.5)
    assert view.pending == len(sweep())
    assert view.status().startswith(f"{len(sweep())} events behind")
    lock.execute("ROLLBACK")
    lock.close()
    view._thread.join()  # so that it does not write beside the sync below
    result = sync(sweep(), uri)
    assert result.failed == 0
    assert missing(sweep(), uri) == []


def test_a_store_that_comes_back_is_filled_by_the_view_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "share"
    folder.write_text("not mounted yet")
    view = MlflowView(f"sqlite:///{folder}/mlflow.db", retry_s=(0.05,))
    for event in sweep():
        view.put(event)
    while not view.degraded:
        time.sleep(0.02)
    folder.unlink()
    uri = prepare(folder)
    while view.pending:
        time.sleep(0.02)
    assert view.degraded == ""
    assert view.status() == ""
    assert "answers again" in caplog.text
    view.close()
    assert missing(sweep(), uri) == []


@pytest.mark.parametrize("secret", ["hunter2"])
def test_a_dead_server_is_said_once_and_without_its_password(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://me:{secret}@127.0.0.1:{free.getsockname()[1]}"
    view = MlflowView(uri, retry_s=(0.01,))
    for event in sweep():
        view.put(event)
    while not view.degraded:
        time.sleep(0.02)
    view.close(timeout_s=20)
    assert view.pending == len(sweep())
    assert caplog.text.count("the sweep goes on without MLflow") == 1
    result = sync(sweep(), uri)
    assert result.failed == len(sweep())
    with pytest.raises(MlflowFailed) as caught:
        MlflowStore(uri).put(head())
    assert caught.value.exit_code == 4
    for text in (caplog.text, view.degraded, result.error, str(caught.value)):
        assert secret not in text
        assert "***@127.0.0.1" in text


MAKE_TABLES = """
import sys, time
from tracking.mlflow_store import alone
with alone(sys.argv[1]), open(sys.argv[2], "a", buffering=1) as log:
    log.write("in\\n")
    time.sleep(0.1)
    log.write("out\\n")
"""


def test_one_process_at_a_time_makes_the_tables_of_a_fresh_database(tmp_path: Path) -> None:
    """MLflow's own migrations, run by two processes at once, break: "duplicate column name"."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKE_TABLES, f"sqlite:///{tmp_path}/new/mlflow.db", str(log)]
    children = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) for _ in range(4)]
    assert [process.wait() for process in children] == [0] * 4
    assert log.read_text().split() == ["in", "out"] * 4


class Server:
    """A real `mlflow server` on loopback over a SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prepare(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True
            )
        while self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        pytest.fail((self.folder / "server.log").read_text())

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path / "server")
    yield found
    found.kill()


def test_a_server_that_dies_in_mid_sweep_is_filled_in_later(server: Server) -> None:
    view = MlflowView(server.uri, retry_s=(0.2,))
    events = sweep()
    for event in events[:8]:
        view.put(event)
    while view.pending:
        time.sleep(0.02)
    server.kill()
    for event in events[8:]:
        view.put(event)
    view.close(timeout_s=60)
    assert view.pending == len(events) - 8
    server.start()

    result = sync(events, server.uri)
    assert (result.failed, result.already) == (0, 8)
    seen = read_runs(server.uri)
    assert len(seen) == 10
    assert seen[f"laptop/001/0001-{FAST.id}"].params["eff.micro_batch_size"] == "1"
    assert "boom" in "".join(run.texts.get("error.txt", "") for run in seen.values())
    assert sync(events, server.uri) == result.model_copy(update={"written": 0, "already": len(events)})
    assert read_runs(server.uri) == seen
