"""The documents say what is there: links, file names, commands, make targets, code blocks and the tree."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.architecture.project import PACKAGES, ROOT, files, folders, text

DOCUMENTS = [path for path in files() if path.suffix == ".md"]
MARKS = {"run", "sweep", "shown"}
MARKED_LANGUAGES = {"bash", "sh", "python", "yaml"}
OPEN_FENCE = re.compile(r"^```(\w*) ?(\w*)$")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
FILE_NAME = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs|scripts|examples)/[\w./-]*)`")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it starts, its language, the word after that, and its text."""

    path: Path
    line: int
    language: str
    mark: str
    body: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def blocks(path: Path, source: str) -> list[Block]:
    found, opened, body = [], None, []
    for number, line in enumerate(source.splitlines(), start=1):
        if opened is None and (fence := OPEN_FENCE.match(line)):
            opened, body = (number, *fence.groups()), []
        elif opened is not None and line == "```":
            found.append(Block(path, *opened, "\n".join(body) + "\n"))
            opened = None
        elif opened is not None:
            body.append(line)
    assert opened is None, f"{path}: block opened on line {opened} is never closed"
    return found


def prose(source: str) -> str:
    return re.sub(r"^```.*?^```$", "", source, flags=re.MULTILINE | re.DOTALL)


def anchors(source: str) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.+)$", prose(source), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(path: Path, source: str) -> list[str]:
    broken = []
    for target in LINK.findall(prose(source)):
        if target.startswith(("https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        found = (ROOT / path).parent / name if name else ROOT / path
        if not found.exists() or (anchor and anchor not in anchors(found.read_text())):
            broken.append(target)
    return broken


ALL_BLOCKS = [block for path in DOCUMENTS for block in blocks(path, text(path))]
RUN = [block for block in ALL_BLOCKS if block.mark == "run"]
SWEEPS = [block for block in ALL_BLOCKS if block.mark == "sweep"]
COMMANDS = "\n".join(block.body for block in ALL_BLOCKS if block.language in ("bash", "sh"))
EVERYTHING = "\n".join(text(path) for path in DOCUMENTS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_links_and_file_names_resolve(path: Path) -> None:
    source = text(path)
    assert not broken_links(path, source)
    assert not [name for name in FILE_NAME.findall(source) if not (ROOT / name).exists()]


def test_a_broken_link_is_found() -> None:
    source = "[a](no/such.md) [b](README.md#no-such) [c](#here) [d](https://example.org)\n## Here\n"
    assert broken_links(Path("CHANGELOG.md"), source) == ["no/such.md", "README.md#no-such", "#here"]


def test_every_block_of_code_says_whether_it_is_run() -> None:
    unmarked = [str(b) for b in ALL_BLOCKS if b.language in MARKED_LANGUAGES and b.mark not in MARKS]
    assert not unmarked, "write ```bash run, ```yaml sweep or ```bash shown"
    assert RUN, "nothing in the documents is run"


@pytest.fixture
def desk(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder of its own with the examples in it, and an environment in which `moetune` is on PATH."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / ".bin"
    programs.mkdir()
    moetune = programs / "moetune"
    moetune.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "from tuner.cli import main; raise SystemExit(main())" "$@"\n'
    )
    moetune.chmod(0o755)
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return tmp_path, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_marked_run_runs(block: Block, desk: tuple[Path, dict[str, str]]) -> None:
    folder, env = desk
    command = ["bash", "-euo", "pipefail", "-c"] if block.language in ("bash", "sh") else [sys.executable, "-c"]
    result = subprocess.run([*command, block.body], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize("block", SWEEPS, ids=str)
def test_a_block_marked_sweep_loads(block: Block, tmp_path: Path) -> None:
    from tuner.sweep import load_sweep

    path = tmp_path / "sweep.yaml"
    path.write_text(block.body)
    load_sweep(path)


def test_commands_that_are_named_exist() -> None:
    from tuner.cli import main

    verbs = set(re.findall(r"(?:^|[`/ ])moetune ([a-z]+)\b", COMMANDS, re.MULTILINE))
    verbs |= set(re.findall(r"`moetune ([a-z]+)\b", EVERYTHING))
    assert {"plan", "run", "ui"} <= verbs
    for verb in sorted(verbs):
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0, verb


def test_make_targets_that_are_named_exist() -> None:
    there = set(re.findall(r"^([a-z-]+):", text(Path("Makefile")), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", COMMANDS, re.MULTILINE)) | set(
        re.findall(r"`make ([a-z-]+)", EVERYTHING)
    )
    assert {"demo", "test", "check"} <= named
    assert named <= there


def tree() -> set[str]:
    (block,) = [block for block in ALL_BLOCKS if block.path == Path("README.md") and block.mark == "tree"]
    return {line.split()[0] for line in block.body.splitlines()}


def test_the_tree_in_the_readme_is_the_real_one() -> None:
    """Root files, root folders, and the folders inside packages."""
    # A user's own files (mine.yaml, out/) are not the project's: only what is tracked counts.
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    real = {str(path) for path in files() if len(path.parts) == 1 and str(path) in tracked}
    for folder in folders():
        if not any(name.startswith(f"{folder}/") for name in tracked):
            continue
        if len(folder.parts) == 1 or (folder.parts[0] in PACKAGES and len(folder.parts) == 2):
            real.add(f"{folder}/")
    assert tree() == real


def keys(noun: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a sweep file with its field; the facts of a model and of a stack have their own places."""
    for name, field in noun.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_every_key_of_a_sweep_file_is_documented() -> None:
    from tuner.sweep_spec import SweepSpec

    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) ?\|", text(Path("docs/sweep-file.md")), re.MULTILINE)
    fields = dict(keys(SweepSpec))
    assert [name for name, _ in rows] == list(dict.fromkeys(name for name, _ in rows)), "a key stands twice"
    assert {name for name, _ in rows} == set(fields)
    for name, said in rows:
        default = fields[name].default
        if fields[name].is_required() or name.startswith("model."):
            assert not said, name
        elif name != "space.choices":
            written = {None: "none", True: "true"}.get(default, str(default))
            assert said == written or float(said) == default, f"{name} is {written}, not {said}"


def test_exit_codes_in_the_readme_are_those_of_the_errors() -> None:
    from search_spaces import errors

    said = {int(code) for code in re.findall(r"^\| (\d+) \|", text(Path("README.md")), re.MULTILINE)}
    kinds = (
        errors.MoetuneError,
        errors.InputError,
        errors.NothingAcceptable,
        errors.ResourceMissing,
        errors.Interrupted,
    )
    assert said == {0} | {kind.exit_code for kind in kinds}


def test_walls_and_what_to_try_against_them_are_those_of_the_profile() -> None:
    from train_worker import profile

    source = text(Path("docs/walls.md"))
    rows = re.findall(r"^\| (memory|host|communication|compute) \| (.*?) \| (.*?) \|$", source, re.MULTILINE)
    assert {wall: tuple(re.findall(r"`(.+?)`", settings)) for wall, _, settings in rows} == profile.SUGGESTED
    shares = {wall: [float(each) / 100 for each in re.findall(r"(\d+)%", when)] for wall, when, _ in rows}
    assert shares == {
        "memory": [profile.MEMORY_SHARE],
        "host": [profile.HOST_SHARE],
        "communication": [profile.COMMUNICATION_SHARE],
        "compute": [],
    }
    keys = [
        key for names in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", source, re.MULTILINE) for key in names.split(", ")
    ]
    assert keys
    assert not {key.strip("`") for key in keys} - set(profile.StepProfile.model_fields)
