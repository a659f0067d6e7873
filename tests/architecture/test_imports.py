"""The import contracts of pyproject.toml: kept by the project, and each one able to fail.

The second half writes a small copy of the package tree in which every allowed import exists, then breaks one
contract at a time. A contract that never breaks proves nothing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.project import ROOT

# File -> the imports it may have, by pyproject's contracts. The copy also needs __init__.py files.
ALLOWED = {
    "search_spaces/space.py": "",
    "train_worker/cpu.py": "import torch\nimport megatron.core\n",
    "train_worker/entry.py": "import ray\nimport search_spaces.space\n",
    "train_worker/megatron/trial.py": "import torch\nfrom megatron.core import parallel_state\n",
    "tracking/mlflow_store.py": "import mlflow\nimport train_worker.entry\n",
    "tuner/proposer.py": "import optuna\nimport tracking.mlflow_store\n",
    "tuner/search.py": "import ray\n",
    "tuner/launch/slots.py": "import ray\n",
}
# Contract id -> the file and the import that must break it.
BREACHES = [
    ("layers", "search_spaces/space.py", "import tuner.search"),
    ("layers", "train_worker/entry.py", "import tracking.mlflow_store"),
    ("light", "search_spaces/space.py", "import mlflow"),
    ("torch", "tuner/search.py", "import torch"),
    ("torch", "tracking/mlflow_store.py", "from torch import nn"),
    ("megatron", "train_worker/entry.py", "from megatron.core import parallel_state"),
    ("mlflow", "tuner/search.py", "def late() -> None:\n    import mlflow.tracking"),
    ("optuna", "tuner/search.py", "import optuna"),
    ("ray", "tracking/mlflow_store.py", "from ray import tune"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the tree in `folder`, with pyproject.toml from there."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def broken(output: str) -> list[str]:
    """Names of the contracts that import-linter calls broken."""
    return re.findall(r"^(.+?) BROKEN", output, re.MULTILINE)


def contract_name(contract_id: str) -> str:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'^id = "{contract_id}"\nname = "(.+)"$', text, re.MULTILINE)
    assert found, f"no contract {contract_id} in pyproject.toml"
    return found.group(1)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in ALLOWED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_the_project_keeps_its_contracts() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_allowed_imports_are_allowed(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("contract", "file", "breach"), BREACHES, ids=[f"{c}-{f}" for c, f, _ in BREACHES])
def test_each_contract_can_fail(copy: Path, contract: str, file: str, breach: str) -> None:
    path = copy / file
    path.write_text(f"{path.read_text()}{breach}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert contract_name(contract) in broken(result.stdout)
