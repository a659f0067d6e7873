"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from collections.abc import Mapping

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces import oracle_dispatcher as real
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.examples.clusters import BLACKWELL, FLEX, H8
from tests.search_spaces.oracle import Oracle, Unrun

CAPACITY, SHARED = "moe_expert_rank_capacity_factor", {"moe_shared_expert_intermediate_size": 128}
HYBRID: dict[str, KnobValue] = {"dispatcher": "flex", "backend": "hybridep"}
NCCL: dict[str, KnobValue] = {"dispatcher": "flex", "backend": "ncclep", "ep": 2, CAPACITY: 1.5}
STATIC: dict[str, KnobValue] = {
    **NCCL, "moe_ncclep_static_shape": True, "use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True,
}  # fmt: skip
FUSED_CAPACITY: dict[str, KnobValue] = {CAPACITY: 1.5, "use_transformer_engine_op_fuser": True}
CUTEDSL = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
PADDED: dict[str, KnobValue] = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def two_domains(tokens: int, env: Mapping[str, str] | None = None, **knobs: KnobValue) -> Case:
    """HybridEP over two nodes of 8 GPUs, one sequence of `tokens` a rank."""
    training = {"sequence_length": tokens, "global_batch_size": 16}
    return case(gpus(16), model={"num_moe_experts": 16}, training=training, env=env, **{**HYBRID, "ep": 16, **knobs})


def chunked(**sizes: int) -> Case:
    env = {f"NUM_OF_TOKENS_PER_CHUNK_{api}_API": str(size) for api, size in sizes.items()}
    return case(H8, **HYBRID, ep=8, moe_permute_fusion_into_hybridep=True, env=env)


