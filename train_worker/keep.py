"""What a rank brings home besides its report: the measurement before it is profiled, and the profiled step's trace.

Profiling runs one more step, and a rank may die or hang in it. The measurement is on disk by then, as a report that the
launcher finds whatever happens; a rank that does not come out of the step ends by itself.
"""

import base64
import gzip
import json
import os
import threading
from collections.abc import Callable

from train_worker.kernels import StepTrace
from train_worker.outcome import Measured

PROFILE_LIMIT_S = 60.0  # for start and reading of the profiler, beyond the steps below
PROFILE_LIMIT_STEPS = 10  # a profiled step was 1.2 to 1.6 times a plain one (H200)


class Keeper:
    """`write` stores a measurement as this rank's report; None where the process is not the trial's own to end."""

    def __init__(self, write: Callable[[Measured], None] | None = None) -> None:
        self._write = write
        self._timer: threading.Timer | None = None
        self.trace = ""

    def measured(self, outcome: Measured) -> None:
        """Call before profiling."""
        if self._write is None:
            return
        limit_s = PROFILE_LIMIT_S + PROFILE_LIMIT_STEPS * max((step.step_time_s for step in outcome.steps), default=0.0)
        error = f"no word came from the profiled step: killed in it, ended after {limit_s:.0f} s, or its disk was full"
        self._write(outcome.model_copy(update={"profile_error": error}))
        self._timer = threading.Timer(limit_s, os._exit, (0,))  # no clean-up: another thread hangs in a collective
        self._timer.daemon = True
        self._timer.start()

    def traced(self, trace: StepTrace) -> None:
        """Keep the step for chrome://tracing and Perfetto."""
        self.trace = base64.b64encode(chrome_trace(trace)).decode()

    def close(self) -> None:
        """The rank came out of its steps: it reports by itself now."""
        if self._timer is not None:
            self._timer.cancel()


def chrome_trace(trace: StepTrace) -> bytes:
    """The step as gzipped JSON of Chrome's trace format: a row a stream; category, phase and bytes of each event.

    Made from the events and not by kineto's own export, which also has every CUDA call: some ten times the size.
    """
    events: list[dict[str, object]] = [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.category,
            "ts": round(event.start_us, 3),
            "dur": round(event.duration_us, 3),
            "pid": 0,
            "tid": event.stream,
            "args": {"phase": event.phase} | ({"bytes": event.size_bytes} if event.size_bytes else {}),
        }
        for event in trace.events
    ]
    step = {"ph": "X", "name": "step", "cat": "step", "ts": 0, "dur": trace.step_time_us, "pid": 0, "tid": "step"}
    named = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}
    text = json.dumps({"traceEvents": [named, step, *events], "host_calls": trace.host_calls})
    return gzip.compress(text.encode(), mtime=0)


def unpacked(trace: str) -> bytes:
    """The gzipped bytes of a `Keeper.trace`."""
    return base64.b64decode(trace)
