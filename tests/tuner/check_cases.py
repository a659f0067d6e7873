"""Configurations for `moetune check`, good and bad, and files of them."""

import json
from pathlib import Path
from typing import Any

from tuner.commands.check import CheckResult, check

FACTS = {
    "name": "qwen3_30b_a3b", "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4,
    "kv_channels": 128, "ffn_hidden_size": 6144, "moe_ffn_hidden_size": 768, "num_moe_experts": 128,
    "moe_router_topk": 8,
}  # fmt: skip
STACK = {"mcore": "0.19.2", "torch": "2.11.0", "TE": "2.20.2"}


def case(**changes: Any) -> dict[str, Any]:
    base = {
        "id": "one", "stack": STACK, "gpu_arch": "H100 sm_90", "world_size": 8, "model": FACTS,
        "knobs": {"expert_model_parallel_size": 8},
    }  # fmt: skip
    return base | changes


def knobs(**changes: Any) -> dict[str, Any]:
    return case(knobs={"expert_model_parallel_size": 8, **changes})


def facts(**changes: Any) -> dict[str, Any]:
    return case(model={**FACTS, **changes})


GOOD, BAD = case(id="good"), case(id="bad", knobs={"expert_model_parallel_size": 16})


def written(folder: Path, data: object, name: str = "cases.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data, indent=1))
    return path


def judged(folder: Path, data: object, name: str = "cases.json") -> CheckResult:
    return check(written(folder, data, name))
