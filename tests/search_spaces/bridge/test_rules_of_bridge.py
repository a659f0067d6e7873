"""Rules of other areas that quote Bridge: what they refuse its chain refuses, what they accept it accepts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from search_spaces.rules import rules_for
from tests.search_spaces.bridge.test_paths import RANKS, built
from tests.search_spaces.cases import STACK, gpus
from tests.search_spaces.examples.bridge import bridge

pytestmark = pytest.mark.bridge
OVERLAP, DELAY = "comm_overlap.overlap_moe_expert_parallel_comm", "comm_overlap.delay_wgrad_compute"
FUSION = "model.gradient_accumulation_fusion"
REDUCE = "comm_overlap.overlap_grad_reduce"
LATE = {OVERLAP: True, DELAY: True, FUSION: False, "ddp.overlap_grad_reduce": False, REDUCE: False}
OFFLOAD = {"model.fine_grained_activation_offloading": True, "model.offload_modules": ["core_attn"]}
FSDP = {
    "ddp.use_megatron_fsdp": True, "ddp.use_distributed_optimizer": True, FUSION: False,
    "checkpoint.ckpt_format": "fsdp_dtensor",
}  # fmt: skip
ITERATION = {"model.cuda_graph_impl": "full_iteration", "model.use_te_rng_tracker": True}
CHECK, TORCH = "rerun_state_machine.check_for_nan_in_loss", "dist.use_torch_fsdp2"
ROUTER = {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": ["moe_router"]}
ONE, EIGHT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
V0, V1 = {"NVTE_CPU_OFFLOAD_V1": "0"}, {"NVTE_CPU_OFFLOAD_V1": "1"}
Setting = Mapping[str, Any]


def setting(paths: Mapping[str, Any], engine: str = "2.20.2", env: Mapping[str, str] | None = None) -> Setting:
    return {"paths": paths, "engine": engine, "env": env or EIGHT}


@pytest.mark.parametrize(
    ("rule", "breaking", "satisfying"),
    [
        (
            "PAR-29",
            setting({"train.micro_batch_size": 2, "validation.eval_global_batch_size": 24}),
            setting({"train.micro_batch_size": 2, "validation.eval_global_batch_size": 32}),
        ),
        (
            "OVL-15",
            setting(LATE | {REDUCE: True}, "2.6.0"),
            setting(LATE | {REDUCE: True}, "2.7.0"),
        ),
        ("OVL-17", setting(LATE | {FUSION: True}, "2.6.0"), setting(LATE | {FUSION: True}, "2.7.0")),
        ("OVL-17", setting(LATE | {FUSION: True}, "2.6.0"), setting(LATE, "2.6.0")),
        (
            "OVL-16",
            setting(LATE | {"model.cuda_graph_modules": ["attn"], FUSION: True}, "2.11.0"),
            setting(LATE | {"model.cuda_graph_modules": ["attn"], FUSION: True}, "2.12.0"),
        ),
        (
            "OVL-16",
            setting(LATE | ROUTER | {"model.moe_shared_expert_intermediate_size": 768}),
            setting(LATE | ROUTER | {"model.moe_shared_expert_intermediate_size": 768, FUSION: True}),
        ),
        ("CGR-23b", setting(ITERATION | {CHECK: True}), setting(ITERATION | {CHECK: False})),
        ("OFF-07", setting(OFFLOAD, env=EIGHT | V0), setting(OFFLOAD, env=EIGHT | V1)),
        ("OFF-07", setting(OFFLOAD, env=EIGHT | V0), setting(OFFLOAD, "2.9.0")),
        ("FSD-01", setting(FSDP, env=ONE), setting(FSDP)),
        ("FSD-03b", setting(FSDP | {TORCH: True}), setting(FSDP | {TORCH: False})),
        (
            "FSD-04c",
            setting(FSDP | {"ddp.fsdp_manual_registration": True}),
            setting(FSDP | {"ddp.fsdp_manual_registration": True, "ddp.nccl_ub": True}),
        ),
    ],
)
def test_both_refuse_the_one_and_accept_the_other(real: Any, rule: str, breaking: Setting, satisfying: Setting) -> None:
    for given, expected in ((breaking, True), (satisfying, False)):
        paths, engine, env = given["paths"], given["engine"], given["env"]
        text = {path: "+".join(value) if isinstance(value, list) else value for path, value in paths.items()}
        model = {name.removeprefix("model."): value for name, value in paths.items() if "shared_expert_inter" in name}
        case = bridge(gpus(RANKS, "B200 sm_100"), ep=8, moe_token_dispatcher_type="alltoall", **text)
        stack = STACK.model_copy(update={"transformer_engine": engine})
        case = replace(case, env=env, stack=stack, model=case.model.model_copy(update=model))
        rules = rules_for(frozenset({"megatron-bridge"}), None, worker=False)
        ours = {each.id for each in rules if each.refusal(case)}
        with mock.patch("megatron.core.utils.get_te_version", return_value=real.version(engine)):
            why = real.refusal(built(real, paths), "B200", RANKS, env)
        assert (why is not None) is expected, f"{paths} with TE {engine}: {why}"
        assert (rule in ours) is expected, f"{paths} with TE {engine}: Bridge says {why}, ours {ours}"


UNPADDED = {"dataset.dataset_kwargs": {"pad_to_max_length": False}}
PADDED = {"dataset.dataset_kwargs": {"pad_to_max_length": True}}
ATTENTION = {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": ["attn"]}
CONTEXT = {"model.context_parallel_size": 2, "model.calculate_per_token_loss": True}
AVERAGE = "ddp.average_in_collective"


@pytest.mark.parametrize(
    ("rule", "breaking", "satisfying"),
    [
        ("BRG-04", {"train.micro_batch_size": 2}, {"train.micro_batch_size": 1}),
        ("BRG-04", CONTEXT | {"model.calculate_per_token_loss": False, AVERAGE: False}, CONTEXT | {AVERAGE: False}),
        ("BRG-04", CONTEXT | {AVERAGE: True}, CONTEXT | {AVERAGE: False}),
        ("CGR-24", ROUTER | UNPADDED, ROUTER | PADDED),
        ("CGR-24", ATTENTION | PADDED, ROUTER | PADDED),
    ],
)
def test_of_a_packed_fine_tune_as_well(
    real: Any, rule: str, breaking: Mapping[str, Any], satisfying: Mapping[str, Any]
) -> None:
    recipe = real.importlib.import_module("megatron.bridge.recipes.qwen").qwen3_30b_a3b_sft_config
    for paths, expected in ((breaking, True), (satisfying, False)):
        config = recipe()
        config.checkpoint.pretrained_checkpoint, config.model.cuda_graph_scope = ".", None
        config.model.use_te_rng_tracker = True
        for path, value in paths.items():
            real.set_path(config, path, value)
        text = {path: "+".join(value) if isinstance(value, list) else value for path, value in paths.items()}
        case = bridge(gpus(32), **({"dataset.enable_offline_packing": True, "train.micro_batch_size": 1} | text))
        ours = {each.id for each in rules_for(frozenset({"megatron-bridge"}), None, False) if each.refusal(case)}
        why = real.refusal(config, "H100", 32)
        assert (why is not None) is expected, f"{paths}: {why}"
        assert (rule in ours) is expected, f"{paths}: Bridge says {why}, ours {ours}"
