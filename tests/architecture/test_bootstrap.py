"""scripts/: which interpreter is chosen, and when an environment is made, kept or repaired. Installs nothing.

The machine is a folder: PATH holds only the few tools the scripts need and the fakes a test puts there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.project import ROOT

TOOLS = ("bash", "cat", "cksum", "dirname", "find", "mkdir", "rm", "sort", "touch", "sh")
SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'
# Runs the probe it is given, in the real interpreter, after the statement {0}.
ALTERED = f'exec "{sys.executable}" -I -c "import sys; {{0}}$3"'
# Records its calls; `venv` makes a folder with a real interpreter; `pip` ends with the code in the file `fail`.
FAKE_UV = f"""
case $1 in --version) exit 0 ;; esac
echo "$@" >>"{{log}}"
case $1 in
    venv) for last; do :; done; mkdir -p "$last/bin" && ln -s "{sys.executable}" "$last/bin/python" ;;
    pip) if [ -e "{{log}}.fail" ]; then exit 9; fi ;;
esac
"""


class Machine:
    """A PATH of its own, a home without pyenv, and a place for fakes (with a space in its name)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a machine"
        self.bin = self.folder / "bin"
        self.bin.mkdir(parents=True)
        for tool in TOOLS:
            real = shutil.which(tool)
            assert real, f"{tool} is needed by scripts/"
            (self.bin / tool).symlink_to(real)
        self.env = {"PATH": str(self.bin), "HOME": str(self.folder)}

    def program(self, name: str, body: str, folder: str = "bin") -> Path:
        """Put a shell script there. `good` scripts print their own path, as the probe does."""
        path = self.folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def good(self, name: str, folder: str = "bin") -> Path:
        return self.program(name, 'echo "$0"', folder)

    def run(self, script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "bash"), str(script), *arguments]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, check=False)

    def find(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(ROOT / "scripts/find_python.sh", *arguments, **env)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def found(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_python_variable_comes_before_path(machine: Machine) -> None:
    machine.good("python3.12")
    chosen = machine.good("my python", folder="elsewhere")
    assert found(machine.find(PYTHON=str(chosen))) == str(chosen)


@pytest.mark.parametrize("body", ["exit 1", SHIM, ALTERED.format("sys.version_info = (3, 11, 7); ")])
def test_a_wrong_python_variable_is_an_error_and_nothing_else_is_tried(machine: Machine, body: str) -> None:
    machine.good("python3.12")
    wrong = machine.program("mine", body)
    result = machine.find(PYTHON=str(wrong))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"PYTHON={wrong} cannot be used" in result.stderr
    assert "next:" in result.stderr


def test_a_missing_python_variable_is_an_error(machine: Machine) -> None:
    assert machine.find(PYTHON="/no/such/python").returncode == 2


def test_order_on_path(machine: Machine) -> None:
    for name in ("python3", "python3.13", "python3.12"):
        path = machine.good(name)
        assert found(machine.find()) == str(path)


def test_a_failing_shim_does_not_hide_the_real_one_behind_it(machine: Machine) -> None:
    machine.program("python3.12", SHIM)
    real = machine.good("python3.12", folder="other bin")
    path = f"{machine.bin}:{machine.folder / 'other bin'}"
    result = machine.find(PATH=path)
    assert found(result) == str(real)
    assert "exit 127" in result.stderr


@pytest.mark.parametrize("root", ["told by PYENV_ROOT", "told by pyenv", ".pyenv"])
def test_versions_under_the_pyenv_root_newest_first(machine: Machine, root: str) -> None:
    machine.program("python3.12", SHIM)
    env = {}
    if root == "told by PYENV_ROOT":
        env["PYENV_ROOT"] = str(machine.folder / root)
    elif root == "told by pyenv":
        machine.program("pyenv", f'echo "{machine.folder / root}"')
    for version in ("3.11.7", "3.12.1", "3.12.9", "3.13.0"):
        machine.good("python", folder=f"{root}/versions/{version}/bin")
    newest = machine.good("python", folder=f"{root}/versions/3.12.10/bin")
    assert found(machine.find(**env)) == str(newest)
    newest.write_text("#!/bin/sh\nexit 1\n")
    assert found(machine.find(**env)).endswith("/3.12.9/bin/python")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sys.version_info = (3, 11, 7); ", "is 3.11, not 3.12 or 3.13"),
        ("sys.version_info = (3, 14, 0); ", "is 3.14, not 3.12 or 3.13"),
        ("sys.implementation.name = 'pypy'; ", "not CPython"),
        ("sys.modules['sqlite3'] = None; ", "without a needed part"),
    ],
)
def test_an_unfit_python_is_refused_with_its_reason(machine: Machine, change: str, reason: str) -> None:
    machine.program("python3", ALTERED.format(change))
    result = machine.find()
    assert (result.returncode, result.stdout) == (4, "")
    assert reason in result.stderr
    assert "install" in result.stderr


