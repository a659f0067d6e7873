"""Addresses of tracking stores: which one is meant, and how to show it without its password."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit


def default_uri(tracking_folder: Path) -> str:
    """SQLite in the tracking folder, shared by all its sweeps."""
    return f"sqlite:///{tracking_folder.resolve()}/mlflow.db"


def resolve_uri(configured: str | None, tracking_folder: Path) -> str:
    """The sweep file's URI, else MLFLOW_TRACKING_URI, else SQLite in the tracking folder."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(tracking_folder)


def masked(uri: str) -> str:
    """The URI without its user and password, and with the values of its query hidden."""
    place, mark, query = re.sub(r"://[^/\s@]*@", "://***@", uri).partition("?")
    return place + mark + re.sub(r"=[^&]*", "=***", query)


def without_secrets(text: str, uri: str) -> str:
    text = text.replace(uri, masked(uri))
    for secret in filter(None, (urlsplit(uri).password, os.environ.get("MLFLOW_TRACKING_PASSWORD"))):
        text = text.replace(secret, "***")
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def is_server(uri: str) -> bool:
    """True for a tracking server, False for a database that this process opens itself."""
    return uri.startswith(("http:", "https:", "databricks"))


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite URI (three slashes: relative to the working folder, four: absolute), else None."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
