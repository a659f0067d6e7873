"""The table by which `moetune check` knows the words of Megatron-Core without importing it."""

import importlib.util
from pathlib import Path
from types import ModuleType

from search_spaces.explicit_knobs import known_words, megatron_fields


def script(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_flags_is_that_of_the_real_parser() -> None:
    module = script("megatron_lm_flags")
    assert module.FILE.read_text() == module.text(), "run scripts/megatron_lm_flags.py"
    assert {"swiglu", "position_embedding_type", "data_path"} <= known_words()


def test_the_table_of_fields_is_that_of_the_real_classes() -> None:
    module = script("megatron_fields")
    assert module.FILE.read_text() == module.text(), "run scripts/megatron_fields.py"
    assert set(module.table()) == set(megatron_fields()) <= known_words()
