"""Reads back what an MLflow store holds, as something that compares equal for equal content."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Run

from tests.tracking.sample import head
from tracking.mlflow_store import MlflowStore
from tracking.uri import default_uri


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="moetune-mlflow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    MlflowStore(default_uri(folder)).lacking([head()])  # makes the tables, and writes nothing
    return folder


def prepare(folder: Path) -> str:
    """Put an empty database in `folder`, unless one is there, and give its URI. Making the tables costs seconds."""
    if not (folder / "mlflow.db").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(_template() / "mlflow.db", folder / "mlflow.db")
    return default_uri(folder)


@dataclass(frozen=True)
class Seen:
    name: str
    parent: str
    status: str
    start_ms: int
    end_ms: int | None
    params: dict[str, str]
    tags: dict[str, str]
    history: dict[str, list[tuple[int, float]]]  # metric -> (step, value)
    texts: dict[str, str]


def read_runs(uri: str) -> dict[str, Seen]:
    """All runs by name; fails where two have one name."""
    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = list(client.search_runs(experiments))
    names = {run.info.run_id: run.info.run_name for run in runs}
    found = {run.info.run_name: _seen(client, run, names) for run in runs}
    assert len(found) == len(runs), f"two runs of one name: {sorted(names.values())}"
    return found


def _seen(client: MlflowClient, run: Run, names: dict[str, str]) -> Seen:
    run_id = run.info.run_id
    files = client.list_artifacts(run_id)
    return Seen(
        name=run.info.run_name,
        parent=names.get(run.data.tags.get("mlflow.parentRunId", ""), ""),
        status=run.info.status,
        start_ms=run.info.start_time,
        end_ms=run.info.end_time,
        params=dict(run.data.params),
        tags={key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")},
        history={
            key: sorted((point.step, point.value) for point in client.get_metric_history(run_id, key))
            for key in run.data.metrics
        },
        texts={file.path: _text(client, run, file.path) for file in files},
    )


def _text(client: MlflowClient, run: Run, name: str) -> str:
    where = urlsplit(run.info.artifact_uri)
    if where.scheme == "file":
        return (Path(where.path) / name).read_text()
    return Path(client.download_artifacts(run.info.run_id, name)).read_text()
