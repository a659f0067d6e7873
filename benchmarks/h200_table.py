"""Every legal configuration of two grids, measured on one H200: the tables that `moetune replay` answers from.

    python -m benchmarks.h200_table benchmarks/tables/h200_qwen3_like.jsonl [--shape qwen3-like] [--seconds 560]
    python -m benchmarks.h200_table benchmarks/tables/h200_deepseek_like.jsonl --shape deepseek-like
    python -m benchmarks.h200_table benchmarks/tables/h200_qwen3_like.jsonl --again 20     (then rank_stability.py)
    python -m benchmarks.h200_table --list

From the root of the project. Each configuration is one trial of this project's worker: 3 warm-up steps, 4 to 8 measured
(until their standard error is 1%), one profiled.
`train_worker/table.py` says what a row holds, `table_run.py` in which order they run.
"""

from benchmarks.contrasts import Contrast
from benchmarks.table_run import Choices, Grid, command
from search_spaces.candidate import Candidate, KnobValue
from search_spaces.presets import load_model
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape

CLUSTER = ClusterShape(device="cuda", workers=1, workers_per_trial=1, workers_per_node=1, gpu_arch="H200 sm_90")
TRAINING = TrainingShape(
    sequence_length=4096, global_batch_size=8, warmup_steps=3, measured_steps=8, min_measured_steps=4,
    target_relative_error=0.01,
)  # fmt: skip
QWEN3_LIKE = load_model("qwen3-30b-a3b-4l").model_copy(
    update={"name": "qwen3-like-4l", "num_moe_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 1536,
            "vocab_size": 32768}
)  # fmt: skip
DEEPSEEK_LIKE = ModelShape.model_validate(  # latent attention, one dense layer, a shared expert
    load_model("moonlight-16b-a3b").model_dump()
    | {"name": "deepseek-like-4l", "num_layers": 4, "num_moe_experts": 32, "vocab_size": 32768}
)
GRAPHS: Choices = {
    "cuda_graph_impl": ("none", "transformer_engine"),
    "cuda_graph_modules": ("attn", "attn+moe_router+moe_preprocess"),
}
RECOMPUTE: Choices = {
    "recompute_granularity": (None, "selective", "full"), "recompute_modules": ("layernorm+moe_act", "moe"),
    "recompute_method": ("uniform",), "recompute_num_layers": (1,),
}  # fmt: skip
CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
ONE: Choices = {
    "tensor_model_parallel_size": (1,), "context_parallel_size": (1,), "pipeline_model_parallel_size": (1,),
    "expert_model_parallel_size": (1,), "overlap_moe_expert_parallel_comm": (False,),
}  # fmt: skip
# bf16 with cuBLAS and with CUTLASS, and FP8 blockwise; both dispatchers; both micro-batches: all of it.
MAIN: Choices = ONE | GRAPHS | RECOMPUTE | {
    "moe_token_dispatcher_type": ("alltoall", "allgather"), "micro_batch_size": (4, 8), "moe_grouped_gemm": (True,),
    "fp8": (None, "hybrid"), "fp8_recipe": ("blockwise",), CUTLASS: (None, "1"),
}  # fmt: skip
A2A: Choices = {"moe_token_dispatcher_type": ("alltoall",)}
PLAIN: Choices = A2A | {"recompute_granularity": (None,)}
MOE_ACT: Choices = {"recompute_granularity": ("selective",), "recompute_modules": ("moe_act",)}
FP8: Choices = {"fp8": ("hybrid",), CUTLASS: (None,)}
BF16: Choices = {"fp8": (None,), CUTLASS: (None,)}
# What costs more seconds a trial, or says less, in part.
QWEN3_BLOCKS = (
    MAIN,
    MAIN | MOE_ACT,
    MAIN | FP8 | A2A | {"fp8_recipe": ("tensorwise",), "micro_batch_size": (8,)},
    MAIN | FP8 | PLAIN | {"fp8_recipe": ("delayed",), "micro_batch_size": (8,)},
    MAIN
    | PLAIN
    | {"micro_batch_size": (2,), "fp8": (None,), "cuda_graph_modules": ("attn+moe_router+moe_preprocess",)},
    MAIN | PLAIN | BF16 | {"micro_batch_size": (8,), "moe_grouped_gemm": (False,), "cuda_graph_impl": ("none",)},
)
DEEPSEEK: Choices = MAIN | {
    "moe_token_dispatcher_type": ("alltoall",), "recompute_modules": ("mla_up_proj", "moe"),
}  # fmt: skip
DEEPSEEK_BLOCKS = (
    DEEPSEEK | {"micro_batch_size": (8,)},
    DEEPSEEK | {"micro_batch_size": (4,), "recompute_granularity": (None, "selective"), "recompute_modules": ("moe",)},
)
BASELINE: dict[str, KnobValue] = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}

