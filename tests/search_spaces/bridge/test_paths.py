"""What our flattening of paths and our Bridge rules say, Bridge does: fields overwritten, values in force, refusals."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from search_spaces.bridge_paths import OF_COMM_OVERLAP, same
from search_spaces.bridge_recipes import PRECISION_DEFAULTS
from search_spaces.rules import Case
from search_spaces.rules.bridge import RULES
from tests.search_spaces.cases import gpus
from tests.search_spaces.examples.bridge import bridge

pytestmark = pytest.mark.bridge
BASE = ("qwen", "qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config")
RANKS = 8
OVERLAP, DELAY = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"
SHORT = {"ep": "expert_model_parallel_size"}
LAYOUT = {
    "model.tensor_model_parallel_size": 1, "model.pipeline_model_parallel_size": 1,
    "model.virtual_pipeline_model_parallel_size": None, "model.expert_model_parallel_size": 8,
    "model.moe_token_dispatcher_type": "alltoall", "model.moe_flex_dispatcher_backend": "deepep",
    "model.cuda_graph_impl": "none", "model.cuda_graph_modules": [], "model.cuda_graph_scope": None,
    "model.recompute_granularity": None,
    "model.moe_shared_expert_overlap": False, "model.bf16": True,
}  # fmt: skip


def built(real: Any, paths: Mapping[str, Any]) -> Any:
    """The base recipe without its own two setups, with the paths written into it as a user's script would."""
    training = real.importlib.import_module("megatron.bridge.training.comm_overlap")
    precision = real.importlib.import_module("megatron.bridge.training.mixed_precision")
    config = real.build(*BASE)
    config.comm_overlap = config.mixed_precision = None
    if any(path.startswith("comm_overlap") and value is not None for path, value in paths.items()):
        config.comm_overlap = training.CommOverlapConfig(tp_comm_overlap=False)
    if "mixed_precision" in paths:
        config.mixed_precision = precision.get_mixed_precision_config(paths["mixed_precision"])
    for path, value in (LAYOUT | dict(paths)).items():
        if "." in path:
            real.set_path(config, path, value)
    return config


def spoken(case: Case) -> dict[str, str]:
    return {rule.id: why for rule in RULES if (why := rule.refusal(case))}


CHOICES: dict[str, tuple[Any, ...]] = {
    f"model.{OVERLAP}": (False, True),
    f"model.{DELAY}": (False, True),
    "model.tp_comm_overlap": (False, True),
    "model.overlap_p2p_comm": (False, True),
    "model.batch_p2p_comm": (False, True),
    "model.defer_embedding_wgrad_compute": (False,),
    "ddp.overlap_grad_reduce": (False, True),
    "ddp.overlap_param_gather": (False, True),
    "ddp.align_param_gather": (False, True),
    "ddp.bucket_size": (1000, 128 * 1024 * 1024),
    "ddp.use_distributed_optimizer": (True,),
    f"comm_overlap.{OVERLAP}": (None, False, True),
    f"comm_overlap.{DELAY}": (None, False, True),
    "comm_overlap.tp_comm_overlap": (False,),
    "comm_overlap.overlap_grad_reduce": (None, False, True),
    "comm_overlap.overlap_param_gather": (None, False, True),
    "comm_overlap.bucket_size": (None, 1000),
    "mixed_precision": (
        "bf16_mixed", "bf16_with_mxfp8_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16-with-nvfp4-mixed",
    ),
    "mixed_precision.fp8_recipe": ("tensorwise", "blockwise"),
    "mixed_precision.fp8_param_gather": (False, True),
    "mixed_precision.grad_reduce_in_fp32": (False, True),
    "model.fp8": ("e4m3", "hybrid"),
    "model.fp8_recipe": ("blockwise", "mxfp8", "tensorwise"),
    "model.first_last_layers_bf16": (False, True),
    "ddp.grad_reduce_in_fp32": (False, True),
    "model.pipeline_model_parallel_size": (1, 2),
    "model.virtual_pipeline_model_parallel_size": (None, 2),
}  # fmt: skip
NEEDS_RECIPE = ("mixed_precision.fp8_recipe", "mixed_precision.fp8_param_gather", "mixed_precision.grad_reduce_in_fp32")


