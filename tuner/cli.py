"""The command line: `moetune VERB [SWEEP.yaml] [options]`. Parses, calls one command, prints, sets the exit code.

Exit codes: 0 done; 1 a fault of ours; 2 the input is wrong; 3 nothing acceptable found; 4 a resource is missing;
130 interrupted. With --json one JSON document goes to stdout and everything else to stderr.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console

from search_spaces.errors import InputError, MoetuneError, NothingAcceptable

OK, INTERRUPTED = 0, 130
PIPE_WIDTH = 160  # characters; a pipe has no width of its own
Command = Callable[[argparse.Namespace, Console], BaseModel | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Only a fault of ours shows a traceback."""
    options = parser().parse_args(arguments)
    # Libraries print where they like; with --json the real stdout is set aside for the one document.
    stdout = options.stdout = _set_aside_stdout() if options.json else None
    console = PatientConsole(stderr=options.json, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    command: Command = options.command
    try:
        result = command(options, console)
    except MoetuneError as error:
        _explain(error, stdout)
        return error.exit_code
    except KeyboardInterrupt:
        print("moetune: interrupted; what was finished is kept, go on with --resume", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    if stdout is not None and result is not None:
        _write(stdout, result.model_dump_json(indent=2))
    return int(options.exit_code)


class PatientConsole(Console):
    """A console whose reader may go away (`| head`): what is left goes nowhere, and the sweep goes on."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _set_aside_stdout() -> int:
    """A copy of stdout; what anyone prints from here on goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def _write(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError), os.fdopen(descriptor, "w") as stream:  # the reader (head, less) may be gone
        stream.write(text + "\n")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="moetune", description="Finds the fastest correct way to train a Mixture-of-Experts model, and proves it."
    )
    top.add_argument("--version", action="version", version=f"moetune {version('moetune')}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (function, add, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else there")
        add(verb)
        verb.set_defaults(command=function, exit_code=OK)
    return top


def _explain(error: MoetuneError, stdout: int | None) -> None:
    print(f"moetune: {error}", file=sys.stderr)
    if stdout is not None:
        faults = [vars(fault) for fault in error.faults] if isinstance(error, InputError) else []
        answer = {"error": error.what, "next_step": error.next_step, "exit_code": error.exit_code, "faults": faults}
        _write(stdout, json.dumps(answer, indent=2))


def _run(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.report import report
    from tuner.commands.run import RunOptions, run
    from tuner.sweep import load_sweep

    sweep = load_sweep(options.sweep)
    wanted = RunOptions(resume=options.resume, address=options.address, isolation=options.isolation)
    result = run(sweep, wanted, console)
    uri = sweep.spec.tracking.mlflow_uri
    answer = report(result.folder, None, uri, console)
    console.print(
        f"\nDashboard: {_command()} ui {options.sweep}\nFull report: {_command()} report {options.sweep} -o DIR"
    )
    return answer


def _command() -> str:
    """How this command was called, so that what is printed can be typed: ".venv/bin/moetune" is not on the PATH."""
    return sys.argv[0] if Path(sys.argv[0]).name == "moetune" else "moetune"


def _report(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.report import report
    from tuner.run_folder import chosen_run
    from tuner.sweep import load_sweep

    spec = load_sweep(options.sweep).spec
    folder = chosen_run(spec.tracking.folder / spec.name, options.run)
    return report(folder.path, options.output, spec.tracking.mlflow_uri, console)


def _plan(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.plan import plan, render
    from tuner.sweep import load_sweep

    found = plan(load_sweep(options.sweep))
    if not options.json:
        render(found, console)
    return found


def _check(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.check import check, render

    found = check(options.file)
    if not options.json:
        render(found, console)
    if found.faults:  # the verdicts on the others stand
        for fault in found.faults:
            print(f"moetune: {fault}", file=sys.stderr)
        options.exit_code = InputError.exit_code
    elif not any(verdict.valid for verdict in found.root):
        options.exit_code = NothingAcceptable.exit_code
    return found


def _init(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.init import write_sweep

    made = write_sweep(options.model, options.gpu, options.gpus, options.output)
    if options.output:
        console.print(f"wrote {options.output}; next: moetune plan {options.output}")
    elif not options.json:
        print(made.text, end="")
    return made


def _status(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.status import render, statuses
    from tuner.sweep import load_sweep

    folder = options.folder
    if folder.suffix in (".yaml", ".yml"):  # a sweep file, as every other verb takes it
        folder = load_sweep(folder).spec.tracking.folder
    found = statuses(folder)
    if not options.json:
        render(found, console)
    return found


def _stop(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.status import stop
    from tuner.sweep import load_sweep

    spec = load_sweep(options.sweep).spec
    found = stop(spec.tracking.folder / spec.name, options.wait)
    console.print(f"{found.sweep}/{found.run}: {found.state}, {found.finished} finished trials kept")
    return found


def _fingerprint(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.fingerprint import fingerprint_of

    found = fingerprint_of(options.device, options.address)
    if not options.json:
        console.print_json(found.model_dump_json())
    return found


def _ui(options: argparse.Namespace, _console: Console) -> BaseModel | None:
    from tracking.uri import resolve_uri
    from tuner.commands.ui import Dashboard, ui
    from tuner.sweep import load_sweep

    def announce(found: Dashboard) -> None:  # before the dashboard takes this process over
        _write(options.stdout, found.model_dump_json(indent=2))

    spec = load_sweep(options.sweep).spec
    uri = resolve_uri(spec.tracking.mlflow_uri, spec.tracking.folder)
    return ui(uri, options.port, announce if options.json else None)


def _sweep_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("sweep", type=Path, metavar="SWEEP", help="the sweep file (YAML)")


def _add_check(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", type=Path, metavar="FILE", help="JSON or YAML: one configuration, or a list of them")


def _add_run(verb: argparse.ArgumentParser) -> None:
    _sweep_argument(verb)
    verb.add_argument("--resume", action="store_true", help="go on with the latest run of this sweep")
    verb.add_argument("--address", help="join this Ray cluster (host:port) instead of starting a private one")
    verb.add_argument(
        "--isolation", choices=["slot", "job"], help="slot: warm workers (default); job: a Ray job a trial"
    )


def _add_report(verb: argparse.ArgumentParser) -> None:
    _sweep_argument(verb)
    verb.add_argument("-o", "--output", type=Path, metavar="DIR", help="write an HTML report there")
    verb.add_argument("--run", help='which run, such as "001"; the latest by default')


def _add_init(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--model", required=True, help="a preset's name, such as qwen3-30b-a3b")
    verb.add_argument("--gpu", required=True, help='GPU name, such as H200, or "cpu"')
    verb.add_argument("--gpus", required=True, type=int, metavar="N", help="how many of them")
    verb.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to stdout")


def _add_status(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", nargs="?", type=Path, default=Path("moetune-runs"), help="tracking.folder, or a sweep file"
    )


def _add_stop(verb: argparse.ArgumentParser) -> None:
    _sweep_argument(verb)
    verb.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds to wait for the sweep to end")


def _add_fingerprint(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what the workers train on")
    verb.add_argument("--address", help="ask a worker of this Ray cluster; this machine by default")


def _add_ui(verb: argparse.ArgumentParser) -> None:
    _sweep_argument(verb)
    verb.add_argument("--port", type=int, default=5000, help="loopback port (default: 5000)")


VERBS: dict[str, tuple[Command, Callable[[argparse.ArgumentParser], None], str]] = {
    "init": (_init, _add_init, "write a commented sweep file"),
    "plan": (_plan, _sweep_argument, "what a sweep would try, and what the rules refuse; needs no worker"),
    "check": (_check, _add_check, "verdict for explicit configurations, one or a list; needs no GPU"),
    "run": (_run, _add_run, "run a sweep: Ray Tune, Optuna, Ray Train, MLflow"),
    "report": (_report, _add_report, "leaderboard, failures and costs of a run; fills in what MLflow lacks"),
    "status": (_status, _add_status, "runs and what they are doing"),
    "stop": (_stop, _add_stop, "stop a running sweep cleanly, keeping its results"),
    "fingerprint": (_fingerprint, _add_fingerprint, "stack and hardware as seen on a worker"),
    "ui": (_ui, _add_ui, "the MLflow dashboard, on loopback"),
}

if __name__ == "__main__":
    sys.exit(main())
