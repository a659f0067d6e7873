"""The clean parent: one single-threaded process a worker, from which every trial's rank is forked.

Why: importing torch and Megatron-Core costs 7 to 13 s a trial; a fork of a process that has them costs
milliseconds. A Ray worker cannot be that process: it has threads, and forking it can deadlock. This one has
exactly one thread and never touches the accelerator, so a child starts with a clean CUDA state.

Protocol: JSON lines. In: `ForkRequest`. Out: {"ready": ...}, {"forked": pid},
{"exited": pid, "status": n}. End of input kills the children and ends the parent.
Run as `python -m train_worker.parent cpu|cuda`.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path

from search_spaces.shapes import Noun
from train_worker.job import RankPlace, TrialJob
from train_worker.packages import Probe, usable_packages
from train_worker.rank import apply_environment, run_rank
from train_worker.rank_report import UNREPORTED

PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGUSR1


class ForkRequest(Noun):
    """One rank to fork. `folder` is on the worker's own disk and exists."""

    job: TrialJob
    place: RankPlace
    folder: Path


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux prctl(2)): nothing is left behind."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver; it decides
    device = sys.argv[1]
    probe = Probe()  # in a process of its own, beside the imports here; ranks inherit the answer
    from train_worker.megatron.preload import preload

    preload("cuda" if device == "cuda" else "cpu")  # refuses to leave a process that is not fit to be forked
    usable_packages(probe)
    _say(ready=os.getpid())
    _serve()


def _serve() -> None:
    """Fork on request and report exits, in one thread: poll() over stdin and one pidfd a child."""
    poller = select.poll()
    children: dict[int, int] = {}  # pidfd -> pid
    stdin = sys.stdin.fileno()
    poller.register(stdin, select.POLLIN | select.POLLHUP)
    pending = b""
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == stdin:
                chunk = os.read(stdin, 1 << 20)
                if not chunk:
                    _kill_all(list(children.values()))
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    pid = _fork(ForkRequest.model_validate_json(line))
                    watch = os.pidfd_open(pid)
                    children[watch] = pid
                    poller.register(watch, select.POLLIN)
                    _say(forked=pid)
            elif descriptor in children:
                pid = children.pop(descriptor)
                end_group(pid)  # before waitpid: until then nobody else can have this number
                poller.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                _say(exited=pid, status=status)


def _fork(request: ForkRequest) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _become_rank(request)
        run_rank(request.job, request.place, request.folder)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - no report could be written (a full disk): the log is the last resort
        traceback.print_exc()
    finally:
        os._exit(UNREPORTED)


def _become_rank(request: ForkRequest) -> None:
    """Own session and process group, own log, own environment; first to go if memory runs out."""
    os.setsid()
    die_with_parent()
    log = os.open(request.folder / f"rank-{request.place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    stacks = (request.folder / f"rank-{request.place.rank}.stacks").open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    apply_environment(request.job, request.place)


def _kill_all(children: list[int]) -> None:
    for pid in children:
        end_group(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def end_group(pid: int) -> None:
    """Kill what a rank started itself (compilers, data loaders); its process group has its own number."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _say(**message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