EXAMPLES: dict[str, tuple[Case, Case]] = {
    "DSP-01": (case(dispatcher="alltoall_seq"), case(dispatcher="alltoall")),
    "DSP-02": (case(H8, **FLEX, backend="none", ep=2), case(H8, **FLEX, backend="hybridep", ep=2)),
    "DSP-02b": (case(H8, **FLEX, ep=2), case(H8, **FLEX, ep=2, moe_enable_deepep=True)),
    "DSP-02c": (case(H8, **NCCL), case(H8, **HYBRID, ep=2)),
    "DSP-03": (case(H8, dispatcher="alltoall", moe_enable_deepep=True), case(H8, **FLEX, moe_enable_deepep=True)),
    "DSP-04": (
        case(H8, **FLEX, ep=8, backend="deepep", **PADDED), case(H8, **FLEX, ep=8, backend="hybridep", **PADDED),
    ),
    "DSP-05": (case(H8, dispatcher="alltoall", backend="ncclep"), case(H8, **FLEX, backend="ncclep")),
    "DSP-06": (
        case(moe_deepep_num_sms=20, moe_hybridep_num_sms=16),
        case(moe_deepep_num_sms=20, moe_hybridep_num_sms=16, moe_flex_dispatcher_num_sms=16),
    ),
    "DSP-07": (case(H8, **FLEX, backend="deepep"), case(H8, **FLEX, backend="deepep", ep=2)),
    "DSP-08": (case(H8, **FLEX, ep=2, deep_ep="not importable"), case(H8, **FLEX, ep=2, stack={"deep_ep": "1.2.1"})),
    "DSP-10": (
        case(H8, **HYBRID, ep=8, moe_expert_rank_capacity_factor=1.5),
        case(H8, **HYBRID, ep=8, moe_expert_rank_capacity_factor=1.5, use_transformer_engine_op_fuser=True),
    ),
    "DSP-10b": (
        case(H8, dispatcher="flex", backend="ncclep", **FUSED_CAPACITY), case(H8, **HYBRID, **FUSED_CAPACITY),
    ),
    "DSP-11": (case(H8, **{**NCCL, CAPACITY: None}), case(H8, **NCCL)),
    "DSP-12": (case(H8, **{**STATIC, "moe_grouped_gemm": False}), case(H8, **STATIC)),
    "DSP-13": (case(BLACKWELL, **STATIC, fp8="e4m3"), case(BLACKWELL, **STATIC, fp8="e4m3", env=CUTEDSL)),
    "DSP-14": (
        case(H8, **NCCL, moe_ncclep_zero_copy=True), case(H8, **STATIC, moe_ncclep_zero_copy=True),
    ),
    "DSP-15": (
        case(H8, **NCCL, stack={"nccl": "2.30.4"}),
        case(H8, **NCCL, stack={"nccl": "2.30.4", "transformer_engine": "2.18.0"}),
    ),
    "DSP-15b": (
        case(H8, **NCCL, stack={"nccl": "2.30.4", "transformer_engine": "2.18.0"}),
        case(H8, **HYBRID, stack={"nccl": "2.30.4", "transformer_engine": "2.18.0"}),
    ),
    "DSP-16": (
        case(dispatcher="allgather", variable_seq_lengths=True), case(dispatcher="alltoall", variable_seq_lengths=True),
    ),
    "DSP-17": (case(gpus(12), **FLEX, ep=12), case(gpus(16), **FLEX, ep=16)),
    "DSP-18": (two_domains(21845), two_domains(21844)),
    "DSP-20": (case(gpus(4, "GB200 sm_100"), **FLEX, ep=4), case(BLACKWELL, **FLEX, ep=4)),
    "DSP-21": (case(H8, **FLEX, fake_process_group=True), case(H8, dispatcher="alltoall", fake_process_group=True)),
    "DSP-22": (
        case(model=SHARED, dispatcher="allgather", moe_shared_expert_overlap=True),
        case(model=SHARED, dispatcher="alltoall", moe_shared_expert_overlap=True),
    ),
    "DSP-22b": (
        case(H8, model=SHARED, dispatcher="flex", moe_shared_expert_overlap=True),
        case(H8, model=SHARED, dispatcher="alltoall", moe_shared_expert_overlap=True),
    ),
    "DSP-22c": (
        case(model=SHARED, dispatcher="alltoall", moe_shared_expert_overlap=True, moe_latent_size=64),
        case(model=SHARED, dispatcher="alltoall", moe_shared_expert_overlap=False, moe_latent_size=64),
    ),
    "DSP-23": (case(moe_shared_expert_intermediate_size=0), case(moe_shared_expert_intermediate_size=128)),
    "DSP-23b": (
        case(model=SHARED, dispatcher="alltoall", add_bias_linear=True),
        case(model=SHARED, dispatcher="alltoall", add_bias_linear=False),
    ),
    "DSP-24": (
        case(dispatcher="allgather", apply_moe_token_drop=True), case(dispatcher="alltoall", apply_moe_token_drop=True),
    ),
    "TRAP-09": (case(H8, **HYBRID, moe_permute_fusion=True), case(H8, **FLEX, moe_permute_fusion=True)),
    "TRAP-35": (
        two_domains(4096, env={"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "4"}),
        two_domains(4096, env={"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "8"}),
    ),
    "TRAP-36": (chunked(COMBINE=128), chunked(COMBINE=128, DISPATCH=128, PREPROCESSING=128)),
}  # fmt: skip
ORACLE: dict[str, Oracle] = {
    "DSP-01": real.layer_refusal,
    "DSP-02": real.flex_refusal,
    "DSP-07": real.flex_refusal,
    "DSP-08": real.flex_refusal,
    "DSP-11": real.flex_refusal,
    "DSP-12": real.flex_refusal,
    "DSP-13": real.flex_refusal,
    "DSP-14": real.flex_refusal,
    "DSP-15": Unrun("needs Transformer Engine's NCCL EP, which is compiled for GPUs"),
    "DSP-15b": Unrun("as DSP-15"),
    "DSP-22c": real.latent_refusal,
    "DSP-23b": real.layer_refusal,
}
