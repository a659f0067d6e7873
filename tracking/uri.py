"""Addresses of tracking stores: which one is meant, and how to show it without its password."""

import os
import re
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
# JSON may write "/" as "\/". The length of the scheme is limited to keep the search linear in a long word.
_START = r"[A-Za-z][A-Za-z0-9+.-]{0,30}:(?:\\?/){2}"
# A URI inside a text such as a sweep file. In quotes, and as the value of a line "mlflow_uri: ...", it may contain
# blanks, since SQLAlchemy takes them in a password.
_IN_TEXT = re.compile(
    rf'(?<="){_START}(?:[^"\\\n]|\\.)*'
    rf"|(?<='){_START}(?:[^'\n]|'')*"
    rf"|^(?P<key>[ \t#-]*[\w.-]*ur[il]:[ \t]+){_START}[^\n]*?(?=[ \t]+\#|[ \t]*$)"
    rf"|{_START}\S*",
    re.MULTILINE,
)
# User and password: all up to the last "@", for a password may hold "/", "?" and "@" that nobody encoded. None where
# the host is empty: "@" is then part of a file's path.
_USER = re.compile(r"^([^:]*:(?:\\?/){2})(?!\\?/)(.*)@", re.DOTALL)
_QUERY = re.compile(r"([?&;])(?:([^=&;]*)=)?([^&;]+)")
_SECRET_KEY = re.compile("pass|pwd|token|key|secret|sig|auth", re.IGNORECASE)


def default_uri(tracking_folder: Path) -> str:
    """SQLite in the tracking folder, shared by all its sweeps."""
    return f"sqlite:///{tracking_folder.resolve()}/mlflow.db"


def resolve_uri(configured: str | None, tracking_folder: Path) -> str:
    """The sweep file's URI, else MLFLOW_TRACKING_URI, else SQLite in the tracking folder."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(tracking_folder)


def masked(uri: str) -> str:
    """The URI without its user and password, and with the values of its query hidden. Rather too much than too little:

    of "http://host/a@b" the host goes too, for "host" might be a user, and "a" the end of a password with "/" in it.
    """
    start, rest = _split(uri)
    return start + _QUERY.sub(lambda part: part[1] + (f"{part[2]}=" if part[2] is not None else "") + HIDDEN, rest)


def without_uri_secrets(text: str) -> str:
    """The text with every URI in it `masked`: a sweep file that is to be stored or shown."""
    return _IN_TEXT.sub(lambda found: (found["key"] or "") + masked(found[0].removeprefix(found["key"] or "")), text)


def without_secrets(text: str, uri: str) -> str:
    """The text without the secrets of `uri` in any form, and with every URI `masked`: an error message about `uri`."""
    text = text.replace(uri, masked(uri))
    for secret in sorted(_secrets(uri), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return without_uri_secrets(text)


def is_server(uri: str) -> bool:
    """True for a tracking server, False for a database that this process opens itself."""
    return uri.startswith(("http:", "https:", "databricks"))


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite URI (three slashes: relative to the working folder, four: absolute), else None."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _split(uri: str) -> tuple[str, str]:
    """Scheme with the user hidden, and what follows it."""
    found = _USER.match(uri)
    return (f"{found[1]}{HIDDEN}@", uri[found.end() :]) if found else ("", uri)


def _secrets(uri: str) -> set[str]:
    """Password, or token (a user alone), and secrets of the query: as written, and as libraries decode and encode."""
    found = _USER.match(uri)
    user, colon, password = found[2].partition(":") if found else ("", "", "")
    given = {password if colon else user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")}
    given |= {value for _, key, value in _QUERY.findall(_split(uri)[1]) if _SECRET_KEY.search(key)}
    plain = given | {unquote(each) for each in given} | {unquote_plus(each) for each in given}
    return {form for each in plain for form in (each, quote(each, safe=""), quote_plus(each))} - {"", HIDDEN}
