"""Where the configurations of a file begin, so that a fault can name its line. Asked only when there is a fault."""

import json
from typing import Any

from ruamel.yaml import YAML

_SPACE = " \t\r\n"


def case_lines(text: str, count: int) -> list[int]:
    """The line (from 1) at which each of `count` configurations begins; [] where it cannot be told."""
    if text.lstrip()[:1] in ("{", "["):
        offsets = _json_offsets(text)
        if len(offsets) == count:
            return _lines_of(text, offsets)
        return [1] if count == 1 else []
    found: Any = YAML().load(text)  # round trip: its lists and mappings know their lines
    if isinstance(found, dict) and "cases" in found:
        found = found["cases"]
    if isinstance(found, list):
        return [found.lc.item(index)[0] + 1 for index in range(len(found))]  # type: ignore[attr-defined]
    return [1]


def _json_offsets(text: str) -> list[int]:
    """Where the elements of the top list, or of the list under "cases", begin."""
    at = len(text) - len(text.lstrip())
    if text[at] == "{":
        key = text.find('"cases"')
        at = text.find("[", key) if key >= 0 else -1
        if at < 0:
            return []
    decoder, offsets = json.JSONDecoder(), list[int]()
    at = _skip(text, at + 1)
    while at < len(text) and text[at] != "]":
        offsets.append(at)
        at = _skip(text, decoder.raw_decode(text, at)[1])
        if at < len(text) and text[at] == ",":
            at = _skip(text, at + 1)
    return offsets


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _lines_of(text: str, offsets: list[int]) -> list[int]:
    lines, line, last = [], 1, 0
    for offset in offsets:
        line += text.count("\n", last, offset)
        last = offset
        lines.append(line)
    return lines
