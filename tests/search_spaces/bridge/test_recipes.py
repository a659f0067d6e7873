"""Bridge's own verdict on its shipped recipes, as published; and our rules' verdict on the same configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

FIXTURE = Path(__file__).parent.parent / "fixtures" / "bridge_recipes.jsonl"
ROWS = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
pytestmark = pytest.mark.bridge


@pytest.fixture(params=ROWS, ids=lambda row: row["recipe"])
def row(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def built(real: Any, row: dict[str, Any]) -> Any:
    try:
        return real.build(row["family"], row["recipe"])
    except real.Unknown as card:
        pytest.skip(f"the card of {card} is not here")


def effective(config: Any) -> dict[str, Any]:
    """What the published list says of a recipe after the chain."""
    model = config.model
    return {
        "dispatcher": model.moe_token_dispatcher_type,
        "backend": model.moe_flex_dispatcher_backend,
        "overlap": model.overlap_moe_expert_parallel_comm,
        "delay_wgrad": model.delay_wgrad_compute,
        "graph": model.cuda_graph_impl,
        "modules": [getattr(module, "name", module) for module in model.cuda_graph_modules or []],
        "recompute": model.recompute_granularity,
        "rmods": model.recompute_modules,
        "tp_overlap": model.tp_comm_overlap,
        "og": config.ddp.overlap_grad_reduce,
        "op": config.ddp.overlap_param_gather,
    }


def test_the_chain_says_what_was_published(real: Any, row: dict[str, Any]) -> None:
    config = built(real, row)
    why = real.refusal(config, row["gpu"], row["ranks"])
    if row["refused"]:
        assert why is not None
        assert why.startswith(row["refused"][:60])
        return
    assert why is None
    if "final" in row:
        assert effective(config) == row["final"]
