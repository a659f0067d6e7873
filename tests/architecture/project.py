"""The project's files as git sees them, shared by the tests of this folder."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("search_spaces", "train_worker", "tracking", "tuner")


@cache
def files() -> tuple[Path, ...]:
    """Every file that is tracked, or new and not ignored; relative to the root, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {Path(name) for name in listed.split("\0") if name}
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))


def folders() -> set[Path]:
    """Every folder that holds such a file, at whatever depth."""
    return {parent for path in files() for parent in path.parents if parent != Path()}


def python_files(*roots: str) -> list[Path]:
    return [path for path in files() if path.suffix == ".py" and (not roots or path.parts[0] in roots)]


def text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
