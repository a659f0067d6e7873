"""Versions as the stack prints them ("2.11.0+cu130", "2.20.2", "12.9"): comparing them, and which are known."""

import re
from collections.abc import Mapping
from typing import NamedTuple


def release(version: str) -> tuple[int, ...]:
    """The leading numbers: "2.11.0+cu130" -> (2, 11, 0), "2.6.0dev0" -> (2, 6, 0). () where there are none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def older(version: str, than: str) -> bool:
    """Whether `version` comes before `than`, by release numbers only: "2.6.0dev0" is not older than "2.6"."""
    left, right = release(version), release(than)
    width = max(len(left), len(right))
    return left + (0,) * (width - len(left)) < right + (0,) * (width - len(right))


class Known(NamedTuple):
    """Releases (major, minor) whose checks the rules tell. Older ones than `oldest` are refused where `bounded`."""

    oldest: tuple[int, int]
    newest: tuple[int, int]
    bounded: bool = False


NEWEST = "0.19.2"  # of megatron-core
KNOWN = {
    "megatron_core": Known((0, 15), (0, 19), bounded=True),
    "megatron_bridge": Known((0, 6), (0, 6)),
    "megatron_lm": Known((0, 15), (0, 19)),
    "transformer_engine": Known((1, 0), (2, 20), bounded=True),
    "torch": Known((2, 4), (2, 12), bounded=True),
    "cuda": Known((12, 0), (13, 3), bounded=True),
    "nccl": Known((2, 18), (2, 32), bounded=True),
}


def version_faults(versions: Mapping[str, str | None]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(package, message, hint) of each version that no rule set fits; warnings where the nearest rule set is taken.

    None (not installed) is no fault; a package whose releases make no difference is not looked at.
    """
    faults, warnings = [], []
    for package, known in KNOWN.items():
        if (text := versions.get(package)) is None:
            continue
        numbers = re.search(r"\d+(?:\.\d+)+", text)
        found = release(numbers.group())[:2] if numbers else ()
        words = f"{_dotted(known.oldest)} to {_dotted(known.newest)}"
        if not found or found[0] > known.newest[0] or (found < known.oldest and known.bounded):
            faults.append((package, f"unknown version {text!r} of {package}", f"known releases: {words}"))
        elif found > known.newest:
            warnings.append(f"{package} {text} is newer than the rules, which are those of {_dotted(known.newest)}")
        elif found < known.oldest:
            warnings.append(f"{package} {text} is older than the rules, which are those of {_dotted(known.oldest)}")
    return faults, warnings


def _dotted(release_: tuple[int, int]) -> str:
    return f"{release_[0]}.{release_[1]}"
