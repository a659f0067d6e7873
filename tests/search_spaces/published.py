"""Published configurations, kept as figures, told as `moetune check` reads them.

`fixtures/published_configs.jsonl`: rows of public performance pages and scripts. `fixtures/shipped_recipes.jsonl`: what
the performance recipes of Megatron Bridge 0.6.2 hold, with the answer of its own validation on megatron-core 0.19.2.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
STACK = {"mcore": "0.19.2", "torch": "2.11.0", "TE": "2.20.2", "bridge": "0.6.2"}
GPUS = {
    "H100": "H100 sm_90", "B200": "B200 sm_100", "GB200": "GB200 sm_100", "B300": "B300 sm_103",
    "GB300": "GB300 sm_103", "VR200": "VR200 sm_100",
}  # fmt: skip
SIZES = {
    "tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size", "mbs": "micro_batch_size", "gbs": "global_batch_size",
    "seq_length": "seq_length",
}  # fmt: skip
# What a page calls a precision; the first word found wins.
PRECISIONS: tuple[tuple[str, dict[str, object]], ...] = (
    ("mxfp8", {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    ("nvfp4", {"fp4": "e2m1", "fp4_recipe": "nvfp4"}),
    ("block", {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
    ("fp8", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


def cases(name: str) -> list[dict[str, Any]]:
    """Configurations with `expected` ("valid" or "invalid") and `rule` beside them."""
    found: list[dict[str, Any]] = json.loads((FIXTURES / name).read_text())["cases"]
    return found


def models() -> dict[str, dict[str, Any]]:
    """Facts of the models that the figures are about; of some only a few are public."""
    found: dict[str, dict[str, Any]] = json.loads((FIXTURES / "published_models.json").read_text())
    return found


def published_cases(named_launcher: bool) -> Iterator[dict[str, Any]]:
    """The rows of pages. `named_launcher`: say Megatron Bridge where ETP is not printed."""
    facts = models()
    for row in rows("published_configs.jsonl"):
        case = _case(row, facts) | {"knobs": {**_sizes(row), **_published_knobs(row)}}
        if named_launcher and row.get("etp") is None:
            case["framework"] = "megatron-bridge"
        yield case


def recipe_cases(as_paths: bool) -> Iterator[dict[str, Any]]:
    """The shipped recipes. `as_paths`: under Bridge's own paths; else as plain fields, the launcher in the stack."""
    facts = models()
    for row in rows("shipped_recipes.jsonl"):
        precision = {f"mixed_precision.{name}" if as_paths else name: v for name, v in row["mixed_precision"].items()}
        knobs = {**_sizes(row), **_recipe_knobs(row), **precision, **row.get("more", {})}
        env = {name: str(value) for name, value in row["env_vars"].items()}
        yield _case(row, facts) | {"knobs": knobs, "env": env}


def _case(row: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"], "stack": STACK, "gpu_arch": GPUS[row["gpu"]], "world_size": row["num_gpus"],
        "model": {"name": row["model"], **facts[row["model"]]}, "expected": row.get("expected", "valid"),
        "rule": row.get("rule", "-"),
    }  # fmt: skip


def _sizes(row: Mapping[str, Any]) -> dict[str, object]:
    sizes = {name: row[key] for key, name in SIZES.items() if row.get(key) is not None}
    return sizes | ({"sequence_parallel": True} if sizes[SIZES["tp"]] > 1 else {})


def _published_knobs(row: Mapping[str, Any]) -> dict[str, object]:
    knobs: dict[str, object] = dict(next((found for word, found in PRECISIONS if word in row["precision"]), {}))
    knobs |= _dispatcher(row.get("dispatcher"))
    if graph := row.get("cuda_graph"):
        knobs |= {"cuda_graph_impl": graph["impl"], "cuda_graph_modules": graph["modules"]}
    if recompute := row.get("recompute"):
        knobs |= {f"recompute_{name}": value for name, value in recompute.items()}
    if row.get("ep_overlap"):
        knobs["overlap_moe_expert_parallel_comm"] = True
    if row.get("delay_wgrad"):
        knobs["delay_wgrad_compute"] = True
    return knobs | _experts(row)


def _dispatcher(printed: str | None) -> dict[str, object]:
    if printed is None:
        return {}
    kind, _, backend = printed.partition("/")
    return {"moe_token_dispatcher_type": kind} | ({"moe_flex_dispatcher_backend": backend} if backend else {})


def _experts(row: Mapping[str, Any]) -> dict[str, object]:
    knobs: dict[str, object] = {}
    if row.get("paged_stash"):
        knobs |= {"moe_paged_stash": True, "moe_expert_rank_capacity_factor": 1.5}
    if row.get("op_fuser"):
        knobs["use_transformer_engine_op_fuser"] = True
    if row.get("offload_modules"):
        knobs |= {"fine_grained_activation_offloading": True, "offload_modules": row["offload_modules"]}
    return knobs


def _recipe_knobs(row: Mapping[str, Any]) -> dict[str, object]:
    knobs = _experts(row)
    if (final := row.get("final")) is None:
        return knobs
    knobs |= {
        "moe_token_dispatcher_type": final["dispatcher"], "moe_flex_dispatcher_backend": final["backend"],
        "overlap_moe_expert_parallel_comm": final["overlap"], "delay_wgrad_compute": final["delay_wgrad"],
        "cuda_graph_impl": final["graph"], "cuda_graph_modules": final["modules"],
        "recompute_granularity": final["recompute"], "recompute_modules": final["rmods"],
        "tp_comm_overlap": final["tp_overlap"], "overlap_grad_reduce": final["og"], "overlap_param_gather": final["op"],
    }  # fmt: skip
    return {name: value for name, value in knobs.items() if value is not None}
