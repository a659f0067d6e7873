"""`moe-full`: every knob of Megatron-Core 0.19 that a MoE tuner moves, each existing only where it means something.

Defaults are Megatron-Core's own, with the exceptions told in `named_spaces`. Sources of choices: the fields of
`TransformerConfig`, `DistributedDataParallelConfig` and `OptimizerConfig`, and what published recipes set.
"""

from search_spaces.candidate import KnobValue
from search_spaces.space import Condition, Knob, SearchSpace

RECOMPUTE_PARTS = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
GRAPH_PARTS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
OFFLOAD_PARTS = (
    "core_attn", "attn_proj", "expert_fc1", "fused_group_mlp", "moe_act", "attn_norm", "mlp_norm", "qkv_linear",
)  # fmt: skip


def on(knob: str, *values: KnobValue) -> tuple[Condition, ...]:
    """Where `knob` exists and is one of `values`."""
    return (Condition(knob, values),)


def unless(knob: str, *values: KnobValue) -> tuple[Condition, ...]:
    """Where `knob` exists and is none of `values`."""
    return (Condition(knob, values, negated=True),)


def switch(name: str, doc: str, when: tuple[Condition, ...] = (), default: bool = False) -> Knob:
    """A knob that is off or on."""
    return Knob(name, (False, True), default, when, doc)


FLEX = on("moe_token_dispatcher_type", "flex")
HYBRIDEP = on("moe_flex_dispatcher_backend", "hybridep")
NCCLEP = on("moe_flex_dispatcher_backend", "ncclep")
GROUPED = on("moe_grouped_gemm", True)
FUSER = on("use_transformer_engine_op_fuser", True)
FP8, FP4 = unless("fp8", None), unless("fp4", None)
STAGED = unless("pipeline_model_parallel_size", 1)
INTERLEAVED = unless("virtual_pipeline_model_parallel_size", None)
SPLIT = unless("tensor_model_parallel_size", 1)
EP_OVERLAP = on("overlap_moe_expert_parallel_comm", True)
BY_LAYER = on("cuda_graph_impl", "transformer_engine", "local")
SHARDED = on("use_distributed_optimizer", True)
OFFLOADED = on("fine_grained_activation_offloading", True)

