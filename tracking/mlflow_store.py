"""MLflow as the view of a sweep: one parent run a sweep, one child run a trial. The journal stays the truth.

`MlflowStore` writes at once and raises; `tracking.mlflow_view` keeps it from holding up a sweep. Runs are keyed by
a tag and looked up first, and a run is marked complete last, so filling again mends and never doubles.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.candidate import Candidate
from search_spaces.errors import MoetuneError, ResourceMissing
from tracking import mlflow_payload as words
from tracking.record import Compared, Event, Proposed, Screened, SweepStarted, TrialRecord
from tracking.traces import FOLDER, trace_path
from tracking.uri import is_server, masked, sqlite_path, without_secrets
from train_worker.outcome import Measured

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for --json
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default of 7 blocks for 246 s on a dead server (measured)
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",  # seconds; the default is 120
}
# Answers that another try will not change. Anything else (locked, timed out, refused) is tried again.
HOPELESS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED"}
BATCH = 90  # MLflow takes 100 params or tags, 1000 entities in all


class MlflowFailed(ResourceMissing):
    """MLflow did not take a write. `hopeless`: another try of this event would fail alike."""

    def __init__(self, uri: str, why: str, hopeless: bool) -> None:
        super().__init__(f"MLflow at {masked(uri)}: {why}", "see that it runs, then fill in with `moetune report`")
        self.hopeless = hopeless


class MlflowStore:
    """Writes events to MLflow one by one (a `Store`). Raises ResourceMissing where the server cannot be reached.

    The first event must be the journal's first head; on a resume, put the journal's events again first: what is
    there already costs one search in all.
    """

    def __init__(
        self,
        uri: str,
        artifact_root: Path | None = None,
        *,
        experiment: str = words.EXPERIMENT,
        run_folder: Path | None = None,
    ) -> None:
        """`artifact_root` is for a database URI only (default: beside the SQLite file); a server has its own.

        `experiment` is made where it is not there; sweeps may share one. `run_folder` has the traces, if any.
        """
        self.uri = uri
        self._experiment_name = experiment
        self._artifact_root = artifact_root
        self._run_folder = run_folder
        self._client: MlflowClient | None = None
        self._head: SweepStarted | None = None
        self._experiment = ""
        self._parent = ""
        self._children: dict[str, str] = {}
        self._complete: set[str] = set()
        self._in_flight: set[str] = set()
        self._default: Candidate | None = None
        self._stale = False
        self._status = ""  # of the parent run, as MLflow has it
        self._last_ms = 0  # of the newest event: when the sweep ended, whenever this is written

    def put(self, event: Event) -> None:
        self.apply(event)

    def apply(self, event: Event) -> bool:
        """Like `put`; True where something was written, False where it was there already."""
        if self._head is None and not (isinstance(event, SweepStarted) and not event.resumed):
            raise MoetuneError("the first event must be sweep_started, as the journal has it first")
        try:
            with _translated(self.uri):
                return self._apply(event)
        except MlflowFailed:
            self._stale = True  # a create that timed out here may have gone through there
            raise

    def lacking(self, events: Iterable[Event]) -> list[str]:
        """Names of the runs that are absent or incomplete. Writes nothing."""
        events = tuple(events)
        head = next(event for event in events if isinstance(event, SweepStarted))
        with _translated(self.uri):
            self._connect()
            self._look_up(head)
        names = [] if self._parent in self._complete else [words.parent_name(head)]
        for record in events:
            if isinstance(record, TrialRecord) and self._child_id(head, record.number) not in self._complete:
                names.append(words.child_name(head, record.number, record.candidate))
        return names

    def close(self) -> None:
        """End the parent run: FINISHED, or KILLED where a trial is still open (a resume sets it running again)."""
        if self._client is None or not self._parent:
            return
        status, client, self._client = "KILLED" if self._in_flight else "FINISHED", self._client, None
        if self._status != status:
            with _translated(self.uri):
                for run_id in (*self._in_flight, self._parent):
                    client.set_terminated(run_id, status, self._last_ms)
            self._status = status

    def _apply(self, event: Event) -> bool:
        self._connect()
        if self._stale and self._head is not None:
            self._look_up(self._head)
        self._stale = False
        self._last_ms = max(self._last_ms, words.time_of(event) or 0)
        match event:
            case SweepStarted():
                return self._begin(event)
            case Screened():
                return self._once(f"screened-{event.accepted}", words.of_screened(event, self._head_ms))
            case Proposed():
                return self._propose(event)
            case TrialRecord():
                return self._finish(event)
            case Compared():
                key = f"compared-{event.finalist_id}-{event.rounds}-{event.ratio:.6f}"
                return self._once(key, words.of_compared(event, self._head_ms))

    @property
    def client(self) -> "MlflowClient":
        assert self._client is not None
        return self._client

    @property
    def head(self) -> SweepStarted:
        assert self._head is not None
        return self._head

    @property
    def _head_ms(self) -> int:
        return words.milliseconds(self.head.started_at)

    def live(self) -> None:
        """Let go without ending the parent run: the sweep is still being driven by another process."""
        self._client = None

    def _connect(self) -> None:
        if self._client is not None:
            return
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # 2-3 s, and only needed here

        logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # it logs a traceback for a locked database; we say it
        logging.getLogger("alembic").setLevel(logging.WARNING)
        with alone(self.uri):
            client = MlflowClient(tracking_uri=self.uri)
            client.search_experiments(max_results=1)  # makes a fresh database's tables
        self._client = client

    def _begin(self, head: SweepStarted) -> bool:
        first = self._head is None
        if first:
            self._look_up(head)
            if not self._parent:
                self._make_parent(head)
        if first and self._parent in self._complete:
            self._head = head
            return False
        if head == self._head:
            return False
        if not first:
            written = self._once(f"head-{head.started_at}", words.Payload(tags={"resumed_at": head.started_at}))
            if written:
                self._run_again()
            return written
        self._write(self._parent, words.of_head(head))
        self._mark_complete(self._parent)
        self._head = head
        return True

    def _look_up(self, head: SweepStarted) -> None:
        """Find the parent and all children of an earlier filling: two searches, however many trials."""
        experiment = self.client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            return
        self._experiment = experiment.experiment_id
        uid = words.parent_uid(head)
        for run_id, status, tags in self._search(f"tags.`{words.UID}` = '{uid}'"):
            if not self._parent:
                self._parent, self._status = run_id, status
                self._marks(run_id, tags)
        if not self._parent:
            return
        for run_id, _, tags in self._search(f"tags.`{words.PARENT}` = '{self._parent}'"):
            known = self._children.setdefault(tags.get(words.UID, run_id), run_id)
            if known != run_id:  # a create that timed out here and went through there
                self.client.delete_run(run_id)
            else:
                self._marks(run_id, tags)

    def _run_again(self) -> None:
        self.client.update_run(self._parent, "RUNNING")
        self._status = "RUNNING"

    def _marks(self, run_id: str, tags: dict[str, str]) -> None:
        if words.COMPLETE in tags:
            self._complete.add(run_id)
        self._complete |= {f"{run_id} {name}" for name in tags if name.startswith(f"{words.COMPLETE}.")}

    def _search(self, query: str) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Run id, status and tags of what matches, oldest first."""
        token = None
        while True:
            page = self.client.search_runs(
                [self._experiment], query, max_results=1000, order_by=["attributes.start_time ASC"], page_token=token
            )
            yield from ((run.info.run_id, run.info.status, dict(run.data.tags)) for run in page)
            token = page.token
            if not token:
                return

    def _make_parent(self, head: SweepStarted) -> None:
        if not self._experiment:
            self._experiment = self.client.create_experiment(self._experiment_name, self._artifact_location())
        self._parent = self.client.create_run(
            self._experiment,
            start_time=words.milliseconds(head.started_at),
            tags={words.UID: words.parent_uid(head)},
            run_name=words.parent_name(head),
        ).info.run_id
        self._status = "RUNNING"

    def _artifact_location(self) -> str | None:
        """Beside the database, not in whatever folder the command was started; None leaves it to a server."""
        if is_server(self.uri):
            return None
        root = self._artifact_root or (sqlite_path(self.uri) or Path("mlflow.db")).parent / "mlartifacts"
        return root.resolve().as_uri()

    def _once(self, name: str, payload: words.Payload) -> bool:
        """Write to the parent what has its own mark, such as a comparison."""
        mark = words.mark(name)
        if f"{self._parent} {mark}" in self._complete:
            return False
        self._write(self._parent, payload)
        self.client.set_tag(self._parent, mark, "1")
        self._complete.add(f"{self._parent} {mark}")
        return True

    def _child_id(self, head: SweepStarted, number: int) -> str:
        return self._children.get(words.child_uid(words.parent_uid(head), number), "")

    def _propose(self, event: Proposed | TrialRecord) -> bool:
        if event.purpose == "baseline" and self._default is None:
            self._default = event.candidate
        if run_id := self._child_id(self.head, event.number):
            if run_id not in self._complete:
                self._in_flight.add(run_id)
            return False
        uid = words.child_uid(words.parent_uid(self.head), event.number)
        run_id = self.client.create_run(
            self._experiment,
            start_time=words.milliseconds(event.at if isinstance(event, Proposed) else event.started_at),
            tags={words.UID: uid, words.PARENT: self._parent},
            run_name=words.child_name(self.head, event.number, event.candidate),
        ).info.run_id
        self._children[uid] = run_id
        self._in_flight.add(run_id)
        self._write(run_id, words.of_proposed(event, self._default))
        return True

    def _finish(self, record: TrialRecord) -> bool:
        self._propose(record)
        run_id = self._child_id(self.head, record.number)
        if run_id in self._complete:
            return False
        # The request again: a process killed between creating a run and describing it leaves an empty one.
        self._write(run_id, words.of_proposed(record, self._default))
        self._write(run_id, words.of_record(record))
        if self._run_folder is not None and (trace := trace_path(self._run_folder, record.trial_id)).exists():
            self.client.log_artifact(run_id, str(trace), FOLDER)
        status = "FINISHED" if isinstance(record.outcome, Measured) else "FAILED"
        self.client.set_terminated(run_id, status, words.milliseconds(record.ended_at))
        self._mark_complete(run_id)
        self._in_flight.discard(run_id)
        return True

    def _mark_complete(self, run_id: str) -> None:
        self.client.set_tag(run_id, words.COMPLETE, "1")  # last of all: a run without it is written again
        self._complete.add(run_id)

    def _write(self, run_id: str, payload: words.Payload) -> None:
        from mlflow.entities import Metric, Param, RunTag

        params = [Param(key, value) for key, value in payload.params.items()]
        tags = [RunTag(key, value) for key, value in payload.tags.items()]
        metrics = [Metric(point.key, point.value, point.at_ms, point.step) for point in payload.metrics]
        for start in range(0, max(len(params), len(tags)), BATCH):
            self.client.log_batch(
                run_id, params=params[start : start + BATCH], tags=tags[start : start + BATCH], synchronous=True
            )
        for start in range(0, len(metrics), 10 * BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + 10 * BATCH], synchronous=True)
        for name, text in payload.texts.items():
            self.client.log_text(run_id, text, name)


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    try:
        yield
    except (MoetuneError, AssertionError):
        raise
    except Exception as error:  # noqa: BLE001 - MLflow's own, SQLAlchemy's, requests' and the artifact store's errors
        text = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0], uri)
        raise MlflowFailed(uri, text, getattr(error, "error_code", "") in HOPELESS) from None


@contextlib.contextmanager
def alone(uri: str) -> Iterator[None]:
    """One process at a time makes the tables of a fresh SQLite file.

    MLflow 3.17.2's migrations do not expect company: of two processes at once one failed ("duplicate column name").
    """
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
