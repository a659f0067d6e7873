"""Where a command's words go: stdout for people, or one JSON document there; and what to do where they cannot.

A reader that goes away (`| head`) is no fault; a full disk or a closed stdout is a missing resource.
"""

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from errno import EIO
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from search_spaces.errors import InputError, MoetuneError, ResourceMissing
from tracking.ballast import NO_ROOM

# Marks that a terminal obeys (ESC above all): what a trial or a journal says is data. They have no width in a table.
OBEYED = dict.fromkeys(mark for mark in (*range(0x20), *range(0x7F, 0xA0)) if chr(mark) not in "\n\t")
PIPE_WIDTH = 160  # characters; a pipe has no width of its own
NEXT_STEP = "send the output to a place with room, such as another file"


class PatientConsole(Console):
    """A console whose reader may go away: what is left goes nowhere, and the sweep goes on.

    Text has no control characters; rich's own (colours, the live table) are no text.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(OBEYED), segment.style)

    def on_broken_pipe(self) -> None:
        silence(self.file.fileno())


class Unwritten(ResourceMissing):
    """Output had no place to go."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot write the answer: {why}", NEXT_STEP)


def ready_streams() -> None:
    """Make stdout and stderr take any text. Raises Unwritten where stdout is closed: the next file opened would be it.

    A terminal that speaks less than UTF-8 gets escapes for the rest.
    """
    if sys.stderr is None:  # closed (`2>&-`)
        silence(2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # for as long as the process lives
    if sys.stdout is None:
        silence(1)
        raise Unwritten("stdout is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def console_for(as_json: bool) -> PatientConsole:
    """The console of a command; with --json it speaks on stderr."""
    return PatientConsole(stderr=as_json, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def set_aside_stdout() -> int:
    """A copy of stdout; what anyone prints from here on goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def write(descriptor: int, text: str) -> None:
    """Write a document to a copy of stdout, and close it."""
    with suppress(BrokenPipeError), os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text + "\n")


def silence(descriptor: int) -> None:
    """What is written to `descriptor` from here on goes nowhere, what is still in a buffer too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def unwritten(error: OSError) -> Unwritten | None:
    """An error of a write as one of ours; None for any other. A file that cannot be opened has a name."""
    lost = error.filename is None and error.errno in (*NO_ROOM, EIO)
    return Unwritten((error.strerror or "the device is full").lower()) if lost else None


def explain(error: MoetuneError, stdout: int | None) -> None:
    """Say an error on stderr, and as the one document on `stdout` where there is one."""
    say(f"moetune: {error}")
    if stdout is not None:
        faults = [vars(fault) for fault in error.faults] if isinstance(error, InputError) else []
        answer = {"error": error.what, "next_step": error.next_step, "exit_code": error.exit_code, "faults": faults}
        write(stdout, json.dumps(answer, indent=2))


def escaped(text: str) -> str:
    """`text` with escapes for control characters, which a terminal would obey, line breaks too."""
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in text)


def say(text: str) -> None:
    """Lines on stderr; where that cannot be written either, the exit code alone tells."""
    stream: TextIO = sys.stderr
    try:
        print("\n".join(map(escaped, text.split("\n"))), file=stream, flush=True)
    except OSError:
        silence(2)
