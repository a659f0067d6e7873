"""Flags of Megatron-LM, dashed or not, told as fields."""

from typing import Any

import pytest

from search_spaces.explicit import read_case
from search_spaces.launcher_words import plain_words
from tests.search_spaces.published import STACK

P2P, FUSED = "overlap_p2p_comm", "gradient_accumulation_fusion"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"--moe-router-dtype": "fp32"}, {"moe_router_dtype": "fp32"}),
        ({"moe-router-dtype": "fp32"}, {"moe_router_dtype": "fp32"}),
        ({"--swiglu": True}, {"gated_linear_unit": True, "activation_func": "silu"}),
        ({"swiglu": False}, {}),
        ({"recompute_activations": True}, {"recompute_granularity": "selective"}),
        ({"--recompute-activations": True, "recompute_granularity": "full"}, {"recompute_granularity": "full"}),
        ({"ddp_bucket_size": 7, "ddp_num_buckets": None}, {"bucket_size": 7, "num_buckets": None}),
        ({"use_nccl_ub": True}, {"nccl_ub": True}),
        ({"microbatch_group_size_per_virtual_pipeline_stage": 4}, {"microbatch_group_size_per_vp_stage": 4}),
        ({"overlap_p2p_communication_warmup_flush": True}, {"overlap_p2p_comm_warmup_flush": True}),
        ({"no_overlap_p2p_communication": True}, {P2P: False}),
        ({"no_overlap_p2p_communication": False}, {}),
        ({"--no-gradient-accumulation-fusion": True}, {FUSED: False}),
        ({"no_gradient_accumulation_fusion": True, FUSED: True}, {FUSED: True}),
        ({"no_rope_fusion": True}, {"apply_rope_fusion": False}),
        ({"no_bias_swiglu_fusion": True}, {"bias_activation_fusion": False}),
        ({"no_check_for_nan_in_loss_and_grad": True}, {"check_for_nan_in_loss_and_grad": False}),
        ({"disable_bias_linear": True}, {"add_bias_linear": False}),
        ({"disable_symmetric_registration": True}, {"disable_symmetric_registration": True}),
        ({"no_rope_freq": [0, 1]}, {"no_rope_freq": [0, 1]}),
        ({"model.no-such": 1, "fp8": None}, {"model.no-such": 1, "fp8": None}),
    ],
)
def test_a_flag_is_told_as_fields(given: dict[str, Any], words: dict[str, Any]) -> None:
    assert plain_words(given).words == words


def read(**knobs: Any) -> Any:
    stack = {**STACK, "megatron_lm": "core_r0.19.0"}
    return read_case({"stack": stack, "gpu_arch": "H100", "world_size": 8, "model": "qwen3_30b_a3b", "knobs": knobs}, 1)


@pytest.mark.parametrize("flag", ["no_rope_fusion", "--moe-router-dtype", "ddp_bucket_size", "swiglu"])
def test_a_flag_says_that_megatron_lm_runs(flag: str) -> None:
    value: Any = {"ddp_bucket_size": 7, "--moe-router-dtype": "fp32"}.get(flag, True)
    assert read(**{flag: value}).case.launchers == {"megatron-lm"}


def test_flags_that_nothing_reads_are_accepted() -> None:
    found = read(**{"--position-embedding-type": "rope", "use_mcore_models": True, "data-path": "/data"})
    assert found.case is not None, found.faults


def test_a_fault_names_the_word_that_stands_in_the_file() -> None:
    faults = read(**{"--moe-router-dtyp": "fp32", "no_rope_fusion": 3}).faults
    hints = {fault.key: fault.hint for fault in faults}
    assert hints.keys() == {"--moe-router-dtyp", "no_rope_fusion"}
    assert "moe_router_dtype" in hints["--moe-router-dtyp"]
