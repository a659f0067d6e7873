"""The optional group `bridge`: runs where megatron-bridge is importable, in a process of its own.

Its stand-ins for Transformer Engine would change what other tests see, so it needs `-m bridge`.
scripts/bridge_oracle.sh makes the environment and runs it.
"""

import importlib.util
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "bridge: needs megatron-bridge; run by scripts/bridge_oracle.sh")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    why = "megatron-bridge is not installed" if importlib.util.find_spec("megatron.bridge") is None else ""
    if "bridge" not in config.getoption("markexpr", ""):
        why = why or "needs a process of its own"
    for item in items:
        if why and item.get_closest_marker("bridge"):
            item.add_marker(pytest.mark.skip(reason=f"{why}: scripts/bridge_oracle.sh"))


@pytest.fixture(scope="session")
def real() -> Any:
    """Megatron Bridge itself, loaded once (13 s)."""
    from tests.search_spaces.bridge import recipes

    recipes.load()
    return recipes