def test_a_fit_python_passes_the_probe(machine: Machine) -> None:
    machine.program("python3", ALTERED.format(""))
    assert Path(found(machine.find())).samefile(sys.executable)


def test_uv_downloads_only_where_nothing_else_runs(machine: Machine) -> None:
    downloaded = machine.good("python3.12", folder="uv's own")
    uv = machine.program("the uv", f'case "$*" in *find*) echo "{downloaded}" ;; esac')
    assert found(machine.find("--download", str(uv))) == str(downloaded)
    on_path = machine.good("python3.13")
    assert found(machine.find("--download", str(uv))) == str(on_path)


def test_a_download_that_fails_ends_with_what_to_install(machine: Machine) -> None:
    uv = machine.program("uv", "exit 1")
    result = machine.find("--download", str(uv))
    assert result.returncode == 4
    assert "install" in result.stderr


class Checkout:
    """A copy of what decides the environment, on a machine whose uv is a fake."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.folder = machine.folder / "a clone"
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        self.log = machine.folder / "uv.log"
        machine.program("uv", FAKE_UV.format(log=self.log))
        machine.bin.joinpath("ln").symlink_to(shutil.which("ln") or "")
        machine.bin.joinpath("python3.12").symlink_to(sys.executable)

    def bootstrap(self, mode: str) -> tuple[int, list[str]]:
        """Exit code, and the first words of uv's calls."""
        self.log.write_text("")
        result = self.machine.run(self.folder / "scripts/bootstrap.sh", mode)
        return result.returncode, [line.split()[0] for line in self.log.read_text().splitlines()]


@pytest.fixture
def checkout(machine: Machine) -> Checkout:
    return Checkout(machine)


def test_an_environment_is_made_once(checkout: Checkout) -> None:
    assert checkout.bootstrap("run") == (0, ["venv", "pip"])
    assert checkout.bootstrap("run") == (0, [])


def test_test_tools_are_added_once_and_serve_both(checkout: Checkout) -> None:
    checkout.bootstrap("run")
    assert checkout.bootstrap("dev") == (0, ["pip"])
    assert checkout.bootstrap("dev") == (0, [])
    assert checkout.bootstrap("run") == (0, [])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_pins_are_installed(checkout: Checkout, name: str) -> None:
    checkout.bootstrap("dev")
    path = checkout.folder / name
    path.write_text(path.read_text() + "# changed\n")
    assert checkout.bootstrap("dev") == (0, ["pip"])
    assert checkout.bootstrap("dev") == (0, [])


def test_a_failed_install_is_repaired_from_the_start(checkout: Checkout) -> None:
    fail = Path(f"{checkout.log}.fail")
    fail.touch()
    assert checkout.bootstrap("run") == (9, ["venv", "pip"])
    fail.unlink()
    half_made = checkout.folder / ".venv/half-made"
    half_made.touch()
    assert checkout.bootstrap("run") == (0, ["venv", "pip"])
    assert not half_made.exists()


def test_a_venv_that_does_not_run_is_made_again(checkout: Checkout) -> None:
    checkout.bootstrap("run")
    python = checkout.folder / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/no/such/python")
    assert checkout.bootstrap("run") == (0, ["venv", "pip"])


def test_a_moved_checkout_is_made_again(checkout: Checkout) -> None:
    checkout.bootstrap("run")
    (checkout.folder / ".venv/bin/moetune").write_text("#!/the/old/place/.venv/bin/python\n")
    assert checkout.bootstrap("run") == (0, ["venv", "pip"])


def test_a_wrong_python_ends_with_its_own_code(checkout: Checkout) -> None:
    checkout.machine.env["PYTHON"] = "/no/such/python"
    assert checkout.bootstrap("run") == (2, [])
    assert not os.path.lexists(checkout.folder / ".venv")


def test_without_any_python_it_says_what_to_install(checkout: Checkout) -> None:
    checkout.machine.program("uv", SHIM)  # a uv that is on PATH and does not run is no uv
    (checkout.machine.bin / "python3.12").unlink()
    result = checkout.machine.run(checkout.folder / "scripts/bootstrap.sh", "run")
    assert (result.returncode, result.stdout) == (4, "")
    assert "apt-get install python3-venv" in result.stderr
    assert not os.path.lexists(checkout.folder / ".bootstrap")


def test_an_unknown_mode_is_an_error(checkout: Checkout) -> None:
    assert checkout.bootstrap("everything") == (2, [])