_DISPATCH = (
    Knob("moe_token_dispatcher_type", ("allgather", "alltoall", "flex"), "allgather", doc="how tokens reach experts"),
    Knob(
        "moe_flex_dispatcher_backend", ("deepep", "hybridep", "ncclep"), "deepep", FLEX, "the library behind flex"
    ),
    Knob(
        "moe_flex_dispatcher_num_sms", (None, 16, 20, 24, 32), None,
        on("moe_flex_dispatcher_backend", "deepep", "hybridep"), "SMs the dispatcher takes", open_ended=True,
    ),
    Knob(
        "moe_hybridep_num_sms_preprocessing", (108, 32, 64), 108, HYBRIDEP, "SMs of HybridEP's scan", open_ended=True
    ),
    switch("moe_permute_fusion_into_hybridep", "HybridEP permutes while it dispatches", HYBRIDEP),
    Knob(
        "moe_expert_rank_capacity_factor", (None, 1.25, 1.5, 2.0), None,
        on("moe_flex_dispatcher_backend", "hybridep", "ncclep"), "receive buffer of a rank over its mean load",
    ),
    switch("moe_ncclep_static_shape", "ncclep with buffers of one size, so that it can be captured", NCCLEP),
    switch("moe_ncclep_zero_copy", "ncclep without a staging copy", on("moe_ncclep_static_shape", True)),
)  # fmt: skip
_LAYOUT = (
    Knob("micro_batch_size", (1, 2, 4, 8), 1, doc="sequences a rank computes at once", open_ended=True),
    Knob("tensor_model_parallel_size", (1, 2, 4, 8), 1, doc="ranks one attention layer is split over", open_ended=True),
    switch("sequence_parallel", "split the sequence too; MoE with TP needs it", SPLIT, default=True),
    switch("tp_comm_overlap", "tensor-parallel communication behind GEMMs", SPLIT),
    Knob("expert_tensor_parallel_size", (1, 2, 4, 8), 1, SPLIT, "ranks one expert is split over", open_ended=True),
    Knob("context_parallel_size", (1, 2, 4, 8), 1, doc="ranks one sequence is split over", open_ended=True),
    Knob(
        "cp_comm_type", ("p2p", "all_gather", "a2a"), "p2p", unless("context_parallel_size", 1),
        "how attention sees the other ranks' keys",
    ),
    Knob("pipeline_model_parallel_size", (1, 2, 4, 8, 16), 1, doc="stages the layers are split into", open_ended=True),
    Knob(
        "num_layers_in_first_pipeline_stage", (None,), None, STAGED, "layers of the first stage, where uneven",
        open_ended=True,
    ),
    Knob(
        "num_layers_in_last_pipeline_stage", (None,), None, STAGED, "layers of the last stage, where uneven",
        open_ended=True,
    ),
    switch("account_for_embedding_in_pipeline_split", "the embedding counts as a layer", STAGED),
    switch("account_for_loss_in_pipeline_split", "the loss counts as a layer", STAGED),
    Knob(
        "pipeline_model_parallel_layout", (None,), None, STAGED,
        "every stage spelt out, such as Et*3|(t*4|)*14tL", pattern=r"[Etml|*()\[\],0-9LM ]+",
    ),
    Knob(
        "virtual_pipeline_model_parallel_size", (None, 2, 3, 4, 6, 8, 12), None, STAGED,
        "chunks of layers a stage holds (interleaved schedule)", open_ended=True,
    ),
    Knob(
        "microbatch_group_size_per_vp_stage", (None,), None, INTERLEAVED,
        "micro-batches a chunk runs in a row; Megatron's own is PP", open_ended=True,
    ),
    switch("overlap_p2p_comm", "send activations while computing", INTERLEAVED, default=True),
    switch("overlap_p2p_comm_warmup_flush", "and in warm-up and flush", on("overlap_p2p_comm", True)),
    switch("defer_embedding_wgrad_compute", "the output layer's weight gradient at the end", STAGED),
    Knob("expert_model_parallel_size", (1, 2, 4, 8, 16, 32, 64), 1, doc="ranks sharing the experts", open_ended=True),
)  # fmt: skip
_OVERLAP = (
    switch("overlap_moe_expert_parallel_comm", "hide the all-to-all behind another micro-batch"),
    switch("delay_wgrad_compute", "compute weight gradients later, to hide more", EP_OVERLAP),
    switch("ep_overlap_early_attn_memory_release", "give attention's memory back earlier", EP_OVERLAP),
    switch("high_priority_a2a_comm_stream", "the all-to-all on a stream of high priority", EP_OVERLAP),
    switch("overlap_dispatch_backward_with_experts_wgrad", "hide the backward dispatch behind the experts' gradients"),
    switch("moe_shared_expert_overlap", "shared experts while tokens travel"),
)
_RECOMPUTE = (
    Knob("recompute_granularity", (None, "selective", "full"), None, doc="which activations are recomputed"),
    Knob(
        "recompute_modules",
        (
            "core_attn", "layernorm", "moe_act", "moe", "mlp", "shared_experts", "mla_up_proj", "layernorm+moe_act",
            "layernorm+moe", "mla_up_proj+mlp", "mla_up_proj+mlp+layernorm+moe_act", "core_attn+layernorm+moe",
        ),
        "core_attn", on("recompute_granularity", "selective"), "the parts recomputed", parts=RECOMPUTE_PARTS,
    ),
    Knob("recompute_method", ("uniform", "block"), "uniform", on("recompute_granularity", "full"), "all, or the first"),
    Knob(
        "recompute_num_layers", (1, 2, 4), 1, on("recompute_granularity", "full"), "layers a checkpoint",
        open_ended=True,
    ),
)  # fmt: skip
_PRECISION = (
    Knob("fp8", (None, "hybrid", "e4m3"), None, doc="FP8 GEMMs: e4m3 forward, e5m2 (hybrid) or e4m3 backward"),
    Knob("fp8_recipe", ("delayed", "tensorwise", "blockwise", "mxfp8"), "delayed", FP8, "how FP8 scales are found"),
    switch("fp8_param", "weights kept and gathered in FP8", FP8),
    switch("first_last_layers_bf16", "the first and last layers stay in bf16", FP8),
    switch("fp8_dot_product_attention", "attention in FP8 too", FP8),
    Knob("fp4", (None, "e2m1"), None, doc="FP4 GEMMs"),
    Knob("fp4_recipe", ("nvfp4",), "nvfp4", FP4, "how FP4 scales are found"),
    switch("fp4_param", "weights kept and gathered in FP4", FP4),
    switch("moe_router_padding_for_quantization", "pad each expert's tokens to what the GEMM wants"),
    Knob("moe_router_dtype", (None, "fp32", "fp64"), None, doc="precision of routing; fp32 is advised from 32 experts"),
    switch("grad_reduce_in_fp32", "reduce gradients in fp32", default=True),
)
_GRAPHS = (
    Knob("cuda_graph_impl", ("none", "transformer_engine", "local", "full_iteration"), "none", doc="who captures"),
    Knob(
        "cuda_graph_modules",
        ("attn", "attn+moe_router", "attn+moe_router+moe_preprocess", "moe_router+moe_preprocess", "attn+moe"),
        "attn", BY_LAYER, "what is captured", parts=GRAPH_PARTS,
    ),
)  # fmt: skip
_OFFLOAD = (
    switch("fine_grained_activation_offloading", "activations of some modules wait in host memory"),
    Knob(
        "offload_modules", ("core_attn", "core_attn+attn_proj", "moe_act", "expert_fc1", "expert_fc1+moe_act"),
        "core_attn", OFFLOADED, "whose activations", parts=OFFLOAD_PARTS,
    ),
    Knob("activation_offload_fraction", (1.0, 0.5), 1.0, OFFLOADED, "the share that is moved"),
    switch("optimizer_cpu_offload", "the optimizer's state and step on the host"),
    Knob("optimizer_offload_fraction", (1.0, 0.5), 1.0, on("optimizer_cpu_offload", True), "the share that is moved"),
)  # fmt: skip
_FUSIONS = (
    switch("moe_grouped_gemm", "one GEMM over all experts of a rank instead of one an expert"),
    switch("use_transformer_engine_op_fuser", "Transformer Engine's fused grouped MLP", GROUPED),
    switch("moe_single_grouped_weight", "all experts' weights in one tensor", FUSER),
    switch("moe_permute_fusion", "one kernel to permute tokens"),
    switch("moe_router_fusion", "one kernel for top-k and scores"),
    switch("bias_activation_fusion", "one kernel for SwiGLU"),
    switch("apply_rope_fusion", "one kernel for rotary embedding"),
    switch("gradient_accumulation_fusion", "weight gradients added up inside the GEMM"),
    switch("cross_entropy_loss_fusion", "one kernel for the loss"),
    Knob(
        "cross_entropy_fusion_impl", ("native", "te"), "native", on("cross_entropy_loss_fusion", True), "whose kernel"
    ),
    switch("mla_down_proj_fusion", "latent attention's down projections in one GEMM"),
)  # fmt: skip
_CAPACITY = (
    Knob("moe_expert_capacity_factor", (None, 1.0, 1.25), None, doc="drop tokens beyond it; None drops none"),
    switch("moe_pad_expert_input_to_capacity", "one size for every expert", unless("moe_expert_capacity_factor", None)),
    switch(
        "moe_paged_stash", "activations in pages, so that a captured step can vary",
        unless("moe_expert_rank_capacity_factor", None),
    ),
    Knob("moe_paged_stash_page_size", (64, 128), 64, on("moe_paged_stash", True), "tokens a page", open_ended=True),
    Knob(
        "moe_paged_stash_buffer_size_factor_cuda", (1.1, 1.25, 1.5), 1.1, on("moe_paged_stash", True),
        "the stash over the mean load",
    ),
)  # fmt: skip
_DATA_PARALLEL = (
    switch("use_distributed_optimizer", "split the optimizer state over the data-parallel ranks"),
    switch("overlap_grad_reduce", "reduce gradients while the backward pass runs"),
    switch("overlap_param_gather", "gather weights while the forward pass runs", SHARDED),
    Knob(
        "bucket_size", (None, 40_000_000, 134_217_728), None, on("overlap_grad_reduce", True),
        "gradients reduced at once, in elements", open_ended=True,
    ),
    switch("use_precision_aware_optimizer", "optimizer state in the precision it needs", SHARDED),
)  # fmt: skip
_HOST = (
    switch("manual_gc", "collect Python's garbage between steps only"),
    Knob("manual_gc_interval", (1, 10, 100), 100, on("manual_gc", True), "steps between collections", open_ended=True),
    Knob("cpu_affinity", (None, "exclusive"), None, doc="exclusive: each rank keeps to cores of its own"),
    Knob("CUDA_DEVICE_MAX_CONNECTIONS", (None, "1", "8", "32"), None, doc="hardware queues of the GPU"),
    Knob("PYTORCH_CUDA_ALLOC_CONF", (None, "expandable_segments:True"), None, doc="how the allocator grows"),
    Knob(
        "NCCL_GRAPH_REGISTER", (None, "0"), None, unless("cuda_graph_impl", "none"), "0: no user buffers in graphs"
    ),
    Knob("NVTE_USE_CUTLASS_GROUPED_GEMM", (None, "1"), None, GROUPED, "one CUTLASS kernel for all experts (Hopper)"),
    Knob("NVTE_CUTEDSL_FUSED_GROUPED_MLP", (None, "1"), None, FUSER, "one kernel for both GEMMs (Blackwell)"),
    Knob("NVTE_CPU_OFFLOAD_V1", (None, "1"), None, OFFLOADED, "1: keeps weights from being offloaded too"),
)  # fmt: skip
MOE_FULL = SearchSpace(
    "moe-full",
    (
        *_DISPATCH, *_FUSIONS, *_CAPACITY, *_LAYOUT, *_OVERLAP, *_RECOMPUTE, *_PRECISION, *_GRAPHS, *_OFFLOAD,
        *_DATA_PARALLEL, *_HOST,
    ),
)  # fmt: skip
