"""Keeps MLflow from holding up a sweep, and fills in afterwards what it missed.

`MlflowView.put` returns at once: a thread of its own writes the events in order, waits and tries again while the
server is slow, locked or dead, and says so once. What is still unwritten at the end is in the journal; `sync`
writes it later. Imports no mlflow itself (2-3 s): `tracking.mlflow_store` does, in that thread.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from search_spaces.errors import MoetuneError
from search_spaces.shapes import Noun
from tracking.mlflow_payload import EXPERIMENT
from tracking.mlflow_store import MlflowFailed, MlflowStore
from tracking.record import Event, SweepStarted
from tracking.uri import masked

log = logging.getLogger(__name__)
RETRY_S = (1.0, 5.0, 15.0, 60.0)  # a blip is over in a second; a server that is being restarted, in a minute


class SyncResult(Noun):
    """Events written, found there already, and not written (with the first reason, passwords masked)."""

    written: int
    already: int
    failed: int
    error: str = ""


class MlflowView:
    """A `Store` that never blocks and never fails a sweep. On a resume, put the journal's events again first."""

    def __init__(
        self,
        uri: str,
        artifact_root: Path | None = None,
        retry_s: tuple[float, ...] = RETRY_S,
        *,
        experiment: str = EXPERIMENT,
        run_folder: Path | None = None,
    ) -> None:
        """`retry_s`: waits between tries of one event in seconds; the last one repeats."""
        self.uri = uri
        self._make: Callable[[], MlflowStore] = lambda: MlflowStore(
            uri, artifact_root, experiment=experiment, run_folder=run_folder
        )
        self._retry_s = retry_s
        self._queue: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._abandoned = False
        self._begun = False
        self._degraded = ""
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    @property
    def degraded(self) -> str:
        """Why the view lags behind the journal, passwords masked; empty while it does not."""
        return self._degraded

    @property
    def pending(self) -> int:
        """Events not in MLflow yet, those it refused included; `moetune report` fills them in."""
        with self._changed:
            return len(self._queue) + self._dropped

    def status(self) -> str:
        """How far MLflow is behind the journal, in words for a progress table; empty where it is not."""
        pending = self.pending
        behind = f"{pending} events behind" if pending else ""
        return ": ".join(filter(None, (behind, self._degraded)))

    def put(self, event: Event) -> None:
        """Queue one event; returns at once."""
        if not self._begun and not (isinstance(event, SweepStarted) and not event.resumed):
            raise MoetuneError("the first event must be sweep_started, as the journal has it first")
        with self._changed:
            if self._closing:
                raise MoetuneError("the view is closed")
            if not self._begun:
                self._begun = True
                self._thread.start()
            self._queue.append(event)
            self._changed.notify_all()

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is pending, for at most `timeout_s`; then leave the rest to `moetune report`, and say so."""
        with self._changed:
            first, self._closing = not self._closing, True
            self._changed.notify_all()
        if self._begun and first:
            self._thread.join(timeout_s)
            self._abandoned = True
            if self.pending:
                log.warning("MLflow lacks %d events; fill them in with `moetune report`", self.pending)

    def _work(self) -> None:
        store, tries = self._make(), 0
        while (event := self._next()) is not None:
            try:
                store.put(event)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with the view must stay in the view
                if isinstance(error, MlflowFailed) and not error.hopeless:
                    self._note(str(error.what))
                    if self._closing or self._abandoned:
                        return
                    self._pause(self._retry_s[min(tries, len(self._retry_s) - 1)])
                    tries += 1
                    continue
                self._note(str(error))
                self._dropped += 1
            else:
                self._recovered(tries)
            tries = 0
            with self._changed:
                self._queue.popleft()
        try:
            if not self._abandoned:  # else `moetune report` ends the run, perhaps at this moment
                store.close()
        except Exception as error:  # noqa: BLE001 - the end mark of a run is no reason to fail a sweep
            self._note(str(error))

    def _next(self) -> Event | None:
        """The oldest event, left in the queue until it is written; None at the end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return self._queue[0] if self._queue and not self._abandoned else None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _note(self, why: str) -> None:
        if not self._degraded:
            log.warning("the sweep goes on without MLflow for now: %s", why)
        if not self._dropped:  # else the first refusal stays: what follows is only its consequence
            self._degraded = why

    def _recovered(self, tries: int) -> None:
        if tries and not self._dropped:
            log.warning("MLflow at %s answers again", masked(self.uri))
            self._degraded = ""


def missing(events: Iterable[Event], uri: str, *, experiment: str = EXPERIMENT) -> list[str]:
    """Names of the runs that MLflow lacks or has only in part, such as "laptop/001/0007-0123456789ab"."""
    return MlflowStore(uri, experiment=experiment).lacking(events)


def sync(
    events: Iterable[Event],
    uri: str,
    artifact_root: Path | None = None,
    ended: bool = True,
    *,
    experiment: str = EXPERIMENT,
    run_folder: Path | None = None,
) -> SyncResult:
    """Write to MLflow what it lacks; a second call writes nothing. Never raises for a server that fails.

    `ended` False: a driver is still at work, so its runs are not closed.
    """
    pending = list(events)
    store = MlflowStore(uri, artifact_root, experiment=experiment, run_folder=run_folder)
    written = failed = 0
    why = ""
    for done, event in enumerate(pending):
        try:
            written += store.apply(event)
        except MlflowFailed as error:
            why = why or error.what
            failed += 1
            if not error.hopeless or isinstance(event, SweepStarted):
                failed += len(pending) - done - 1
                break
    already = len(pending) - written - failed
    try:
        store.close() if ended else store.live()
    except MlflowFailed as error:
        why = why or error.what
    return SyncResult(written=written, already=already, failed=failed, error=why)
