"""Output that cannot be written, and arguments that cannot be read: one line, an exit code, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuner.check_cases import GOOD, case, written

ROOT = Path(__file__).parents[2]


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m tuner.cli {command}"
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=ROOT, env=variables, check=False)


@pytest.mark.parametrize("flag", ["", "--json"])
@pytest.mark.parametrize(("place", "why"), [(">/dev/full", "no space left"), (">&-", "stdout is closed")])
def test_no_place_for_the_answer_is_a_missing_resource(tmp_path: Path, flag: str, place: str, why: str) -> None:
    done = shell(f"check {written(tmp_path, GOOD)} {flag} {place}")
    assert done.returncode == 4
    assert done.stderr.startswith("moetune: cannot write the answer")
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("words", ["--help", "--version", "run --help"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_help_that_cannot_be_written_is_said_too(words: str, buffered: str) -> None:
    done = shell(f"{words} >/dev/full", PYTHONUNBUFFERED=buffered)
    assert done.returncode == 4
    assert done.stderr.startswith("moetune: cannot write the answer: no space left")
    assert len(done.stderr.splitlines()) == 2


def test_help_is_written_where_it_can() -> None:
    done = shell("run --help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--resume" in done.stdout


@pytest.mark.parametrize("place", ["2>&-", "2>/dev/full"])
def test_without_stderr_the_answer_and_the_code_remain(tmp_path: Path, place: str) -> None:
    done = shell(f"check {written(tmp_path, GOOD)} --json {place}")
    assert (done.returncode, json.loads(done.stdout)[0]["valid"]) == (0, True)
    assert shell(f"check {tmp_path / 'none.json'} {place}").returncode == 2


def test_a_terminal_without_utf8(tmp_path: Path) -> None:
    done = shell(f"check {written(tmp_path, case(id='Größe'))}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Gr\\xf6\\xdfe" in done.stdout


@pytest.mark.parametrize("words", ["check --json", "chekc --json", "check FILE --json --fast", "plan --json"])
def test_wrong_arguments_are_one_document_too(words: str) -> None:
    done = shell(words)
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"]) == (2, 2)
    assert found["error"] in done.stderr
    assert found["next_step"].startswith("moetune")
