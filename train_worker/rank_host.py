"""The worker's hand on its ranks: starts the clean parent, forks a rank a trial, watches it, kills it alone.

Lives in a Ray Train worker (`train_worker.entry`) or in any plain process (`train_worker.gang`). One host has
at most one rank running. Nothing blocks except `start`.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from train_worker.caches import cache_environment
from train_worker.host_memory import count_oom_kills, host_memory, limit_share, oom_file
from train_worker.job import RankPlace, TrialJob
from train_worker.parent import STACKS_SIGNAL, ForkRequest
from train_worker.progress import read_progress
from train_worker.rank import progress_path, read_rendezvous, report_path
from train_worker.rank_report import KillReason, RankReport

START_LIMIT_S = 180.0
UNKILLABLE_S = 60.0
STACKS_WAIT_S = 0.5
LOG_TAIL_CHARACTERS = 2000


class UnkillableRank(RuntimeError):
    """A rank outlived SIGKILL: this worker is of no more use. The slot must start again elsewhere."""


class ParentLost(RuntimeError):
    """The clean parent did not start or died. The message holds the end of its log."""


class RankHost:
    """`folder`: scratch on this worker's disk, one subfolder a trial."""

    def __init__(self, device: Literal["cpu", "cuda"], folder: Path) -> None:
        self.device, self.folder = device, folder
        self._memory_limit = limit_share()
        self._parent: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._buffer = b""
        self._messages: list[dict[str, float]] = []
        self._clear()

    def _clear(self) -> None:
        self._job: TrialJob | None = None
        self._place: RankPlace | None = None
        self._pid: int | None = None
        self._killed: KillReason | None = None
        self._killed_at = 0.0
        self._note = ""
        self._begun = 0.0
        self._oom_file: Path | None = None
        self._oom_kills = 0

    @property
    def busy(self) -> bool:
        return self._job is not None

    @property
    def rank_pid(self) -> int | None:
        """Process id (and process group id) of the running rank."""
        return self._pid

    @property
    def parent_pid(self) -> int | None:
        return self._parent.pid if self._parent else None

    @property
    def trial_folder(self) -> Path:
        assert self._job is not None
        return self.folder / self._job.trial_id

    def start(self) -> None:
        """Start the clean parent and wait until it has imported everything. Raises ParentLost."""
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        """Start the clean parent; `wait_ready` must follow."""
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        env |= cache_environment() if self.device == "cuda" else {}
        with (self.folder / "parent.log").open("ab") as log:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "train_worker.parent", self.device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd=self.folder,
            )
        assert self._parent.stdout is not None
        os.set_blocking(self._parent.stdout.fileno(), False)
        self._selector.register(self._parent.stdout, selectors.EVENT_READ)

    def wait_ready(self) -> None:
        """Wait until the spawned parent has imported everything. Raises ParentLost."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._messages:
            self._read(0.2)
            if time.monotonic() > deadline:
                self.close()
                raise ParentLost(f"the clean parent was not ready after {START_LIMIT_S:.0f} s\n{self._parent_log()}")
        first = self._messages.pop(0)
        if "ready" not in first:
            self.close()
            reason = (self._parent_log().strip().splitlines() or ["it left no log"])[-1]
            raise ParentLost(f"the clean parent did not start: {reason}\n{self._parent_log()}")

    def begin(self, job: TrialJob, place: RankPlace) -> None:
        """Fork one rank for `job`. Starts a new parent first if the last one died."""
        if self.busy:
            raise RuntimeError(f"rank host is busy with {self.trial_folder.name}")
        if self._parent is None or self._parent.poll() is not None:
            self._drop_parent()
            self.start()
        assert self._parent is not None
        shutil.rmtree(self.folder / job.trial_id, ignore_errors=True)
        (self.folder / job.trial_id).mkdir(parents=True)
        self._job, self._place, self._begun = job, place, time.monotonic()
        # Counted here and not by the parent, which may be the kernel's choice itself.
        self._oom_file = oom_file(self._parent.pid)
        self._oom_kills = count_oom_kills(self._oom_file)
        request = ForkRequest(job=job, place=place, folder=self.trial_folder)
        assert self._parent.stdin is not None
        # A parent that has just died breaks the pipe; poll() then finds the end of file and reports it.
        with contextlib.suppress(BrokenPipeError):
            self._parent.stdin.write(request.model_dump_json().encode() + b"\n")
            self._parent.stdin.flush()

    def rendezvous(self) -> tuple[str, int] | None:
        """Host and port where this host's rank 0 listens, once known."""
        return read_rendezvous(self.trial_folder) if self.busy else None

    def poll(self, wait_s: float = 0.0) -> RankReport | None:
        """The report of the running rank once it has ended, else None. Kills a rank past its time limit.

        Raises UnkillableRank where the kernel does not end a killed rank (a driver call that never returns).
        """
        if self._job is None:
            return None
        if self._killed_at and time.monotonic() - self._killed_at > UNKILLABLE_S:
            raise UnkillableRank(f"rank process {self._pid} did not end in {UNKILLABLE_S:.0f} s after SIGKILL")
        ended = self._ended(wait_s)
        if ended is None and self._killed is None:
            self._enforce_limits(self._job)
        return None if ended is None else self._report(ended)

    def _enforce_limits(self, job: TrialJob) -> None:
        """The trial's time, and the machine's memory: past either the rank goes, alone."""
        memory = host_memory()
        if memory.share > self._memory_limit:
            used, total = memory.used_bytes / 2**30, memory.total_bytes / 2**30
            limit = f"{self._memory_limit:.0%}, just under the threshold of Ray's memory monitor"
            self._note = f"{used:.1f} of {total:.1f} GiB in use on this machine, over {limit}"
            self.kill("memory")
        elif time.monotonic() - self._begun > job.time_limit_s:
            self.kill("deadline")

    def kill(self, why: KillReason) -> None:
        """Kill the rank's whole process group; a rank still being forked is killed as soon as it has a number.

        Its stacks are asked for first where it is past its deadline.
        """
        if self._killed is not None or self._job is None:
            return
        self._killed = why
        if self._pid is not None:
            self._strike()

    def _strike(self) -> None:
        self._killed_at = time.monotonic()
        if self._killed == "deadline":
            self._signal(STACKS_SIGNAL, group=False)
            time.sleep(STACKS_WAIT_S)
        self._signal(signal.SIGKILL, group=True)

    def close(self) -> None:
        """Kill the rank, end the parent, remove what ranks left in scratch."""
        self.kill("stop")
        self._drop_parent()
        self._clear()

    def _drop_parent(self) -> None:
        if self._parent is None:
            return
        assert self._parent.stdout is not None
        assert self._parent.stdin is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._parent.stdout)
        with contextlib.suppress(BrokenPipeError):
            self._parent.stdin.close()
        try:
            self._parent.wait(5)
        except subprocess.TimeoutExpired:
            self._parent.kill()
            self._parent.wait()
        self._parent.stdout.close()
        self._parent, self._buffer, self._messages = None, b"", []

    def _ended(self, wait_s: float) -> dict[str, float] | None:
        """The exit message of the running rank; {} where the parent itself is gone."""
        alive = self._read(wait_s)
        while self._messages:
            message = self._messages.pop(0)
            if "forked" in message:
                self._pid = int(message["forked"])
                if self._killed is not None:
                    self._strike()
            elif "exited" in message and int(message["exited"]) == self._pid:
                return message
        return None if alive else {}

    def _read(self, wait_s: float) -> bool:
        """Take in what the parent wrote; False once it has closed its end."""
        if not self._selector.select(wait_s):
            return True
        assert self._parent is not None
        assert self._parent.stdout is not None
        chunk = os.read(self._parent.stdout.fileno(), 1 << 16)
        if not chunk:
            self._messages.append({})
            return False
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self._messages += [json.loads(line) for line in lines]
        return True

    def _report(self, ended: dict[str, float]) -> RankReport:
        assert self._place is not None
        rank, folder, wall_s = self._place.rank, self.trial_folder, time.monotonic() - self._begun
        phase, step = read_progress(progress_path(folder, rank))
        status = int(ended.get("status", signal.SIGKILL))
        how = {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "killed": self._killed,
            "note": self._note,
            "host_oom_kills": count_oom_kills(self._oom_file) - self._oom_kills,
            "wall_s": wall_s,
        }
        found = _read_report(report_path(folder, rank))
        if found is None:
            tails = {"stacks": _tail(folder / f"rank-{rank}.stacks"), "log_tail": _tail(folder / f"rank-{rank}.log")}
            found = RankReport(rank=rank, phase=phase, step=step, **tails)
        report = found.model_copy(update=how)
        shutil.rmtree(folder, ignore_errors=True)
        self._clear()
        if not ended:
            self._drop_parent()
        return report

    def _signal(self, number: signal.Signals, group: bool) -> None:
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self._pid, number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, number)

    def _parent_log(self) -> str:
        return _tail(self.folder / "parent.log")


def _read_report(path: Path) -> RankReport | None:
    try:
        return RankReport.model_validate_json(path.read_text())
    except (OSError, ValueError):
        return None


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
    except OSError:
        return ""
