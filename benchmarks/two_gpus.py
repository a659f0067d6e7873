"""Expert parallelism for real: dispatchers, EP overlap and delayed weight gradients between two GPUs of one host.

    benchmarks/two_gpus.sh [FOLDER]      both shapes, then what each knob does (two GPUs)
    benchmarks/two_gpus.sh --small       the same on two CPU ranks under gloo with a toy model, in a minute
    python -m benchmarks.two_gpus ROWS.jsonl --shape qwen3 [--seconds 900] [--list] [--summary]

Rows are those of `h200_table.py`. On two GPUs of one host NVLink carries what is exchanged; CUDA's own default is 8
hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). The grids `-ncclep` need the copy of `ncclep_patch.py` and NCCL 2.32.3,
the grids `-late` Apex.
"""

import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from benchmarks.contrasts import Contrast
from benchmarks.table_run import STACK, Choices, Grid, command, listed, run, summary
from search_spaces.candidate import Candidate, KnobValue
from search_spaces.presets import load_model
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape

QUEUES, OVERLAP, DELAY = "CUDA_DEVICE_MAX_CONNECTIONS", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"
DISPATCHER, BACKEND, EP = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "expert_model_parallel_size"
GPUS = ClusterShape(device="cuda", workers=2, workers_per_trial=2, workers_per_node=2, gpu_arch="H200 sm_90")
CPUS = ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=2)
# Four micro-batches a rank: overlap hides the exchange of one behind the computation of another.
TRAINING = TrainingShape(sequence_length=4096, global_batch_size=16, warmup_steps=3, measured_steps=5)
QWEN3 = load_model("qwen3-30b-a3b").model_copy(update={"name": "qwen3-30b-a3b-8l", "num_layers": 8})
MOONLIGHT = ModelShape.model_validate(
    load_model("moonlight-16b-a3b").model_dump() | {"name": "moonlight-16b-a3b-4l", "num_layers": 4}
)

LAYOUT: Choices = {
    "tensor_model_parallel_size": (1,), "context_parallel_size": (1,), "pipeline_model_parallel_size": (1,),
    EP: (2,), "micro_batch_size": (2,), "use_distributed_optimizer": (True,), "moe_grouped_gemm": (True,),
    # ncclep's receive buffer over the mean load of a rank: at EP 2 twice that holds all tokens, so that none overflows.
    DISPATCHER: ("alltoall",), BACKEND: ("ncclep",), "moe_expert_rank_capacity_factor": (2.0,),
}  # fmt: skip
FREE: Choices = {
    OVERLAP: (False, True), DELAY: (False, True), "recompute_granularity": (None, "selective"),
    "recompute_modules": ("moe_act",), "fp8": (None, "hybrid"), "fp8_recipe": ("blockwise",),
    "cuda_graph_impl": ("none", "transformer_engine"), "cuda_graph_modules": ("attn",),
}  # fmt: skip
NONE: Choices = {"recompute_granularity": (None,)}
EAGER: Choices = NONE | {"fp8": (None,), "cuda_graph_impl": ("none",)}
APART: Choices = {OVERLAP: (False,)}


def blocks(main: Choices) -> tuple[Choices, ...]:
    """`main` with alltoall; the other dispatchers, other numbers of queues, and EP 1, where the rest is plain.

    flex is refused on the stack of these grids; the tables hold rows of it that crashed, from before it was.
    """
    return (
        main,
        main | EAGER | {QUEUES: ("1", "32")},
        main | NONE | APART | {DISPATCHER: ("allgather",)},
        main | NONE | {DISPATCHER: ("flex",), DELAY: (False,), "cuda_graph_impl": ("none",)},
        main | NONE | APART | {EP: (1,), "cuda_graph_impl": ("none",)},
    )


MLA: Choices = {"recompute_modules": ("mla_up_proj",)}
ALL = LAYOUT | FREE | {QUEUES: ("8",)}
LATENT = blocks(ALL | NONE)
BASELINE: dict[str, KnobValue] = {
    DISPATCHER: "alltoall", EP: 2, "micro_batch_size": 2, "moe_grouped_gemm": True, "use_distributed_optimizer": True,
    QUEUES: "8",
}  # fmt: skip
CONTRASTS = (
    Contrast("allgather against alltoall", DISPATCHER, "allgather", "alltoall", same_loss=True, communication=True),
    Contrast("flex with ncclep against alltoall", DISPATCHER, "flex", "alltoall", same_loss=True, communication=True),
    Contrast("EP overlap against none", OVERLAP, True, False, same_loss=True, communication=True),
    Contrast("delayed weight gradients, with overlap", DELAY, True, False, same_loss=True, communication=True),
    Contrast("EP 2 against EP 1", EP, 2, 1, same_loss=True),
    Contrast("1 queue against 8", QUEUES, "1", "8", same_loss=True),
    Contrast("32 queues against 8", QUEUES, "32", "8", same_loss=True),
    Contrast("selective recompute against none", "recompute_granularity", "selective", None, same_loss=True),
    Contrast("FP8 blockwise against bf16", "fp8", "hybrid", None, same_loss=True),
    Contrast("graphs of attention against none", "cuda_graph_impl", "transformer_engine", "none", same_loss=True),
)

