"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces import oracle_overlap as real
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.examples.clusters import H2, H8, OVERLAP
from tests.search_spaces.oracle import Oracle, Unrun

LATE: dict[str, KnobValue] = {**OVERLAP, "delay": True}
SHARED, DENSE_FIRST = {"moe_shared_expert_intermediate_size": 128}, {"first_dense_layers": 1}
NCCL: dict[str, KnobValue] = {
    **OVERLAP, "dispatcher": "flex", "backend": "ncclep", "moe_expert_rank_capacity_factor": 1.5,
}  # fmt: skip
OFFLOAD: dict[str, KnobValue] = {"fine_grained_activation_offloading": True}
SHARDED: dict[str, KnobValue] = {**OVERLAP, "use_megatron_fsdp": True, "use_distributed_optimizer": True}
INTERLEAVED: dict[str, KnobValue] = {**OVERLAP, "pp": 2, "vpp": 2, "p2p": True, "batch_p2p_comm": False}
SPLIT: dict[str, KnobValue] = {"tp_comm_overlap": True, "tp": 2}
DEFER: dict[str, KnobValue] = {"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": True}


def engine(version: str, **knobs: KnobValue) -> Case:
    """With a Transformer Engine of the target."""
    return case(H8, stack={"transformer_engine": version}, launchers=("megatron-lm",), **knobs)


