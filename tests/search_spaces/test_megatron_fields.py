"""The table by which `moetune check` knows the words of Megatron-Core without importing it."""

import importlib.util
from pathlib import Path

from search_spaces.explicit_knobs import known_words, megatron_fields


def test_the_table_of_fields_is_that_of_the_real_classes() -> None:
    script = Path(__file__).parents[2] / "scripts" / "megatron_fields.py"
    spec = importlib.util.spec_from_file_location("megatron_fields_script", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text() == module.text(), "run scripts/megatron_fields.py"
    assert set(module.table()) == set(megatron_fields()) <= known_words()
