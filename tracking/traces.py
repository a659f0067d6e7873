"""Traces of profiled steps, beside the journal: `traces/<trial_id>.json.gz`, for chrome://tracing and Perfetto.

Only finalists have one. A trace is a help to people, and no part of the truth: losing one costs nothing else.
"""

import logging
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)
FOLDER = "traces"


def trace_path(run_folder: Path, trial_id: str) -> Path:
    return run_folder / FOLDER / f"{trial_id}.json.gz"


def store_trace(run_folder: Path, trial_id: str, packed: bytes) -> None:
    """Whole or not at all. A disk that takes no more is said, never raised."""
    path = trace_path(run_folder, trial_id)
    partial = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_bytes(packed)
        partial.rename(path)
    except OSError as error:
        log.warning("the trace of %s is not kept: %s", trial_id, error)
        with suppress(OSError):  # what is left of the disk is the journal's
            partial.unlink(missing_ok=True)