# Qwen3-30B-A3B on one H200, launch-bound: 45 ms a layer and micro-batch. A guess before any run on two GPUs.
LAYER_S, FIXED_S = 0.045, 6.0


def predictor(model: ModelShape) -> Callable[[Candidate], float]:
    """Seconds one trial of a model takes, the same for every candidate: nothing was measured on two GPUs yet."""
    step_s = LAYER_S * model.num_layers * TRAINING.global_batch_size / (GPUS.workers * 2)
    return lambda _: FIXED_S + step_s * (TRAINING.warmup_steps + TRAINING.measured_steps)


# Delayed weight gradients of captured attention need them added up inside the GEMM (RUN-20), and that needs Apex
# (FUS-12): a grid of its own.
FUSED: Choices = (
    ALL | EAGER | {"gradient_accumulation_fusion": (True,), "cuda_graph_impl": ("none", "transformer_engine")}
)
LATE = (FUSED,)
# ncclep needs a newer NCCL than torch's own: beside alltoall on the same one, in a grid of its own.
NCCLEP = (ALL | NONE | {DISPATCHER: ("alltoall", "flex"), DELAY: (False,), "cuda_graph_impl": ("none",)},)
LATE_BASELINE = BASELINE | {"gradient_accumulation_fusion": True}
PATCHED = STACK.model_copy(update={"megatron_core": version("megatron-core"), "nccl": "2.32.3"})
STACKS = {"late": STACK.model_copy(update={"apex": "0.1"}), "ncclep": PATCHED}


def grid(name: str, model: ModelShape, found: tuple[Choices, ...], baseline: dict[str, KnobValue]) -> Grid:
    stack = STACKS.get(name.partition("-")[2], STACK)
    return Grid(name, model, GPUS, TRAINING, found, baseline, 12, predictor(model), CONTRASTS, stack)


GRIDS = {
    each.name: each
    for each in (
        grid("qwen3", QWEN3, blocks(ALL), BASELINE),
        grid("moonlight", MOONLIGHT, (*LATENT, ALL | MLA | APART), BASELINE),
        grid("qwen3-late", QWEN3, LATE, LATE_BASELINE),
        grid("moonlight-late", MOONLIGHT, LATE, LATE_BASELINE),
        grid("qwen3-ncclep", QWEN3, NCCLEP, BASELINE),
        grid("moonlight-ncclep", MOONLIGHT, NCCLEP, BASELINE),
    )
}
TOY: Choices = {
    EP: (2,), DISPATCHER: ("alltoall",), "micro_batch_size": (2,), "recompute_granularity": (None,),
    "recompute_method": ("uniform",), "recompute_num_layers": (1,),
}  # fmt: skip
SMALL = Grid(
    "small", load_model("tiny-moe"), CPUS,
    TrainingShape(
        sequence_length=128, global_batch_size=8, warmup_steps=1, measured_steps=2, params_dtype="fp32"
    ),
    (TOY | {EP: (1, 2), DISPATCHER: ("alltoall", "allgather")}, TOY | {"recompute_granularity": ("full",)}),
    {EP: 2, DISPATCHER: "alltoall", "micro_batch_size": 2}, 8, lambda _: 3.0,
    (
        CONTRASTS[0], CONTRASTS[4],
        Contrast("full recompute against none", "recompute_granularity", "full", None, same_loss=True),
    ),
    stack=None,
)  # fmt: skip


def small() -> None:
    """The whole of it in its small form: list, run, say what each knob does."""
    with tempfile.TemporaryDirectory() as folder:
        rows, planned = Path(folder) / "small.jsonl", list(SMALL.trials())
        print(listed(SMALL, planned), flush=True)
        run(SMALL, planned, rows, 300.0)
        print(summary(SMALL, rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["--small"]:
        small()
    else:
        command(GRIDS, __doc__)
