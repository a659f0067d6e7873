"""Arguments of the command line: how words are parsed, and which of them each verb takes. The verbs: `tuner.cli`."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from search_spaces.errors import Fault, InputError


class WrongArguments(InputError):
    """The command line cannot be read."""


class Parser(argparse.ArgumentParser):
    """Wrong arguments are an error of ours, and so is help that cannot be written: argparse keeps silent about that."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise WrongArguments([Fault(message)], usage)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Of --help and --version. argparse's own swallows OSError, and leaves a buffer to the interpreter's end."""
        stream = file or sys.stderr
        stream.write(message)
        stream.flush()


def sweep_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("sweep", type=Path, metavar="SWEEP", help="the sweep file (YAML)")


def add_check(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", type=Path, metavar="FILE", help="JSON or YAML: one configuration, or a list of them")


def add_run(verb: argparse.ArgumentParser) -> None:
    sweep_argument(verb)
    verb.add_argument("--resume", action="store_true", help="go on with the latest run of this sweep")
    verb.add_argument(
        "--beside", action="store_true", help="start although a run of this sweep is running (on other machines)"
    )
    verb.add_argument("--address", help="join this Ray cluster (host:port) instead of starting a private one")
    verb.add_argument(
        "--isolation", choices=["slot", "job"], help="slot: warm workers (default); job: a Ray job a trial"
    )


def add_report(verb: argparse.ArgumentParser) -> None:
    sweep_argument(verb)
    verb.add_argument("-o", "--output", type=Path, metavar="DIR", help="write an HTML report there")
    verb.add_argument("--run", help='which run, such as "001"; the latest by default')


def add_init(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--model", required=True, help="a preset's name, such as qwen3-30b-a3b")
    verb.add_argument("--gpu", required=True, help='GPU name, such as H200, or "cpu"')
    verb.add_argument("--gpus", required=True, type=int, metavar="N", help="how many of them")
    verb.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to stdout")


def add_status(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", nargs="?", type=Path, default=Path("moetune-runs"), help="tracking.folder, or a sweep file"
    )


def add_stop(verb: argparse.ArgumentParser) -> None:
    sweep_argument(verb)
    verb.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds to wait for the sweep to end")


def add_fingerprint(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what the workers train on")
    verb.add_argument("--address", help="ask a worker of this Ray cluster; this machine by default")


def add_replay(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("table", type=Path, metavar="TABLE", help="recorded trials, one JSON object a line")
    verb.add_argument("--strategy", required=True, metavar="S", help="random, tpe, one-factor or walls")
    verb.add_argument("--trials", required=True, type=int, metavar="N", help="trials a search may run")
    verb.add_argument(
        "--seeds", type=int, default=20, metavar="K", help="searches, each with a seed (default: 20, at most 10,000)"
    )


def add_ui(verb: argparse.ArgumentParser) -> None:
    sweep_argument(verb)
    verb.add_argument("--port", type=int, default=5000, help="loopback port (default: 5000)")
