"""House rules that a machine can check, over every source file. Each check is shown to catch what it is for."""

import ast
import graphlib
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import grimp
import pytest
from ruamel.yaml import YAML

from tests.architecture.project import PACKAGES, ROOT, files, python_files, text

LONGEST_FUNCTION = 60  # lines, house rule 10
LONGEST_FILE = 400  # lines; the rule says mostly under 300
SHORTEST_REASON = 3  # words

# Written in parts, or this file would be found by its own check. Registry hosts, settings of an index, home folders.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"pypi\." + r"(org|nvidia\.com)",
            "python" + r"hosted\.org",
            r"download\.py" + r"torch\.org",
            r"(^|[^-\w])--?(extra-)?" + r"index-url",
            "find-" + r"links\s*=",
            r"(?<![\w.])/(" + r"root|home/\w+|Users/\w+|work)/",
        ]
    ),
    re.MULTILINE,
)


def long_functions(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                found.append(f"{node.name}, line {node.lineno}: {lines} lines")
    return found


def broad_handlers(source: str) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                yield node


def comments(source: str) -> dict[int, str]:
    """Line -> its comment, without markers for tools."""
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    bare = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return {line: re.sub(r"(noqa|type: ignore|pragma)\S*( ?[A-Z]+\d+,?)*", "", words) for line, words in bare.items()}


def unexplained_handlers(source: str) -> list[int]:
    """Lines of broad excepts without a comment of some words on the line, before it, or first in its body."""
    said = comments(source)

    def explained(line: int) -> bool:
        return any(len(said.get(near, "").split()) >= SHORTEST_REASON for near in (line - 1, line, line + 1))

    return [node.lineno for node in broad_handlers(source) if not explained(node.lineno)]


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_a_source_file_keeps_the_rules(path: Path) -> None:
    source = text(path)
    assert source.count("\n") <= LONGEST_FILE, f"{path} is longer than {LONGEST_FILE} lines"
    assert not long_functions(source), f"{path}: functions over {LONGEST_FUNCTION} lines"
    assert not unexplained_handlers(source), f"{path}: a broad except needs a comment with its reason"
    assert path.name not in ("utils.py", "helpers.py", "common.py"), f"{path}: name a file by what it holds"


def test_the_checks_find_what_they_are_for() -> None:
    assert long_functions("def f():\n" + "    x = 1\n" * 60)
    assert not long_functions("def f():\n" + "    x = 1\n" * 59)
    for kind in ("", " Exception", " (OSError, BaseException) as error"):
        assert unexplained_handlers(f"try:\n    f()\nexcept{kind}:  # noqa: BLE001\n    pass\n") == [3]
    assert not unexplained_handlers(
        "try:\n    f()\nexcept Exception:  # noqa: BLE001 - user code may raise anything\n    f()\n"
    )
    assert not unexplained_handlers("try:\n    f()\nexcept OSError:\n    f()\n")


def test_no_address_of_a_registry_and_no_home_folder() -> None:
    found = []
    for path in files():
        try:
            hits = FORBIDDEN.finditer(text(path))
        except UnicodeDecodeError:  # a picture
            continue
        found += [f"{path}: {hit.group()}" for hit in hits]
    assert not found


@pytest.mark.parametrize("words", ["https://pypi" + ".org/simple", "pip install --index" + "-url X", " /ro" + "ot/x"])
def test_a_forbidden_word_is_found(words: str) -> None:
    assert FORBIDDEN.search(words)


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    order = graphlib.TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    order.prepare()  # raises CycleError, which names the modules


def test_heavy_libraries_are_imported_by_statements_only() -> None:
    """import-linter reads statements; an import by name would go round its contracts."""
    pattern = re.compile(r"(import_module|__import__)\(\s*[\"'](torch|megatron|ray|optuna|mlflow)")
    assert not [str(path) for path in python_files(*PACKAGES) if pattern.search(text(path))]


def requirements() -> dict[str, tuple[str, str]]:
    """Name -> (exact version, comment) for each dependency line of pyproject.toml."""
    found = re.findall(
        r'^    "([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)", +# (.+)$', text(Path("pyproject.toml")), re.MULTILINE
    )
    return {name.lower().replace(".", "-"): (version, comment) for name, version, comment in found}


def pins() -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text(Path("constraints.txt")), re.MULTILINE))


def test_each_dependency_is_exact_pinned_and_says_who_needs_it() -> None:
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]
    declared = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    found = requirements()
    assert len(found) == len(declared), "a dependency without an exact version or a comment"
    for name, (version, comment) in found.items():
        assert pins()[name] == version, f"{name}: run `make constraints`"
        paths = re.findall(r"[\w./-]*/[\w./-]*|\.[\w./-]+\.yaml", comment.split(":")[0])
        missing = [path for path in paths if not (ROOT / path).exists()]
        assert not missing, f"{name} names files that are not there: {missing}"


def test_this_environment_is_the_pinned_one() -> None:
    """Asked of a fresh interpreter: setuptools puts packages of its own on the path of one that has imported it."""
    program = (
        "import json; from importlib import metadata; "
        "print(json.dumps([(d.metadata['Name'], d.version) for d in metadata.distributions()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    installed = {name.lower().replace("_", "-").replace(".", "-"): found for name, found in json.loads(done.stdout)}
    wrong = {name: (installed[name], pin) for name, pin in pins().items() if installed.get(name, pin) != pin}
    assert not wrong, "installed version, pinned version"


def test_local_hooks_download_nothing() -> None:
    config = YAML(typ="safe").load(text(Path(".pre-commit-config.yaml")))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert {hook["language"] for repo in config["repos"] for hook in repo["hooks"]} == {"system"}