# Seconds of a trial, out of tables/h200_memory.jsonl (the same shape, 32,768 tokens a step; kernels compiled before).
FIXED_S, PROFILE_S = 2.7, 0.5
MEASURED_STEPS = 5  # of 4 to 8: where the GPU is the wall the least are enough
STEP_S = {8: 0.235, 4: 0.265, 2: 0.40}
# (knob, value, times the step, seconds more beside the steps)
COSTS: tuple[tuple[str, KnobValue, float, float], ...] = (
    ("recompute_modules", "layernorm+moe_act", 1.15, 0.5), ("recompute_modules", "moe", 1.27, 0.3),
    ("recompute_modules", "mla_up_proj", 1.05, 0.3), ("recompute_modules", "moe_act", 1.03, 0.2),
    ("recompute_granularity", "full", 1.25, 0.7),
    ("fp8_recipe", "blockwise", 1.03, 0.0), ("fp8_recipe", "tensorwise", 1.2, 1.5), ("fp8_recipe", "delayed", 1.2, 1.2),
    ("cuda_graph_impl", "transformer_engine", 1.0, 1.3), ("moe_grouped_gemm", False, 1.5, 0.0),
    ("moe_token_dispatcher_type", "allgather", 1.08, 0.0), (CUTLASS, "1", 0.85, 0.0),
)  # fmt: skip


def predict(candidate: Candidate) -> float:
    """Seconds one trial takes, from the request to the report."""
    values = candidate.knobs | candidate.env
    step_s, fixed_s = STEP_S[int(values["micro_batch_size"])], FIXED_S + PROFILE_S
    for name, value, times, more_s in COSTS:
        if name in values and values[name] == value:
            step_s, fixed_s = step_s * times, fixed_s + more_s
    return fixed_s + step_s * (TRAINING.warmup_steps + MEASURED_STEPS)


CONTRASTS = (
    Contrast("allgather against alltoall", "moe_token_dispatcher_type", "allgather", "alltoall", same_loss=True),
    Contrast("CUTLASS against cuBLAS", CUTLASS, "1", None, same_loss=True),
    Contrast("grouped GEMM against one by one", "moe_grouped_gemm", True, False, same_loss=True),
    Contrast("FP8 blockwise against bf16", "fp8", "hybrid", None, same_loss=True),
    Contrast("graphs of attention against none", "cuda_graph_impl", "transformer_engine", "none", same_loss=True),
    Contrast("graphs of routing too", "cuda_graph_modules", "attn+moe_router+moe_preprocess", "attn", same_loss=True),
    Contrast("full recompute against none", "recompute_granularity", "full", None, same_loss=True),
    Contrast("micro-batch 8 against 4", "micro_batch_size", 8, 4),
)
GRIDS = {
    "qwen3-like": Grid(
        "qwen3-like", QWEN3_LIKE, CLUSTER, TRAINING, QWEN3_BLOCKS, BASELINE | {"micro_batch_size": 4}, 16, predict,
        CONTRASTS,
    ),
    "deepseek-like": Grid(
        "deepseek-like", DEEPSEEK_LIKE, CLUSTER, TRAINING, DEEPSEEK_BLOCKS, BASELINE | {"micro_batch_size": 8}, 14,
        predict, CONTRASTS,
    ),
}  # fmt: skip

if __name__ == "__main__":
    command(GRIDS, __doc__)
