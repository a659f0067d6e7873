"""Paths of Megatron Bridge become plain knobs; what Bridge overwrites stays visible, and is refused."""

from collections.abc import Mapping

import pytest

from search_spaces.bridge_paths import flatten
from search_spaces.rules.bridge import RULES
from search_spaces.shapes import ClusterShape
from tests.search_spaces.cases import gpus
from tests.search_spaces.examples.bridge import bridge
from tests.search_spaces.examples.clusters import H8

OVERLAP, DELAY = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"
WHOLE = {"tp_comm_overlap": False}


def test_plain_knobs_are_left_alone() -> None:
    knobs = {"fp8": "hybrid", "micro_batch_size": 2, "virtual_pipeline_model_parallel_size": None, "optimizer": "adam"}
    assert flatten(knobs).knobs == knobs
    assert not flatten(knobs).is_bridge


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"model.moe_router_dtype": "fp32"}, {"moe_router_dtype": "fp32"}),
        ({"cfg.model.transformer.fp8": "hybrid"}, {"fp8": "hybrid"}),
        ({"train": {"micro_batch_size": 2}, "train.manual_gc": True}, {"micro_batch_size": 2, "manual_gc": True}),
        (
            {"ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": False},
            {"use_distributed_optimizer": True},
        ),
        ({"dist.use_megatron_fsdp": True}, {"use_megatron_fsdp": True}),
        ({"rerun_state_machine.check_for_nan_in_loss": False}, {"check_for_nan_in_loss": False}),
        ({"rng.te_rng_tracker": True}, {"use_te_rng_tracker": True}),
        ({f"comm_overlap.{OVERLAP}": True}, {OVERLAP: True}),
        ({f"model.{OVERLAP}": True, "comm_overlap": None}, {OVERLAP: True}),
        ({"dataset": {"seq_length": 4096}}, {"dataset": True, "dataset.seq_length": 4096, "seq_length": 4096}),
        (
            {"dataset.offline_packing_specs": {"pad_cu_seqlens": True}},
            {"dataset.offline_packing_specs": True, "dataset.offline_packing_specs.pad_cu_seqlens": True},
        ),
        (
            {"mixed_precision.fp8_recipe": "mxfp8"},
            {"fp8": "e4m3", "fp8_recipe": "mxfp8"},  # an override tells which recipe it is of
        ),
        ({"mixed_precision.fp8_param_gather": True}, {"fp8_param": True, "fp8_param_gather": True}),
        (  # every object of Bridge's has this recipe: beside another format it asks for no fp8
            {"mixed_precision.fp4": "e2m1", "mixed_precision.fp8_recipe": "tensorwise"},
            {"fp4": "e2m1", "fp8_recipe": "tensorwise"},
        ),
        ({"mixed_precision.fp8_recipe": "tensorwise"}, {"fp8_recipe": "tensorwise"}),
        ({"mixed_precision": "bf16-mixed"}, {"bf16": True, "grad_reduce_in_fp32": True}),
        (
            {"mixed_precision": "bf16_with_nvfp4_mixed", "mixed_precision.grad_reduce_in_fp32": False},
            {
                "bf16": True, "fp4": "e2m1", "fp4_param": True, "fp4_param_gather": True,
                "grad_reduce_in_fp32": False,
            },
        ),
        (
            {"apply_flex_dispatcher_backend": "hybridep"},
            {
                "apply_flex_dispatcher_backend": "hybridep", "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "hybridep", "moe_shared_expert_overlap": False,
            },
        ),
        ({"moe_a2a_overlap": True}, {"moe_a2a_overlap": True, OVERLAP: True, DELAY: True}),
        (
            {"comm_overlap": WHOLE, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {
                "tp_comm_overlap": False, "overlap_p2p_comm": True, "batch_p2p_comm": False,
                "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
            },
        ),
    ],
)  # fmt: skip
def test_what_a_path_really_sets(knobs: Mapping[str, object], expected: Mapping[str, object]) -> None:
    flat = flatten(knobs)
    assert flat.knobs == expected
    assert flat.is_bridge


def test_the_environment_of_a_recipe_is_text() -> None:
    assert flatten({"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": 1}}).env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def refusing(paths: Mapping[str, object], cluster: ClusterShape = H8) -> set[str]:
    seen = bridge(cluster, **paths)
    return {rule.id for rule in RULES if rule.refusal(seen)}


