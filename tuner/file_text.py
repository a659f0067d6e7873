"""The text of a file that a user names: a regular one, of bounded size, in UTF-8."""

import stat
from pathlib import Path

from search_spaces.errors import Fault, InputError


def file_text(path: Path, most: int, next_step: str) -> str:
    """The text, of at most `most` bytes. Raises InputError where the file is none, is larger, or is not UTF-8."""
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # a pipe without a writer would keep us for ever
            raise InputError([Fault("not a regular file: a pipe, socket or device", str(path))], next_step)
        with path.open("rb") as stream:
            raw = stream.read(most + 1)
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise InputError([Fault(f"cannot read it: {reason}", str(path))], next_step) from error
    if len(raw) > most:
        raise InputError([Fault(f"larger than {most} bytes", str(path))], next_step)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError([Fault("not UTF-8 text", str(path), line)], next_step) from error
