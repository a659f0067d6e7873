"""Words that Megatron Bridge's objects do not have are faults; fields that no rule reads are accepted."""

from typing import Any

import pytest

from search_spaces.explicit import read_case
from tests.search_spaces.published import STACK

SLIP = "comm_overlap.overlap_moe_expert_paralel_comm"


def told(**knobs: Any) -> list[str]:
    raw = {"stack": {**STACK, "bridge": "0.6.2"}, "gpu_arch": "H100", "world_size": 8, "model": "qwen3_30b_a3b"}
    return [f"{fault.key}: {fault.message} ({fault.hint})" for fault in read_case({**raw, "knobs": knobs}, 1).faults]


@pytest.mark.parametrize(
    ("knobs", "key", "words"),
    [
        ({SLIP: True}, SLIP, "did you mean overlap_moe_expert_parallel_comm?"),
        ({"comm_overlap": {"tp_comm_overlp": True}}, "tp_comm_overlp", "did you mean tp_comm_overlap?"),
        ({"cfg.comm_overlap.tp_comm_overlp": True}, "cfg.comm_overlap.tp_comm_overlp", "Bridge's comm_overlap"),
        ({"mixed_precision.foo": 1}, "mixed_precision.foo", "no field"),
        ({"mixed_precision": {"fp8_recipes": "mxfp8"}}, "fp8_recipes", "did you mean fp8_recipe?"),
        ({"mixed_precision": "bf16_with_fp9_mixed"}, "mixed_precision", "did you mean bf16_with_"),
        ({"mixed_precision": "bf16_with_mxfp8_mixd"}, "mixed_precision", "did you mean bf16_with_mxfp8_mixed?"),
        ({"mixed_precision": "fp16_with_nvfp4_mixed"}, "mixed_precision", "no recipe"),
        ({"mixed_precision": "nonsense"}, "mixed_precision", "no recipe"),
        ({"mixed_precision": [1]}, "mixed_precision", "not [1]"),
        ({"comm_overlap": 3}, "comm_overlap", "is an object, not 3"),
        ({"train.micro_batch_sise": 1}, "train.micro_batch_sise", "did you mean micro_batch_size?"),
        ({"dataset.seq_lenght": 4096}, "dataset.seq_lenght", "did you mean seq_length?"),
        ({"model.moe_router_dtyp": "fp32"}, "moe_router_dtyp", "did you mean moe_router_dtype?"),
    ],
)  # fmt: skip
def test_a_word_that_bridge_does_not_have_is_a_fault(knobs: dict[str, Any], key: str, words: str) -> None:
    faults = told(**knobs)
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{key}: ")
    assert words in faults[0]


@pytest.mark.parametrize(
    "knobs",
    [
        {
            "checkpoint.save": "/data", "rng.seed": 1, "train.eval_iters": 2, "scheduler.lr_decay_iters": 9,
            "profiling.use_nsys_profiler": False, "dist.enable_megatron_core_experimental": True,
            "logger.log_interval": 1, "tokenizer.vocab_size": 8, "validation.eval_interval": 10,
        },
        {"checkpoint": {"save": "/data", "load": None}, "profiling": {"ranks": [0]}, "nvrx_straggler": {}},
        {"model.share_embeddings_and_output_weights": False, "model.position_embedding_type": "rope"},
        {"comm_overlap": {"tp_comm_overlap_cfg": None}, "mixed_precision": {"bf16": True, "loss_scale": None}},
        {"mixed_precision": "nemotron_3_super_bf16_with_nvfp4_mixed"},
        {"mixed_precision": "bf16-mixed"},
        {"mixed_precision": "fp8_cs"},
        {"mixed_precision": "bf16 recipe object"},
    ],
)  # fmt: skip
def test_fields_that_no_rule_reads_are_accepted(knobs: dict[str, Any]) -> None:
    assert told(**knobs) == []
