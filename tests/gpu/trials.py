"""Small but real trials for a GPU: shapes, and every dimension of a sweep switched, against what its loss must follow.

Sizes are the smallest that all kernels take: FP8 blockwise wants multiples of 128, latent attention DeepSeek's own
head sizes. A trial is 8 steps of 4,096 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from train_worker.job import TrialJob

Knobs = dict[str, KnobValue]
QWEN = ModelShape(
    name="small-qwen", num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=64,
    ffn_hidden_size=512, vocab_size=1024, max_position_embeddings=1024, num_moe_experts=8, moe_router_topk=2,
    moe_ffn_hidden_size=256, qk_layernorm=True, rotary_base=1_000_000,
)  # fmt: skip
DEEPER = QWEN.model_copy(update={"name": "small-qwen-4l", "num_layers": 4})
DEEPSEEK = ModelShape(
    name="small-deepseek", num_layers=3, hidden_size=256, num_attention_heads=4, num_query_groups=4, kv_channels=128,
    ffn_hidden_size=512, vocab_size=1024, max_position_embeddings=1024, num_moe_experts=8, moe_router_topk=2,
    moe_ffn_hidden_size=256, first_dense_layers=1, moe_shared_expert_intermediate_size=256, qk_layernorm=True,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, multi_latent_attention=True,
    q_lora_rank=128, kv_lora_rank=128, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128,
)  # fmt: skip
TRAINING = TrainingShape(
    sequence_length=1024, global_batch_size=4, warmup_steps=4, measured_steps=4, learning_rate=5e-4
)
LONG = TRAINING.model_copy(update={"measured_steps": 16})
LIMIT_S = 100.0

SENT: Knobs = {"micro_batch_size": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
PADDED: Knobs = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
SHARDED: Knobs = {"use_distributed_optimizer": True}
CUTLASS = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
WEIGHTS_STAY = {"NVTE_CPU_OFFLOAD_V1": "1"}  # else Transformer Engine from 2.10 on offloads weights too
BF16, FP8 = 0.02, 0.05  # how far a loss may be from the baseline's, as a share of it


def fp8(recipe: str, **more: KnobValue) -> Knobs:
    return {"fp8": "hybrid", "fp8_recipe": recipe} | more


def selective(modules: str) -> Knobs:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def full(method: str) -> Knobs:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}


def graphs(modules: str) -> Knobs:
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules}


def offload(modules: str) -> Knobs:
    """Also of tensors as small as these: Megatron leaves those below a million elements where they are."""
    return {
        "fine_grained_activation_offloading": True, "offload_modules": modules, "min_offloaded_tensor_size": 1024,
    }  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model and the knobs that all its trials share; their losses must follow those of these knobs alone."""

    model: ModelShape
    knobs: Knobs = field(default_factory=lambda: dict(SENT))