EXAMPLES: dict[str, tuple[Case, Case]] = {
    "OVL-01": (case(H8, **OVERLAP, stack={"torch": "2.5.1"}), case(H8, **OVERLAP, stack={"torch": "2.6.0"})),
    "OVL-02": (case(H8, **OVERLAP, pp=2), case(H8, **OVERLAP, pp=2, pipeline_model_parallel_layout="Et|t|t|tL")),
    "OVL-03": (case(H8, **{**OVERLAP, "ep": 1}), case(H8, **OVERLAP)),
    "OVL-04": (case(H8, **{**OVERLAP, "dispatcher": "allgather"}), case(H8, **OVERLAP)),
    "OVL-05": (
        case(H8, **OVERLAP, recompute="full", method="uniform", layers=1), case(H8, **OVERLAP, recompute="selective"),
    ),
    "OVL-06": (case(H8, **OVERLAP, method="block"), case(H8, **OVERLAP, method=None)),
    "OVL-07": (case(H8, **OVERLAP, layers=1), case(H8, **OVERLAP, layers=None)),
    "OVL-08": (case(H8, **OVERLAP, modules="layernorm+moe"), case(H8, **OVERLAP, modules="layernorm+moe_act")),
    "OVL-09": (
        case(H8, **OVERLAP, model=SHARED, moe_shared_expert_overlap=True),
        case(H8, **OVERLAP, model=SHARED, moe_shared_expert_overlap=False),
    ),
    "OVL-10": (case(H8, **OVERLAP, mtp_num_layers=2), case(H8, **OVERLAP, mtp_num_layers=0)),
    "OVL-10b": (case(H8, **OVERLAP, mtp_num_layers=0), case(H8, **OVERLAP, mtp_num_layers=1)),
    "OVL-10c": (case(H8, **OVERLAP, mtp_num_layers=1), case(H8, **OVERLAP, mtp_num_layers=1, pp=2, vpp=2)),
    "OVL-11": (
        case(H8, **OVERLAP, model=DENSE_FIRST, graphs="transformer_engine", captured="attn+mlp"),
        case(H8, **OVERLAP, model=DENSE_FIRST, graphs="transformer_engine", captured="attn+moe_router"),
    ),
    "OVL-11b": (
        case(H8, **OVERLAP, graphs="full_iteration"), case(H8, **OVERLAP, graphs="transformer_engine", captured="attn"),
    ),
    "OVL-12": (
        case(H8, **OVERLAP, graphs="transformer_engine"),
        case(H8, **OVERLAP, graphs="transformer_engine", captured="attn"),
    ),
    "OVL-13": (case(H8, **{**LATE, "overlap": False}), case(H8, **LATE)),
    "OVL-13b": (
        case(H8, **LATE, moe_use_legacy_grouped_gemm=True), case(H8, **LATE, moe_use_legacy_grouped_gemm=False),
    ),
    "OVL-14": (
        case(H8, **LATE, graphs="transformer_engine", captured="attn", stack={"transformer_engine": "2.9.0"}),
        case(H8, **LATE, graphs="transformer_engine", captured="attn", stack={"transformer_engine": "2.10.0"}),
    ),
    "OVL-15": (engine("2.7.0", **LATE, overlap_grad_reduce=True), engine("2.8.0", **LATE, overlap_grad_reduce=True)),
    "OVL-16": (
        engine("2.11.0", **LATE, overlap_grad_reduce=True, captured="attn"),
        engine("2.12.0", **LATE, overlap_grad_reduce=True, captured="attn"),
    ),
    "OVL-17": (
        engine("2.6.0", **LATE, gradient_accumulation_fusion=False),
        engine("2.7.0", **LATE, gradient_accumulation_fusion=False),
    ),
    "OVL-18": (case(H8, **LATE, transformer_impl="local"), case(H8, **LATE, transformer_impl="transformer_engine")),
    "OVL-19": (
        case(H8, **OVERLAP, overlap_dispatch_backward_with_experts_wgrad=True),
        case(H8, **{**OVERLAP, "overlap": False}, overlap_dispatch_backward_with_experts_wgrad=True),
    ),
    "OVL-20": (
        case(H8, ep_overlap_early_attn_memory_release=True),
        case(H8, **OVERLAP, ep_overlap_early_attn_memory_release=True),
    ),
    "OVL-21": (
        case(H8, **NCCL, **OFFLOAD, offload_modules="expert_fc1"),
        case(H8, **NCCL, **OFFLOAD, offload_modules="moe_act"),
    ),
    "OVL-21b": (case(H8, **NCCL), case(H8, **NCCL, moe_ncclep_static_shape=True)),
    "OVL-22": (
        case(H8, **SHARDED, graphs="local", captured="attn+moe_router"), case(H8, **SHARDED, graphs="full_iteration"),
    ),
    "OVL-23": (
        case(gpus(4), **INTERLEAVED, num_microbatches_with_partial_activation_checkpoints=1),
        case(gpus(4), **INTERLEAVED),
    ),
    "OVL-24": (case(H8, **SPLIT), case(H8, **SPLIT, sp=True)),
    "OVL-27": (case(H2, **DEFER), case(H2, **DEFER, pp=2)),
    "TRAP-05": (case(H8, tp_comm_overlap=True), case(H8, **SPLIT, sp=True)),
    "TRAP-26": (
        case(H8, bucket_size=40_000_000, overlap_grad_reduce=False),
        case(H8, bucket_size=40_000_000, overlap_grad_reduce=True),
    ),
    "TRAP-29": (case(H2, **OVERLAP, mbs=8), case(H2, **OVERLAP, mbs=4)),
    "TRAP-30": (
        case(H8, **OVERLAP, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        case(H8, **OVERLAP, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    ),
    "DUP-02": (case(pp=2, overlap_grad_reduce=True), case(tp=2, etp=1, overlap_grad_reduce=True)),
    "DUP-03": (case(pp=2, use_distributed_optimizer=True), case(use_distributed_optimizer=True)),
    "OPT-01": (
        case(use_distributed_optimizer=True, training={"optimizer": "sgd"}),
        case(use_distributed_optimizer=False, training={"optimizer": "sgd"}),
    ),
}  # fmt: skip
ORACLE: dict[str, Oracle] = {
    "OVL-01": real.torch_refusal,
    "OVL-12": Unrun("the check stands behind the replay of a captured graph, which needs a GPU"),
    "OVL-22": real.sharding_refusal,
    "OPT-01": real.optimizer_refusal,
}
