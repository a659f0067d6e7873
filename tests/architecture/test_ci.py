""".ci/run: runs the checks and then the tests, passes their exit code on, and leaves no process behind."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.architecture.project import ROOT, text

CLOSING_LINE = "===== 3 passed in 0.10s ====="
# Detached as Ray detaches its processes: a session of its own, no pipe held open. Writes its pid.
DETACHED = "setsid sh -c 'echo $$$$ >left.pid; exec sleep 300' >/dev/null 2>&1 </dev/null &"


def ci(folder: Path, check: str, test: str) -> subprocess.CompletedProcess[str]:
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").write_text(
        f"check:\n\t@{check}\nbridge:\n\t@true\ntest:\n\t@{test}\n\t@echo '{CLOSING_LINE}'\n"
    )
    # Under `make test` the variables of that make would reach the make in here and change what it prints.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["bash", ".ci/run"]
    return subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "a clone"
    folder.mkdir()
    return folder


def ended(pid: int) -> bool:
    """Gone, or a zombie that its parent has not collected yet."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_it_ends_with_the_closing_line_of_the_tests_and_ends_what_they_left(clone: Path) -> None:
    result = ci(clone, check="echo checked", test=f"{DETACHED} sleep 0.3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "checked"
    assert result.stdout.splitlines()[-1] == CLOSING_LINE
    assert ended(int((clone / "left.pid").read_text()))


@pytest.mark.parametrize(("check", "test"), [("exit 1", "true"), ("true", "exit 1")])
def test_a_failure_is_passed_on(clone: Path, check: str, test: str) -> None:
    result = ci(clone, check, test)
    assert result.returncode != 0
    assert CLOSING_LINE not in result.stdout


def test_scripts_can_be_run() -> None:
    scripts = [Path(".ci/run"), *(path.relative_to(ROOT) for path in (ROOT / "scripts").glob("*.sh"))]
    assert len(scripts) >= 4
    for path in scripts:
        assert os.access(ROOT / path, os.X_OK), path
        assert text(path).startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text(path)
        subprocess.run(["bash", "-n", str(ROOT / path)], check=True)
