"""`moetune ui`: MLflow's own dashboard over the tracking store, on the loopback interface only."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pydantic import Field

from search_spaces.errors import Fault, InputError, ResourceMissing
from search_spaces.shapes import Noun
from tracking.uri import is_server, masked, sqlite_path

HOST = "127.0.0.1"  # MLflow has no password of its own: nobody else's machine may reach it
DEFAULT_PORT = 5000


class Dashboard(Noun):
    """What `moetune ui --json` prints, before the server is up. `pid` None: the tracking server, not ours to stop."""

    url: str = Field(description="passwords masked")
    pid: int | None


def ui(store_uri: str, port: int = DEFAULT_PORT, announce: Callable[[Dashboard], None] | None = None) -> Dashboard:
    """Become the dashboard's process (exec): returns only where the store is a server, which has its own dashboard.

    `announce` is told first, for there is no afterwards. A free port is taken, and named, where the default one is in
    use; ResourceMissing where `port` was asked for.
    """
    if not is_server(store_uri):
        _serve(store_uri, port, announce)
    print(f"The tracking server is its own dashboard: {masked(store_uri)}", file=sys.stderr)
    return Dashboard(url=masked(store_uri), pid=None)


def _serve(store_uri: str, port: int, announce: Callable[[Dashboard], None] | None) -> NoReturn:
    database = sqlite_path(store_uri)
    if database is not None and not database.exists():
        raise InputError([Fault("no MLflow database here", str(database))], "run a sweep, or `moetune report`, first")
    found = choose_port(port)
    why = "" if found == port else f" (port {port} is in use)"
    print(f"Dashboard: http://{HOST}:{found}{why}; stop it with Ctrl-C", file=sys.stderr, flush=True)
    if announce is not None:
        announce(Dashboard(url=f"http://{HOST}:{found}", pid=os.getpid()))  # exec keeps the process id
    command, settings = server_command(store_uri, found)
    os.execve(command[0], command, {**os.environ, **settings})


def choose_port(port: int) -> int:
    """`port` where it is free, else any free one, but only in place of the default."""
    if _free(port):
        return port
    if port != DEFAULT_PORT:
        raise ResourceMissing(f"port {port} is in use", "stop what uses it, or give another --port")
    with socket.socket() as any_port:
        any_port.bind((HOST, 0))
        return int(any_port.getsockname()[1])


def server_command(store_uri: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the server. The URI goes by the environment: `ps` shows arguments to everyone."""
    database = sqlite_path(store_uri)
    artifacts = (database or Path("mlflow.db")).resolve().parent / "mlartifacts"
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    settings = {
        "MLFLOW_BACKEND_STORE_URI": store_uri,
        # Saves seven processes of about 240 MB each (MLflow 3.17.2); they run jobs that moetune has none of.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    return [*command, "--artifacts-destination", str(artifacts)], settings


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not in use
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