FULL = {"comm_overlap": WHOLE}
PACKED = {"dataset.enable_offline_packing": True}
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn"}


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        ("TRAP-01", FULL | {"ddp.overlap_grad_reduce": False}),
        ("TRAP-01", FULL | {"ddp.bucket_size": 1000}),
        ("TRAP-01", FULL | {OVERLAP: True}),  # a plain name beside a whole object means the model's field
        ("TRAP-01", {"model.delay_wgrad_compute": True, f"comm_overlap.{OVERLAP}": True}),
        ("TRAP-01", {"model.tp_comm_overlap": True, "comm_overlap.tp_comm_overlap": False}),
        ("TRAP-01", FULL | {"model.overlap_p2p_comm": True, "pp": 2}),
        ("TRAP-02", {"model.fp8": "e4m3 (set directly)", "mixed_precision": "bf16 recipe object"}),
        ("TRAP-02", {"model.fp8_recipe": "blockwise", "mixed_precision": "bf16_with_mxfp8_mixed"}),
        ("TRAP-02", {"ddp.grad_reduce_in_fp32": False, "mixed_precision": "bf16_mixed"}),
        ("TRAP-02", {"fp8": "hybrid", "mixed_precision": "bf16_mixed"}),
        ("TRAP-02", {"model.fp8_wgrad": False, "mixed_precision": "bf16_with_mxfp8_mixed"}),
        ("TRAP-32", {"moe_a2a_overlap": True, "delay_wgrad_compute": False}),
        ("DSP-19", {"apply_flex_dispatcher_backend": "deep_ep"}),
        ("CGR-22", {"model.cuda_graph_impl": "local", "model.cuda_graph_modules": ""}),
        ("CGR-24", PACKED | GRAPHS | {"dataset.pad_to_max_length": True}),
        ("CGR-24", PACKED | {"dataset.offline_packing_specs": {"pad_cu_seqlens": True}}),
        ("PRC-10", {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}),
        ("BRG-04", {"dataset.enable_in_batch_packing": True, "mbs": 1}),
        ("BRG-04", {"dataset.enable_in_batch_packing": True, "mbs": 2, **PACKED}),
        ("BRG-04", {**PACKED, "context_parallel_size": 2}),
        ("BRG-04", {"dataset": "GPTSFTDatasetConfig", "context_parallel_size": 2}),
        ("BRG-03", {"dataset.seq_length": 4096, "model": {"seq_length": 8192}}),
    ],
)
def test_refused(rule: str, paths: Mapping[str, object]) -> None:
    assert refusing(paths) == {rule}


@pytest.mark.parametrize(
    "paths",
    [
        FULL | {"ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True},
        FULL | {"ddp.overlap_grad_reduce": False, "comm_overlap.overlap_grad_reduce": False},
        FULL | {"ddp.overlap_grad_reduce": False, "ddp.use_distributed_optimizer": False},
        FULL | {"ddp.overlap_grad_reduce": False, "tp": 8},  # one data-parallel rank
        FULL | {"model.overlap_p2p_comm": True, "pp": 2, "vpp": 2},
        {f"model.{OVERLAP}": True},  # nothing says that comm_overlap is set
        {f"model.{OVERLAP}": True, f"comm_overlap.{OVERLAP}": True},
        {"model.fp8": "e4m3", "mixed_precision": "bf16_with_mxfp8_mixed"},
        {"model.bf16": True, "mixed_precision.grad_reduce_in_fp32": False},
        {"mixed_precision": "bf16_with_mxfp8_mixed"},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True, "use_megatron_fsdp": True},
        {"moe_a2a_overlap": False},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        {"cuda_graph_impl": "full_iteration"},
        PACKED | GRAPHS | {"dataset.pad_to_max_length": True, "dataset.offline_packing_specs.pad_cu_seqlens": True},
        PACKED | {"context_parallel_size": 2, "model.calculate_per_token_loss": True},
        {"context_parallel_size": 2},
        {"dataset.seq_length": 4096},
    ],
)
def test_accepted(paths: Mapping[str, object]) -> None:
    assert refusing(paths) == set()


@pytest.mark.parametrize(
    ("backend", "runs_on"),
    [
        ("deepep", ("A100 sm_80", "H100 sm_90", "B200 sm_100", "B300 sm_103")),
        ("hybridep", ("A100 sm_80", "H100 sm_90", "B200 sm_100", "B300 sm_103", "GB200 sm_100", "GB300 sm_103")),
        ("ncclep", ("H100 sm_90", "B200 sm_100", "B300 sm_103", "GB200 sm_100", "GB300 sm_103")),
    ],
)
def test_which_gpus_a_flex_backend_is_applied_on(backend: str, runs_on: tuple[str, ...]) -> None:
    """flex_dispatcher_backend.py:59-87: elsewhere Bridge falls back to alltoall and only warns."""
    archs = (*runs_on, "RTX PRO 6000 sm_120", "GB200 sm_100", "A100 sm_80", "V100 sm_70")
    ran = {arch for arch in archs if not refusing({"apply_flex_dispatcher_backend": backend}, gpus(8, arch))}
    assert ran == set(runs_on)
