"""`moetune ui` becomes a real MLflow server, on loopback, that shows what a sweep wrote."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from search_spaces.errors import InputError, ResourceMissing
from tests.tracking.runs import prepare
from tests.tracking.sample import sweep
from tracking.mlflow_view import sync
from tuner.commands.ui import Dashboard, choose_port, server_command, ui

ROOT = Path(__file__).parents[2]
RUN_UI = """
import sys
from tuner.commands.ui import ui
ui(sys.argv[1], announce=lambda found: print(found.model_dump_json(), flush=True))
"""


def test_a_password_is_not_among_the_arguments() -> None:
    command, settings = server_command("postgresql://me:hunter2@db/mlflow", 5000)
    assert "hunter2" not in " ".join(command)
    assert settings["MLFLOW_BACKEND_STORE_URI"] == "postgresql://me:hunter2@db/mlflow"


def test_a_server_is_its_own_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert ui("http://me:hunter2@tracking:5000") == Dashboard(url="http://***@tracking:5000", pid=None)
    assert capsys.readouterr().err == "The tracking server is its own dashboard: http://***@tracking:5000\n"


def test_without_a_database_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run a sweep"):
        ui(f"sqlite:///{tmp_path}/mlflow.db")


def test_a_port_that_was_asked_for_and_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceMissing, match="is in use"):
            choose_port(taken.getsockname()[1])


def test_the_dashboard_answers_and_shows_an_error_text(tmp_path: Path) -> None:
    uri = prepare(tmp_path)
    sync(sweep(), uri)
    with socket.socket() as taken:  # so that the default port is in use, whoever uses it
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 5000))
            taken.listen()
        except OSError:
            pass
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", RUN_UI, uri],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stderr is not None
            assert process.stdout is not None
            said = process.stderr.readline()
            assert "(port 5000 is in use)" in said
            address = re.findall(r"http://127\.0\.0\.1:\d+", said)[0]
            assert json.loads(process.stdout.readline()) == {"url": address, "pid": process.pid}
            assert fetch(process, f"{address}/health") == "OK"
            run_id = failed_run(uri)
            assert "boom" in fetch(process, f"{address}/get-artifact?path=error.txt&run_uuid={run_id}")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def failed_run(uri: str) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return str(client.search_runs(experiments, "tags.outcome = 'crashed'")[0].info.run_id)


def fetch(process: "subprocess.Popen[str]", url: str) -> str:
    """The page, once the server is up; fails if it ends instead."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
