"""Writes search_spaces/megatron_fields.json: the fields of Megatron-Core's configuration classes, with their kinds.

    python scripts/megatron_fields.py [--check]

`moetune check` knows by it which words exist without importing torch. --check exits 1 where the file is out of date.
"""

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

FILE = Path(__file__).parents[1] / "search_spaces" / "megatron_fields.json"
OWNERS = (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
PLAIN = {bool: "switch", int: "integer", float: "number", str: "word"}


def kind_of(annotation: Any) -> dict[str, Any]:
    """{"kind": switch, integer, number, word, list or other, "choices": the words of a Literal}."""
    if annotation in PLAIN:
        return {"kind": PLAIN[annotation]}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"kind": "word", "choices": [word for word in arguments if word is not None]}
    if origin in (list, tuple):
        return {"kind": "list"}
    if origin in (Union, types.UnionType):
        parts = [kind_of(part) for part in arguments if part is not type(None)]
        kinds = {part["kind"] for part in parts}
        if "list" in kinds:
            return {"kind": "list"}
        if len(parts) == 1:
            return parts[0]
        return {"kind": "number"} if kinds <= {"integer", "number"} else {"kind": "other"}
    return {"kind": "other"}


def table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for owner in OWNERS:
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if not field.name.startswith("_"):
                found.setdefault(field.name, kind_of(hints[field.name]))
    return dict(sorted(found.items()))


def text() -> str:
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table().items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(FILE.read_text() != text())
    FILE.write_text(text())
