"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from typing import Any

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from search_spaces.shapes import ClusterShape
from tests.search_spaces.cases import LAPTOP_RANKS, case, gpus
from tests.search_spaces.examples.clusters import BLACKWELL, CUTLASS, H1, H2, H8, MLA
from tests.search_spaces.oracle import Oracle
from tests.search_spaces.oracle_fusions import experts_refusal
from tests.search_spaces.oracle_latent import fused_projections, split_projections

CUTEDSL, CONNECTIONS = "NVTE_CUTEDSL_FUSED_GROUPED_MLP", "CUDA_DEVICE_MAX_CONNECTIONS"
CORES: dict[str, KnobValue] = {"cpu_affinity": "exclusive"}
ONE_TENSOR: dict[str, KnobValue] = {
    "moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True, "moe_single_grouped_weight": True,
}  # fmt: skip
TP2: dict[str, KnobValue] = {"tp": 2, "sp": True}
SHARED_NODE = ClusterShape(device="cuda", workers=8, workers_per_trial=4, workers_per_node=8, gpu_arch="H200 sm_90")
OWN_NODE = SHARED_NODE.model_copy(update={"workers_per_node": 4})
ITERATION: Any = {
    "graphs": "full_iteration", "training": {"warmup_steps": 3}, "dispatcher": "alltoall",
    "moe_expert_capacity_factor": 1.0,
}  # fmt: skip
PADS: dict[str, KnobValue] = {"moe_pad_expert_input_to_capacity": True}
NCCLEP: dict[str, KnobValue] = {"ep": 8, "dispatcher": "flex", "backend": "ncclep"}
OFFLOAD: dict[str, KnobValue] = {"optimizer_cpu_offload": True}
QUERIES = MLA | {"q_lora_rank": 32}
LATE: dict[str, KnobValue] = {
    "ep": 8, "dispatcher": "alltoall", "overlap": True, "delay": True, "graphs": "transformer_engine",
}  # fmt: skip
FUSED_EXPERTS: dict[str, KnobValue] = {"moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True}
NOT_GATED: dict[str, KnobValue] = {"gated_linear_unit": False, "use_fused_weighted_squared_relu": True}
COMPRESSED = QUERIES | {"kv_lora_rank": 32, "qk_pos_emb_head_dim": 8}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "RUN-02": (case(H8, graphs="local"), case(H8, graphs="transformer_engine")),
    "RUN-04": (case(H2, **TP2, tp_comm_overlap=True), case(H2, **TP2, tp_comm_overlap=False)),
    "RUN-05": (
        case(H8, **NCCLEP, moe_expert_rank_capacity_factor=7.5),
        case(H8, **NCCLEP, moe_expert_rank_capacity_factor=8.0),
    ),
    "RUN-06": (
        case(BLACKWELL, **ONE_TENSOR),
        case(BLACKWELL, training={"layout_independent_init": False}, **ONE_TENSOR),
    ),
    "RUN-07": (case(BLACKWELL, env={CUTEDSL: "1"}), case(BLACKWELL, env={CUTEDSL: "0"})),
    "RUN-08": (case(SHARED_NODE, **CORES), case(OWN_NODE, **CORES)),
    "RUN-09": (case(H1, **CORES), case(H2, **CORES)),
    "RUN-10": (
        case(LAPTOP_RANKS, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"),
        case(LAPTOP_RANKS, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"),
    ),
    "RUN-11": (case(LAPTOP_RANKS, env={CONNECTIONS: "1"}), case(gpus(2), env={CONNECTIONS: "1"})),
    "RUN-12": (case(H8, model=MLA, mla_down_proj_fusion=True), case(H8, model=QUERIES, mla_down_proj_fusion=True)),
    "RUN-12b": (
        case(H8, model=COMPRESSED | {"q_lora_rank": 33}, **TP2, mla_down_proj_fusion=True),
        case(H8, model=COMPRESSED, **TP2, mla_down_proj_fusion=True),
    ),
    "RUN-13": (case(H8, model=MLA, apply_rope_fusion=True), case(H8, model={}, apply_rope_fusion=True)),
    "RUN-14": (
        case(H8, moe_shared_expert_overlap=True),
        case(H8, model={"moe_shared_expert_intermediate_size": 64}, moe_shared_expert_overlap=True),
    ),
    "RUN-15": (
        case(LAPTOP_RANKS, **TP2, dispatcher="alltoall", moe_expert_capacity_factor=1.0),
        case(
            LAPTOP_RANKS,
            **TP2,
            dispatcher="alltoall",
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=True,
        ),
    ),
    "RUN-16": (
        case(H8, **ITERATION, moe_pad_expert_input_to_capacity=False),
        case(H8, **ITERATION, moe_pad_expert_input_to_capacity=True),
    ),
    "RUN-17": (
        case(H8, **OFFLOAD, use_distributed_optimizer=False),
        case(H8, **OFFLOAD, use_distributed_optimizer=True),
    ),
    "RUN-18": (case(H1, optimizer_cuda_graph=True), case(H1, optimizer_cuda_graph=False)),
    "RUN-19": (
        case(H1, **ITERATION, **PADS, moe_grouped_gemm=True, env=CUTLASS),
        case(H1, **ITERATION, **PADS, moe_grouped_gemm=True),
    ),
    "RUN-20": (
        case(H8, **LATE, captured="attn"),
        case(H8, **LATE, captured="attn", gradient_accumulation_fusion=True),
    ),
    "RUN-21": (case(H8, **FUSED_EXPERTS), case(H8, **FUSED_EXPERTS, activation_func="squared_relu", **NOT_GATED)),
}

ORACLE: dict[str, Oracle] = {
    "RUN-12": fused_projections, "RUN-12b": split_projections, "RUN-21": experts_refusal,
}  # fmt: skip