FAMILIES = {
    "qwen": Family(QWEN), "four layers": Family(DEEPER), "deepseek": Family(DEEPSEEK),
    "padded": Family(QWEN, SENT | PADDED),
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One setting: what it adds to its family, and how closely its losses must follow."""

    knobs: Knobs
    family: str = "qwen"
    env: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = BF16
    ranks: int = 1
    frees: Literal["", "allocated_bytes", "static_bytes"] = ""  # of which its family's baseline has more


ITERATION: Knobs = {"cuda_graph_impl": "full_iteration"}
ONE_GPU: dict[str, Trial] = {
    "allgather": Trial({"moe_token_dispatcher_type": "allgather"}),
    "experts one by one": Trial({"moe_grouped_gemm": False}),
    "CUTLASS": Trial({}, env=CUTLASS),
    "CUTLASS, graphs up to the dispatch": Trial(graphs("attn+moe_router+moe_preprocess"), env=CUTLASS),
    "fused permute and router": Trial({"moe_permute_fusion": True, "moe_router_fusion": True}),
    "fused activation, rotary, loss": Trial(
        {
            "bias_activation_fusion": True,
            "apply_rope_fusion": True,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "te",
        }
    ),
    "recompute core_attn": Trial(selective("core_attn")),
    "recompute layernorm+moe_act": Trial(selective("layernorm+moe_act")),
    "recompute moe": Trial(selective("moe")),
    "recompute all": Trial(full("uniform"), frees="allocated_bytes"),
    "recompute the first": Trial(full("block")),
    "FP8 delayed": Trial(fp8("delayed"), tolerance=FP8),
    "FP8 tensorwise": Trial(fp8("tensorwise"), tolerance=FP8),
    "FP8 blockwise": Trial(fp8("blockwise"), tolerance=FP8),
    "FP8 blockwise, recomputed": Trial(fp8("blockwise") | selective("layernorm+moe_act"), tolerance=FP8),
    "FP8 but in the first and last layer": Trial(
        fp8("blockwise", first_last_layers_bf16=True), "four layers", tolerance=FP8
    ),
    "FP8 weights, blockwise": Trial(fp8("blockwise", fp8_param=True) | SHARDED, tolerance=FP8),
    "FP8 weights, delayed": Trial(fp8("delayed", fp8_param=True) | SHARDED, tolerance=FP8),
    "graphs of attention": Trial(graphs("attn")),
    "graphs of attention and router": Trial(graphs("attn+moe_router")),
    "graphs up to the dispatch": Trial(graphs("attn+moe_router+moe_preprocess")),
    "graphs of router and preprocess": Trial(graphs("moe_router+moe_preprocess")),
    "graphs of attention and experts": Trial(graphs("attn+moe"), "padded"),
    "graphs and FP8": Trial(graphs("attn+moe_router+moe_preprocess") | fp8("tensorwise"), tolerance=FP8),
    "graph of the iteration": Trial(ITERATION, "padded"),
    "graph of the iteration, recomputed": Trial(ITERATION | full("uniform"), "padded"),
    "graph of the iteration, FP8": Trial(ITERATION | fp8("tensorwise"), "padded", tolerance=FP8),
    "attention offloaded": Trial(offload("core_attn+attn_proj"), "four layers", env=WEIGHTS_STAY),
    "experts offloaded": Trial(offload("expert_fc1+moe_act"), "four layers", env=WEIGHTS_STAY),
    "optimizer on the host": Trial(
        SHARDED
        | {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        frees="static_bytes",
    ),
    "optimizer half on the host": Trial(
        SHARDED
        | {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    ),
    "moments in bf16": Trial(
        SHARDED | {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    ),
    "gradients in bf16, garbage by hand": Trial({"grad_reduce_in_fp32": False, "manual_gc": True}),
    "latent attention, recomputed": Trial(selective("mla_up_proj+mlp+shared_experts"), "deepseek"),
    "shared expert overlapped": Trial({"moe_shared_expert_overlap": True}, "deepseek"),
    "down projections fused": Trial({"mla_down_proj_fusion": True}, "deepseek"),
    "latent attention in FP8 GEMMs": Trial(fp8("blockwise"), "deepseek", tolerance=FP8),
    "graphs with a dense layer": Trial(graphs("attn+mlp+moe_router+moe_preprocess"), "deepseek"),
}
EXPERT: Knobs = {"expert_model_parallel_size": 2}
OVERLAP: Knobs = EXPERT | {"overlap_moe_expert_parallel_comm": True, "micro_batch_size": 1}
TWO_GPUS: dict[str, Trial] = {
    "experts on two, alltoall": Trial(EXPERT, ranks=2),
    "experts on two, allgather": Trial(EXPERT | {"moe_token_dispatcher_type": "allgather"}, ranks=2),
    "EP overlap": Trial(OVERLAP, ranks=2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    "EP overlap, gradients delayed": Trial(
        OVERLAP | {"delay_wgrad_compute": True}, ranks=2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    ),
    "EP overlap, gradients of captured attention delayed": Trial(
        OVERLAP | graphs("attn") | {"delay_wgrad_compute": True, "gradient_accumulation_fusion": True},
        ranks=2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    ),
    "uneven stages": Trial(
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}, "four layers", ranks=2
    ),
    "heads on two": Trial(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1} | EXPERT,
        ranks=2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    "graph of the iteration on two": Trial(EXPERT | ITERATION, "padded", ranks=2),
    "sharded on two, overlapped": Trial(
        SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}, ranks=2
    ),
}  # fmt: skip
# name -> (rule of the worker, a trial that it refuses): seen to train to NaN, or to other losses.
REFUSED = {
    "graph of the iteration, CUTLASS": ("RUN-19", Trial(ITERATION, "padded", env=CUTLASS)),
    "graphs of attention and experts, CUTLASS": ("RUN-19", Trial(graphs("attn+moe"), "padded", env=CUTLASS)),
    "graphs of experts, CUTLASS": ("RUN-19", Trial(graphs("moe"), "padded", env=CUTLASS)),
}
NEEDS_BLACKWELL: dict[str, Knobs] = {
    "MXFP8": fp8("mxfp8"), "NVFP4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
}  # fmt: skip


def candidate_of(trial: Trial) -> Candidate:
    return Candidate(knobs=FAMILIES[trial.family].knobs | trial.knobs, env=dict(trial.env))


def cluster(ranks: int = 1, arch: str | None = None) -> ClusterShape:
    return ClusterShape(device="cuda", workers=ranks, workers_per_trial=ranks, workers_per_node=ranks, gpu_arch=arch)


def job(
    name: str,
    candidate: Candidate | None = None,
    model: ModelShape = QWEN,
    training: TrainingShape = TRAINING,
    ranks: int = 1,
    **changes: Any,
) -> TrialJob:
    """Not profiled, which costs a second or two. `changes` are fields of the job; any `name` will do."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    found = {
        "trial_id": plain, "candidate": candidate or Candidate(knobs=dict(SENT)), "model": model,
        "cluster": cluster(ranks), "training": training, "seed": 1, "time_limit_s": LIMIT_S,
        "profile": False,
    }  # fmt: skip
    return TrialJob.model_validate(found | changes)
