"""Which store is meant, and that no password of one is ever shown or stored."""

import string
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tracking.uri import (
    default_uri,
    is_server,
    masked,
    resolve_uri,
    sqlite_path,
    without_secrets,
    without_uri_secrets,
)

SCHEMES = st.sampled_from(["http", "https", "postgresql", "mysql+pymysql", "mssql+pyodbc"])
# What people put into passwords, encoded or not; "Q9" so that a secret is never a part of the rest by chance.
WILD = st.text(string.ascii_letters + string.digits + "/@:%!$*()_-+.,~^", min_size=1, max_size=20).map("Q9{}Z7".format)
QUERY_KEYS = st.sampled_from(["password", "token", "api_key", "sslpassword"])


@st.composite
def uris(draw: st.DrawFn) -> tuple[str, set[str]]:
    """A URI with a secret in its user part or its query, and the forms of that secret."""
    plain, scheme = draw(WILD), draw(SCHEMES)
    encoded = quote(plain, safe="")
    written = draw(st.sampled_from([plain, encoded]))
    place = draw(st.sampled_from(["password", "token", "query", "both"]))
    user = {"password": f"me:{written}@", "token": f"{written}@", "query": "", "both": f"me:{written}@"}[place]
    query = f"?sslmode=require&{draw(QUERY_KEYS)}={encoded}" if place in ("query", "both") else ""
    return f"{scheme}://{user}db.example:5432/ml{query}", {plain, encoded}


@given(uris())
def test_no_form_of_a_secret_is_left_in_a_uri(case: tuple[str, set[str]]) -> None:
    uri, secrets = case
    assert not any(secret in masked(uri) for secret in secrets)
    assert "db.example:5432/ml" in masked(uri)
    assert masked(masked(uri)) == masked(uri)


@given(uris(), st.sampled_from(["plain", "single", "double", "flow", "comment", "json", "folded"]))
def test_a_sweep_file_is_stored_without_secrets_and_means_the_same_otherwise(
    case: tuple[str, set[str]], style: str
) -> None:
    uri, secrets = case
    value = {
        "plain": f"tracking:\n  mlflow_uri: {uri} # ours",
        "single": f"tracking:\n  mlflow_uri: '{uri}'",
        "double": f'tracking:\n  mlflow_uri: "{uri}"',
        "flow": f'tracking: {{mlflow_uri: "{uri}", experiment: mine}}',
        "comment": f"# mlflow_uri: {uri}\ntracking:\n  mlflow_uri: http://open",
        "json": '"tracking": {"mlflow_uri": "' + uri.replace("/", "\\/") + '"}',
        "folded": f"tracking:\n  mlflow_uri: >-\n    {uri}",
    }[style]
    text = f"name: laptop # me@here, see the page\n{value}\nseed: 1\n"
    stored = without_uri_secrets(text)
    assert not any(secret in stored for secret in secrets)
    assert not any(secret.replace("/", "\\/") in stored for secret in secrets)
    before, after = YAML(typ="safe").load(text), YAML(typ="safe").load(stored)
    assert before.pop("tracking").keys() == after.pop("tracking").keys()
    assert before == after
    assert without_uri_secrets(stored) == stored


@given(uris())
def test_an_error_text_is_shown_without_secrets(case: tuple[str, set[str]]) -> None:
    uri, secrets = case
    text = f"cannot open {uri}: " + "; ".join(f"tried {secret} in vain" for secret in sorted(secrets))
    assert not any(secret in without_secrets(text, uri) for secret in secrets)


@pytest.mark.parametrize(
    ("line", "stored"),
    [
        ("mlflow_uri: mysql://me:open it's@db/ml # ours", "mlflow_uri: mysql://***@db/ml # ours"),
        ("# mlflow_uri: mysql://me:open it's@db/ml", "# mlflow_uri: mysql://***@db/ml"),
        ('{"mlflow_uri": "mysql://me:open #1 it\'s@db/ml"}', '{"mlflow_uri": "mysql://***@db/ml"}'),
        ("mlflow_uri: 'mysql://me:open #1 it''s@db/ml' # ours", "mlflow_uri: 'mysql://***@db/ml' # ours"),
    ],
)
def test_blanks_in_a_password_go_too(line: str, stored: str) -> None:
    assert without_uri_secrets(line) == stored


def test_a_scheme_may_stand_behind_anything() -> None:
    for before in ("1", "=", "x" * 100, "(", "\t"):
        assert without_uri_secrets(f"{before}http://me:hunter2@h") == f"{before}http://***@h"


def test_a_text_without_secrets_stays_as_it_is() -> None:
    text = "name: x # me@here\ntracking:\n  folder: runs@home\n  mlflow_uri: sqlite:////data/me@home/mlflow.db\n"
    assert without_uri_secrets(text) == text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////data/runs/mlflow.db", "sqlite:////data/runs/mlflow.db"),
        ("sqlite:////data/me@home/mlflow.db", "sqlite:////data/me@home/mlflow.db"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("https://tracking.example", "https://tracking.example"),
        ("http://me:hunter2@tracking:5000/x", "http://***@tracking:5000/x"),
        ("http://me:hun/ter2@tracking:5000/x", "http://***@tracking:5000/x"),
        ("http://me:hun?t@er2@tracking:5000/x", "http://***@tracking:5000/x"),
        ("https://token@tracking", "https://***@tracking"),
        ("https://tracking/x?hunter2", "https://tracking/x?***"),
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
    uri = "http://me:hunt%2Fer2@tracking?sslmode=require"
    text = f"{uri} failed; http://me:other@tracking/api; password hunt/er2 or hunt%2Fer2; require; swordfish"
    shown = "http://***@tracking?sslmode=*** failed; http://***@tracking/api; password *** or ***; require; ***"
    assert without_secrets(text, uri) == shown


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
