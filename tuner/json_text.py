"""JSON read strictly, with the line of what is wrong: a key given twice, half a character, a number without end."""

import json
import re
from typing import Any

from search_spaces.errors import Fault, InputError

MOST_DIGITS = 4300  # what Python reads as one integer
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_HALVES, _FIRST_HALVES, _SECOND_HALVES = range(0xD800, 0xE000), range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class _LongNumber(ValueError):
    """An integer of too many digits."""


def read_json(text: str, path: str) -> Any:
    """The data. Raises json.JSONDecodeError where it is no JSON, InputError for what is JSON and no configuration."""
    twice = False

    def built(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        made = dict(pairs)
        twice |= len(made) < len(pairs)
        return made

    try:
        data = json.loads(text, object_pairs_hook=built, parse_int=_integer)
    except RecursionError as error:
        raise InputError([Fault("nested too deeply", path)], "mend the file") from error
    except _LongNumber as error:
        digits = str(error)
        fault = Fault(f"a number of {len(digits):,} digits", path, _line(text, text.find(digits)))
        raise InputError([fault], "write a number that a setting can have") from error
    if twice:
        raise InputError(_twice(text, path), "keep one of them")
    return data


def refuse_halves(data: Any, text: str, path: str, pairs: bool) -> None:
    """Half of a surrogate pair ("\\ud800") is no character: no answer could name it. `pairs`: two escapes may be one
    character, as in JSON."""
    if "\\u" not in text and "\\U" not in text:
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        fault = Fault("an escape that is no character (half a surrogate pair)", path, _first_half(text, pairs))
        raise InputError([fault], "write the character itself") from error


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _LongNumber(digits)
    return int(digits)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1 if at >= 0 else 0


def _twice(text: str, path: str) -> list[Fault]:
    """Every key that a mapping of this JSON repeats, where it does."""
    faults, open_mappings = list[Fault](), list[dict[str, int]]()
    line, last = 1, 0
    for token in _TOKEN.finditer(text):
        line, last = line + text.count("\n", last, token.start()), token.start()
        if token[0] == "{":
            open_mappings.append({})
        elif token[0] == "}":
            open_mappings.pop()
        elif token[2]:
            key, known = json.loads(token[1], strict=False), open_mappings[-1]
            if key in known:
                message = f"key {key!r} is given twice in one mapping"
                faults.append(Fault(message, path, line, hint=f"first on line {known[key]}"))
            known.setdefault(key, line)
    return faults


def _first_half(text: str, pairs: bool) -> int:
    """The line of the first escape of half a character; 0 where there is none."""
    open_at = -1  # of a first half that waits for its second
    end = -1
    for found in _ESCAPE.finditer(text):
        code = int(found[1] or found[2] or "0", 16)
        if open_at >= 0 and (found.start() != end or code not in _SECOND_HALVES):
            return _line(text, open_at)
        if open_at >= 0:
            open_at = -1
        elif code in _FIRST_HALVES and pairs:
            open_at, end = found.start(), found.end()
        elif code in _HALVES:
            return _line(text, found.start())
    return _line(text, open_at)