def drawn(source: random.Random) -> dict[str, Any]:
    paths = {path: source.choice(values) for path, values in CHOICES.items() if source.random() < 0.35}
    if "mixed_precision" not in paths:
        paths = {path: value for path, value in paths.items() if path not in NEEDS_RECIPE}
    if any(path.startswith("comm_overlap.") for path in paths):  # our name for "the whole object is there"
        paths["comm_overlap"] = {"tp_comm_overlap": False}
    if paths.get("model.pipeline_model_parallel_size") == 2:
        paths["model.expert_model_parallel_size"] = 4
    return paths


def lost(config: Any, paths: Mapping[str, Any]) -> set[str]:
    """Paths whose value is not what the chain left there."""
    found = set()
    for path, value in paths.items():
        owner, _, name = path.partition(".")
        if owner in ("model", "ddp") and name in OF_COMM_OVERLAP | PRECISION_DEFAULTS.keys() and value is not None:
            found |= set() if same(getattr(getattr(config, owner), name), value) else {path}
    return found


def test_a_thousand_draws_of_paths_end_as_we_say(real: Any) -> None:
    source, overwritten, kept = random.Random(1), 0, 0
    for _ in range(1000):
        paths = drawn(source)
        config = built(real, paths)
        case = bridge(gpus(RANKS, "B200 sm_100"), **(paths | {"use_distributed_optimizer": True}))
        ours = spoken(case)
        why = real.refusal(config, "B200", RANKS)
        if why is not None:
            continue
        gone = lost(config, paths)
        told = ours.keys() & {"TRAP-01", "TRAP-02"}
        idle = {path for path in gone if case.integer("pipeline_model_parallel_size", 1) == 1 and "p2p" in path}
        assert bool(gone - idle) == bool(told), f"{paths}: overwritten {gone}, ours {ours}"
        for name in ("fp8", "fp8_recipe", "fp4", OVERLAP, DELAY, "fp8_param"):
            said = case.knobs.get(name, "delayed" if name == "fp8_recipe" else None)
            if name != "fp8_recipe" or case.knobs.get("fp8"):
                assert same(getattr(config.model, name), said), f"{paths}: {name} is not {said}"
        overwritten += bool(gone)
        kept += not gone
    assert overwritten > 100
    assert kept > 100


GRACE = {"apply_flex_dispatcher_backend": "deepep"}
MXFP8 = {"mixed_precision": "bf16_with_mxfp8_mixed"}
REUSE = "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"


@pytest.mark.parametrize(
    ("rule", "breaking", "satisfying"),
    [
        ("PRC-10", MXFP8 | {REUSE: False}, MXFP8 | {REUSE: True}),
        (
            "CGR-22",
            {"model.cuda_graph_impl": "local", "model.cuda_graph_modules": ["attn"]},
            {"model.cuda_graph_impl": "full_iteration", "model.cuda_graph_modules": []},
        ),
        ("CGR-22", {"model.cuda_graph_impl": "local", "model.cuda_graph_modules": []}, {}),
        (
            "BRG-03",
            {"model.seq_length": 8192, "dataset.seq_length": 4096},
            {"model.seq_length": 4096, "dataset.seq_length": 4096},
        ),
    ],
)
def test_bridge_refuses_what_the_rule_refuses(
    real: Any, rule: str, breaking: dict[str, Any], satisfying: dict[str, Any]
) -> None:
    for paths, expected in ((breaking, True), (satisfying, False)):
        text = {path: "+".join(value) if isinstance(value, list) else value for path, value in paths.items()}
        assert (rule in spoken(bridge(gpus(RANKS, "B200 sm_100"), **text))) is expected
        why = real.refusal(built(real, paths), "B200", RANKS)
        assert (why is not None) is expected, f"{paths}: {why}"


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "GB200", "B300", "GB300", "RTX PRO 6000"])
def test_a_backend_falls_back_where_we_say(real: Any, backend: str, gpu: str) -> None:
    flex = real.importlib.import_module("megatron.bridge.training.flex_dispatcher_backend")
    config = real.build(*BASE)
    name, major, minor = real.stand_ins.DEVICES[gpu]
    with real.stand_ins.device(gpu):
        flex.apply_flex_dispatcher_backend(config.model, backend)
    case = bridge(gpus(8, f"{gpu} sm_{major}{minor}"), apply_flex_dispatcher_backend=backend)
    assert (config.model.moe_token_dispatcher_type == "alltoall") is bool(refused(case, "DSP-19")), name


def refused(case: Case, rule: str) -> str | None:
    from search_spaces.rules import ALL_RULES

    return next((why for each in ALL_RULES if each.id == rule and (why := each.refusal(case))), None)
