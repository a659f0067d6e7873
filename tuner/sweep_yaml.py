"""YAML read safely, with the place of every key and value, so that a fault can name its line.

Only plain data is taken: no tags, no merge keys, a bounded size (aliases counted as often as they are used).
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from search_spaces.errors import Fault, InputError
from tuner.file_text import file_text

MAX_BYTES = 256 * 1024  # a long sweep file is 5 KiB
MAX_VALUES = 20_000
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Location = Sequence[str | int]
_PREFIX = "tag:yaml.org,2002:"


@dataclass
class PlacedData:
    """Plain data with places: a path such as ("cluster", "workers") gives (line, column), both from 1."""

    file: str
    data: Json = None
    keys: dict[tuple[str | int, ...], tuple[int, int]] = field(default_factory=dict)
    values: dict[tuple[str | int, ...], tuple[int, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, where: Location, message: str, hint: str = "", at_key: bool = False) -> Fault:
        """A fault at `where`, or at the nearest enclosing value that has a place."""
        path = tuple(where)
        if at_key and path in self.keys:
            return Fault(message, self.file, *self.keys[path], hint=hint)
        while path and path not in self.values:
            path = path[:-1]
        return Fault(message, self.file, *self.values.get(path, (0, 0)), hint=hint)


def read_text(path: Path) -> str:
    """The text of a sweep file. Raises InputError where it is missing, a directory, too large or not UTF-8."""
    return file_text(path, MAX_BYTES, "name a sweep file")


def parse(text: str, file: str, most: int = MAX_VALUES) -> PlacedData:
    """The data of one YAML document of at most `most` values. Raises InputError where it is no YAML; lesser faults are
    in `faults`."""
    try:
        node = _bounded(most, file).compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        message = " ".join(str(error.problem or error.context or "not YAML").split())
        raise InputError([Fault(f"not YAML: {message}", file, *place)], "mend the YAML at this place") from error
    except YAMLError as error:  # ReaderError: characters that YAML forbids
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        raise InputError([Fault("not YAML: a forbidden character", file, line)], "name a sweep file") from error
    except RecursionError as error:
        raise InputError([Fault("nested too deeply", file)], "name a sweep file") from error
    placed = PlacedData(file)
    if node is None:
        raise InputError([Fault("the file is empty", file)], "write one with `moetune init`")
    builder = _Builder(placed, most)
    placed.data = builder.build(node, ())
    return placed


def _bounded(most: int, file: str) -> YAML:
    """A reader that gives up at more than `most` values, before it has read on: a million of them take a minute."""
    left = most

    class Counting(Composer):
        def compose_node(self, parent: Node | None, index: Any) -> Node | None:
            nonlocal left
            left -= 0 if index is None and isinstance(parent, MappingNode) else 1  # a key is no value
            if left < 0:
                raise _too_many(most, file, self.parser.peek_event().start_mark.line + 1)
            return super().compose_node(parent, index)  # type: ignore[no-any-return]

    reader = YAML(typ="safe", pure=True)
    reader.Composer = Counting
    return reader


def _too_many(most: int, file: str, line: int) -> InputError:
    return InputError([Fault(f"more than {most} values", file, line)], "use fewer values and aliases (*name)")


class _Builder:
    """Turns composed nodes into plain data, noting places and faults."""

    def __init__(self, placed: PlacedData, most: int) -> None:
        self._placed, self._most, self._left, self._open = placed, most, most, set[int]()

    def _fault(self, node: Node, message: str, hint: str = "") -> None:
        fault = Fault(message, self._placed.file, *_place(node), hint=hint)
        if fault not in self._placed.faults:
            self._placed.faults.append(fault)

    def build(self, node: Node, path: tuple[str | int, ...]) -> Json:
        self._left -= 1
        if self._left < 0:
            raise _too_many(self._most, self._placed.file, _place(node)[0])
        if id(node) in self._open:
            self._fault(node, "an alias that contains itself")
            return None
        self._placed.values[path] = _place(node)
        self._open.add(id(node))
        built = self._built(node, path)
        self._open.discard(id(node))
        return built

    def _built(self, node: Node, path: tuple[str | int, ...]) -> Json:
        if isinstance(node, MappingNode) and _tag(node) == "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and _tag(node) == "seq":
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        self._fault(node, f"tag {_tag(node)} is not allowed", "write plain values")
        return None

    def _mapping(self, node: MappingNode, path: tuple[str | int, ...]) -> Json:
        built: dict[str, Json] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or _tag(key) == "merge":
                merge = isinstance(key, ScalarNode)
                self._fault(key, "merge keys (<<) are not read" if merge else "only plain words can be keys here")
                continue
            if key.value in built:
                first = self._placed.keys[(*path, key.value)][0]
                self._fault(key, f"key {key.value!r} is given twice", f"first on line {first}")
                continue
            self._placed.keys[(*path, key.value)] = _place(key)
            built[key.value] = self.build(value, (*path, key.value))
        return built

    def _scalar(self, node: ScalarNode) -> Json:
        text, tag = str(node.value), _tag(node)
        if tag in ("str", "timestamp"):
            return text
        try:
            return _plain(text, tag)
        except ValueError:
            self._fault(node, f"{text[:40]!r} is not allowed here", "write a plain number, word, true, false or null")
            return None


def _plain(text: str, tag: str) -> Json:
    """A scalar as YAML 1.2 reads it. Raises ValueError for tags, infinities, and numbers Python cannot take."""
    if tag == "null":
        return None
    if tag == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if tag == "int":
        return int(text.replace("_", ""), 0 if text.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else 10)
    if tag == "float" and math.isfinite(number := float(text.replace("_", ""))):
        return number
    raise ValueError(text)


def _tag(node: Node) -> str:
    return str(node.tag or "").removeprefix(_PREFIX)


def _place(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
