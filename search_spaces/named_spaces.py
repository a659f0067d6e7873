"""The spaces a sweep file can name: `laptop` shows every kind of knob on two CPU ranks; `moe-core` holds the five
dimensions that matter most on GPUs, with the layout; `moe-full` (`full_space`) everything.

Defaults are Megatron-Core 0.19's own (`TransformerConfig`, `DistributedDataParallelConfig`), except the two that
Megatron-Core does not train right with: `sequence_parallel` under tensor parallelism (MoELayer refuses to train
without it) and `overlap_p2p_comm` under virtual stages (without it two stages train wrong: facts in rule PAR-27).
"""

from search_spaces.full_space import MOE_FULL, on, switch, unless
from search_spaces.space import Knob, SearchSpace

_FLEX = on("moe_token_dispatcher_type", "flex")
_SELECTIVE = on("recompute_granularity", "selective")
_FULL = on("recompute_granularity", "full")
_SPLIT = unless("tensor_model_parallel_size", 1)
_STAGED = unless("pipeline_model_parallel_size", 1)
_INTERLEAVED = unless("virtual_pipeline_model_parallel_size", None)
_GRAPHED = unless("cuda_graph_impl", "none")
_EP_OVERLAP = on("overlap_moe_expert_parallel_comm", True)
_QUANTIZED = on("fp8", "hybrid")
_GROUPED = on("moe_grouped_gemm", True)

_RECOMPUTE_MODULES = ("core_attn", "layernorm", "moe", "core_attn+layernorm+moe", "moe_act")
_GRAPH_MODULES = ("attn", "attn+moe_router", "attn+moe_router+moe_preprocess")


def _layout(sizes: tuple[int, ...], expert_sizes: tuple[int, ...], virtual: tuple[int, ...]) -> tuple[Knob, ...]:
    """How ranks are split. `sizes` also serves pipeline and expert-tensor sizes; `virtual` are stages a rank."""
    return (
        Knob("tensor_model_parallel_size", sizes, 1, doc="ranks one attention layer is split over", open_ended=True),
        switch("sequence_parallel", "split the sequence too; MoE with TP needs it", _SPLIT, default=True),
        Knob("expert_tensor_parallel_size", sizes, 1, _SPLIT, "ranks one expert is split over", open_ended=True),
        Knob("pipeline_model_parallel_size", sizes, 1, doc="stages the layers are split into", open_ended=True),
        Knob(
            "virtual_pipeline_model_parallel_size", (None, *virtual), None, _STAGED,
            "chunks of layers a stage holds (interleaved schedule)", open_ended=True,
        ),
        switch("overlap_p2p_comm", "send activations while computing", _INTERLEAVED, default=True),
        Knob("expert_model_parallel_size", expert_sizes, 1, doc="ranks the experts are spread over", open_ended=True),
    )  # fmt: skip


def _recompute(layer_counts: tuple[int, ...]) -> tuple[Knob, ...]:
    return (
        Knob("recompute_granularity", (None, "selective", "full"), None, doc="which activations are recomputed"),
        Knob("recompute_modules", _RECOMPUTE_MODULES, "core_attn", _SELECTIVE, "the parts recomputed"),
        Knob("recompute_method", ("uniform", "block"), "uniform", _FULL, "all layers, or the first ones of a stage"),
        Knob("recompute_num_layers", layer_counts, layer_counts[0], _FULL, "layers a checkpoint", open_ended=True),
    )


def _precision() -> tuple[Knob, ...]:
    recipes = ("delayed", "tensorwise", "blockwise", "mxfp8")
    return (
        Knob("fp8", (None, "hybrid"), None, doc="FP8 GEMMs: e4m3 forward, e5m2 backward"),
        Knob("fp8_recipe", recipes, "delayed", _QUANTIZED, "how FP8 scales are found"),
    )


def _graphs(implementations: tuple[str, ...]) -> tuple[Knob, ...]:
    return (
        Knob("cuda_graph_impl", implementations, "none", doc="who captures CUDA graphs"),
        Knob("cuda_graph_modules", _GRAPH_MODULES, "attn", _GRAPHED, "what is captured"),
    )


def _dispatcher(backends: tuple[str, ...]) -> tuple[Knob, ...]:
    types = ("allgather", "alltoall", "flex")
    return (
        Knob("moe_token_dispatcher_type", types, "allgather", doc="how tokens reach their experts"),
        Knob("moe_flex_dispatcher_backend", backends, "deepep", _FLEX, "the library behind flex"),
    )


_OVERLAP = (
    switch("overlap_moe_expert_parallel_comm", "hide the all-to-all behind another micro-batch"),
    switch("delay_wgrad_compute", "compute weight gradients later, to hide more", _EP_OVERLAP),
)
_DATA_PARALLEL = (
    switch("overlap_grad_reduce", "reduce gradients while the backward pass runs"),
    switch("use_distributed_optimizer", "split the optimizer state over the data-parallel ranks"),
)
# One H200, qwen3-30b-a3b-4l, 16,384 tokens a step: 1830 ms with the experts one by one, 569 ms grouped, 537 ms CUTLASS.
_GROUPED_GEMM = switch("moe_grouped_gemm", "one GEMM over all experts of a rank instead of one an expert")
_CUTLASS = Knob(
    "NVTE_USE_CUTLASS_GROUPED_GEMM", (None, "1"), None, _GROUPED,
    "one CUTLASS kernel for all experts; 212-249 ms against 268-402 ms a step on one H200, mbs 4",
)  # fmt: skip

LAPTOP = SearchSpace(
    "laptop",
    (
        *_dispatcher(("deepep", "hybridep", "ncclep")),
        *_recompute((1,)),
        Knob("micro_batch_size", (1, 2, 4, 8), 1, doc="sequences a rank computes at once", open_ended=True),
        *_layout((1, 2), (1, 2), (2,)),
        *_DATA_PARALLEL,
        *_precision(),
        *_graphs(("none", "transformer_engine", "local")),
        *_OVERLAP,
    ),
)
# Graphs by Transformer Engine only: "local" with attn alone failed inside the dispatcher on an H200, and Megatron
# Bridge refuses it for training (rule CGR-22). ncclep is left out: Megatron-Core 0.19.2 cannot start it (DSP-15).
MOE_CORE = SearchSpace(
    "moe-core",
    (
        *_dispatcher(("deepep", "hybridep")),
        _GROUPED_GEMM,
        *_recompute((1,)),
        Knob("micro_batch_size", (1, 2, 4, 8), 1, doc="sequences a rank computes at once", open_ended=True),
        *_layout((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), (2, 3, 4, 6)),
        *_DATA_PARALLEL,
        *_precision(),
        *_graphs(("none", "transformer_engine")),
        *_OVERLAP,
        _CUTLASS,
    ),
)
NAMED_SPACES = {space.name: space for space in (LAPTOP, MOE_CORE, MOE_FULL)}
# Environment variables that some space searches over: a worker must not have them unless its candidate says so.
ENVIRONMENT_KNOBS = frozenset(knob.name for space in NAMED_SPACES.values() for knob in space.knobs if knob.is_env)
