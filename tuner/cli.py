"""The command line: `moetune VERB [SWEEP.yaml] [options]`. Parses, calls one command, prints, sets the exit code.

Exit codes: 0 done; 1 a fault of ours; 2 the input is wrong; 3 nothing acceptable found; 4 a resource is missing;
130 interrupted. With --json one JSON document goes to stdout and everything else to stderr.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console

from search_spaces.errors import Fault, InputError, MoetuneError, NothingAcceptable
from tuner import arguments
from tuner.terminal import console_for, explain, ready_streams, say, set_aside_stdout, silence, unwritten, write

OK, INTERRUPTED = 0, 130
Command = Callable[[argparse.Namespace, Console], BaseModel | None]


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Only a fault of ours shows a traceback."""
    wanted = list(sys.argv[1:] if words is None else words)
    try:
        ready_streams()
        code = _answered(wanted)
        sys.stdout.flush()
        return code
    except MoetuneError as error:
        explain(error, None)
        return error.exit_code
    except BrokenPipeError:  # the reader (head, less) went away
        silence(sys.stdout.fileno())
        return OK
    except OSError as error:
        if (lost := unwritten(error)) is None:
            raise
        silence(sys.stdout.fileno())
        explain(lost, None)
        return lost.exit_code


def _answered(wanted: Sequence[str]) -> int:
    try:
        options = parser().parse_args(wanted)
    except arguments.WrongArguments as error:
        explain(error, set_aside_stdout() if "--json" in wanted else None)
        return error.exit_code
    # Libraries print where they like; with --json the real stdout is set aside for the one document.
    stdout = options.stdout = set_aside_stdout() if options.json else None
    console = console_for(options.json)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    command: Command = options.command
    try:
        result = command(options, console)
    except MoetuneError as error:
        explain(error, stdout)
        return error.exit_code
    except KeyboardInterrupt:
        say("moetune: interrupted; what was finished is kept, go on with --resume")
        return INTERRUPTED
    if stdout is not None and result is not None:
        write(stdout, result.model_dump_json(indent=2))
    return int(options.exit_code)


def parser() -> argparse.ArgumentParser:
    top = arguments.Parser(
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


def _run(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.report import report
    from tuner.commands.run import RunOptions, run
    from tuner.sweep import load_sweep

    sweep = load_sweep(options.sweep)
    wanted = RunOptions(
        resume=options.resume, beside=options.beside, address=options.address, isolation=options.isolation
    )
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

    sweep = load_sweep(options.sweep)
    folder = chosen_run(sweep.home, options.run)
    return report(folder.path, options.output, sweep.spec.tracking.mlflow_uri, console)


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
    _settle(options, found.faults, any(verdict.valid for verdict in found.root))
    return found


def _memory(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.memory import memory, render

    found = memory(options.file)
    if not options.json:
        render(found, console)
    _settle(options, found.faults, any(plan.fit != "refused" for plan in found.root))
    return found


def _settle(options: argparse.Namespace, faults: Sequence[Fault], acceptable: bool) -> None:
    """Faults of some configurations, said; the answers on the others stand. Sets the exit code."""
    for fault in faults:
        say(f"moetune: {fault}")
    if faults:
        options.exit_code = InputError.exit_code
    elif not acceptable:
        options.exit_code = NothingAcceptable.exit_code


def _init(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.init import write_sweep

    made = write_sweep(options.model, options.gpu, options.gpus, options.output)
    for warning in made.warnings:
        say(f"moetune: warning: {warning}")
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
    from tuner.commands.status import stop, to_resume
    from tuner.sweep import load_sweep

    found = stop(load_sweep(options.sweep).home, options.wait)
    left = f"; {words}" if (words := to_resume(found)) else ""
    console.print(f"{found.sweep}/{found.run}: {found.state}, {found.finished} finished trials kept{left}")
    return found


def _fingerprint(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.fingerprint import fingerprint_of

    found = fingerprint_of(options.device, options.address)
    if not options.json:
        console.print_json(found.model_dump_json())
    return found


def _replay(options: argparse.Namespace, console: Console) -> BaseModel | None:
    from tuner.commands.replay import render, replay

    found = replay(options.table, options.strategy, options.trials, options.seeds)
    if not options.json:
        render(found, console)
    return found


def _ui(options: argparse.Namespace, _console: Console) -> BaseModel | None:
    from tracking.uri import resolve_uri
    from tuner.commands.ui import Dashboard, ui
    from tuner.sweep import load_sweep

    def announce(found: Dashboard) -> None:  # before the dashboard takes this process over
        write(options.stdout, found.model_dump_json(indent=2))

    spec = load_sweep(options.sweep).spec
    uri = resolve_uri(spec.tracking.mlflow_uri, spec.tracking.folder)
    return ui(uri, options.port, announce if options.json else None)


VERBS: dict[str, tuple[Command, Callable[[argparse.ArgumentParser], None], str]] = {
    "init": (_init, arguments.add_init, "write a commented sweep file"),
    "plan": (_plan, arguments.sweep_argument, "what a sweep would try, and what the rules refuse; needs no worker"),
    "check": (_check, arguments.add_check, "verdict for explicit configurations, one or a list; needs no GPU"),
    "memory": (_memory, arguments.add_check, "bytes per GPU by part, for explicit configurations; needs no GPU"),
    "run": (_run, arguments.add_run, "run a sweep: Ray Tune, Optuna, Ray Train, MLflow"),
    "report": (_report, arguments.add_report, "leaderboard, failures and costs of a run; fills in what MLflow lacks"),
    "status": (_status, arguments.add_status, "runs and what they are doing"),
    "stop": (_stop, arguments.add_stop, "stop a running sweep cleanly, keeping its results"),
    "fingerprint": (_fingerprint, arguments.add_fingerprint, "stack and hardware as seen on a worker"),
    "replay": (
        _replay,
        arguments.add_replay,
        "a search strategy on recorded trials: regret, waste; needs no GPU",
    ),
    "ui": (_ui, arguments.add_ui, "the MLflow dashboard, on loopback"),
}

if __name__ == "__main__":
    sys.exit(main())
