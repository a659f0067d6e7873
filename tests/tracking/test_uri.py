from pathlib import Path

import pytest

from tracking.uri import default_uri, is_server, masked, resolve_uri, sqlite_path, without_secrets


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////data/runs/mlflow.db", "sqlite:////data/runs/mlflow.db"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("https://tracking.example", "https://tracking.example"),
        ("http://me:hunter2@tracking:5000/x", "http://***@tracking:5000/x"),
        ("https://token@tracking", "https://***@tracking"),
        (
            "postgresql://me:hunt%40er@db/ml?sslmode=require&password=hunter2",
            "postgresql://***@db/ml?sslmode=***&password=***",
        ),
    ],
)
def test_a_uri_is_shown_without_its_secrets(uri: str, shown: str) -> None:
    assert masked(uri) == shown


def test_secrets_go_from_a_message_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "swordfish")
    uri = "http://me:hunter2@tracking"
    text = f"{uri} failed; http://me:hunter2@tracking/api; password hunter2; swordfish"
    assert without_secrets(text, uri) == "http://***@tracking failed; http://***@tracking/api; password ***; ***"


def test_the_sweep_file_wins_then_the_environment_then_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment")
    assert resolve_uri("http://from-file", tmp_path) == "http://from-file"
    assert resolve_uri(None, tmp_path) == "http://from-environment"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert resolve_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db" == default_uri(tmp_path)


def test_servers_and_files_are_told_apart() -> None:
    assert is_server("https://x")
    assert not is_server("postgresql://x/y")
    assert sqlite_path("sqlite:////a/b.db") == Path("/a/b.db")
    assert sqlite_path("sqlite:///b.db") == Path("b.db")
    assert sqlite_path("http://x") is None
