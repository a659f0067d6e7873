"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces import oracle_fsdp as real
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import EXPANDABLE, H2, H8
from tests.search_spaces.oracle import Oracle

LM, BRIDGE = ("megatron-lm",), ("megatron-bridge",)
FSDP: dict[str, KnobValue] = {"use_megatron_fsdp": True, "use_distributed_optimizer": True}
GATHER: dict[str, KnobValue] = {"overlap_param_gather": True, "overlap_grad_reduce": True}
WITH_STEP: dict[str, KnobValue] = {
    **GATHER, "use_distributed_optimizer": True, "overlap_param_gather_with_optimizer_step": True, "pp": 2,
}  # fmt: skip
STORED_FP8: dict[str, KnobValue] = {"fp8": "hybrid", "fp8_param_gather": True}
ONE, EIGHT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
REGISTERED: dict[str, KnobValue] = {"nccl_ub": True}
CORE_017 = {"megatron_core": "0.17.0", "torch": "2.11.0"}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "OVL-25": (case(H2, **GATHER), case(H2, **GATHER, use_distributed_optimizer=True)),
    "OVL-25b": (
        case(H2, overlap_param_gather=True, use_distributed_optimizer=True, launchers=LM),
        case(H2, **GATHER, use_distributed_optimizer=True, launchers=LM),
    ),
    "OVL-26": (case(H8, **WITH_STEP, launchers=LM), case(H8, **WITH_STEP, vpp=2, launchers=LM)),
    "OVL-26b": (
        case(H8, **WITH_STEP, **STORED_FP8, vpp=2, p2p=True, reuse_grad_buf_for_mxfp8_param_ag=True),
        case(H8, **WITH_STEP, **STORED_FP8, vpp=2, p2p=True, reuse_grad_buf_for_mxfp8_param_ag=False),
    ),
    "OVL-28": (
        case(H2, average_in_collective=True, calculate_per_token_loss=True),
        case(H2, average_in_collective=True, calculate_per_token_loss=False),
    ),
    "OVL-29": (case(H2, num_buckets=4, bucket_size=1000), case(H2, num_buckets=4)),
    "OVL-29b": (
        case(H2, param_name_patterns_for_fp32_local_accumulation='["router"]', grad_reduce_in_fp32=True),
        case(H2, param_name_patterns_for_fp32_local_accumulation='["router"]', grad_reduce_in_fp32=False),
    ),
    "FSD-01": (case(H8, **FSDP, env=ONE, launchers=BRIDGE), case(H8, **FSDP, env=EIGHT, launchers=BRIDGE)),
    "FSD-01b": (
        case(H8, ckpt_format="fsdp_dtensor", launchers=LM),
        case(H8, **FSDP, ckpt_format="fsdp_dtensor", launchers=LM),
    ),
    "FSD-02": (
        case(H8, **FSDP, gradient_accumulation_fusion=True, stack={"transformer_engine": "2.9"}),
        case(H8, **FSDP, gradient_accumulation_fusion=True, stack={"transformer_engine": "2.10"}),
    ),
    "FSD-03": (case(H8, use_torch_fsdp2=True, ep=8, launchers=LM), case(H8, use_torch_fsdp2=True, launchers=LM)),
    "FSD-03b": (
        case(H8, **FSDP, use_torch_fsdp2=True, launchers=BRIDGE),
        case(H8, **FSDP, use_torch_fsdp2=False, launchers=BRIDGE),
    ),
    "FSD-04": (
        case(H8, **REGISTERED, env=EXPANDABLE, stack={"torch": "2.10.0"}),
        case(H8, **REGISTERED, env=EXPANDABLE, stack={"torch": "2.11.0"}),
    ),
    "FSD-04b": (
        case(H8, **REGISTERED, env=EXPANDABLE, stack=CORE_017),
        case(H8, **REGISTERED, stack=CORE_017),
    ),
    "FSD-04c": (
        case(H8, **FSDP, fsdp_manual_registration=True, launchers=LM),
        case(H8, **FSDP, **REGISTERED, fsdp_manual_registration=True, launchers=LM),
    ),
    "FSD-05": (
        case(H2, num_distributed_optimizer_instances=2),
        case(H2, num_distributed_optimizer_instances=2, use_distributed_optimizer=True),
    ),
}
ORACLE: dict[str, Oracle] = {
    "OVL-25": real.gather_refusal,
    "OVL-26b": real.optimizer_refusal,
    "OVL-28": real.buckets_refusal,
    "OVL-29": real.bucket_config_refusal,
    "OVL-29b": real.bucket_config_refusal,
    "FSD-02": real.sharding_refusal,
    "FSD-04": real.bucket_config_refusal,
    "FSD-05": real.buckets_refusal,
}
