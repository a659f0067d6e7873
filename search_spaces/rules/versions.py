"""Comparing versions as the stack prints them: "2.11.0+cu130", "2.20.2", "12.9"."""

import re


def release(version: str) -> tuple[int, ...]:
    """The leading numbers: "2.11.0+cu130" -> (2, 11, 0), "2.6.0dev0" -> (2, 6, 0). () where there are none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def older(version: str, than: str) -> bool:
    """Whether `version` comes before `than`, by release numbers only: "2.6.0dev0" is not older than "2.6"."""
    left, right = release(version), release(than)
    width = max(len(left), len(right))
    return left + (0,) * (width - len(left)) < right + (0,) * (width - len(right))
