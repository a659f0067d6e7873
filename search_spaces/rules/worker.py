"""What the stack can do and this project's worker does not do yet. A rule goes when `train_worker` has learnt it.

Kept apart from the rules of the stack, so that a configuration can also be judged for another launcher. The worker asks
them again before it builds anything (`train_worker.megatron.trial`): a job need not come from a screened space.
"""

from search_spaces.rules.capacity import FUSER
from search_spaces.rules.fusions import ACCUMULATE, CUTEDSL, KERNEL, gated_fuser
from search_spaces.rules.graph_clashes import GRAPHS, LAYERED, captured, implementation
from search_spaces.rules.hybridep import GROUP, backend, group
from search_spaces.rules.late_gradients import DELAY_WGRAD, late_and_captured
from search_spaces.rules.rule import Case, Rule

IMPL, TP_OVERLAP, ALONE = "cuda_graph_impl", "tp_comm_overlap", "moe_single_grouped_weight"
RANK_FACTOR, STASH = "moe_expert_rank_capacity_factor", "moe_paged_stash"
AFFINITY = "cpu_affinity"
CUTLASS, GROUPED = "NVTE_USE_CUTLASS_GROUPED_GEMM", "moe_grouped_gemm"
LOSS, LOSS_IMPL = "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"
DOWN, DISPATCH_BACKWARD = "mla_down_proj_fusion", "overlap_dispatch_backward_with_experts_wgrad"
ROPE, SHARED_OVERLAP, DISPATCHER = "apply_rope_fusion", "moe_shared_expert_overlap", "moe_token_dispatcher_type"
CAPACITY, PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
OPTIMIZER_GRAPH = "optimizer_cuda_graph"
OFFLOAD, SHARDED = "optimizer_cpu_offload", "use_distributed_optimizer"
TP, ETP = "tensor_model_parallel_size", "expert_tensor_parallel_size"
EP = "expert_model_parallel_size"
UNMEASURED = {"transformer_engine": 2, "full_iteration": 3}  # the fewest warm-up steps
GPU_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF")


def _graphs(case: Case) -> str | None:
    """A capture follows at least one eager step, and one warm-up step is left that only replays: the step after the
    capture of layers, which is between two steps; of whole iterations the step after the one that captured."""
    impl = case.text(IMPL, "none")
    if impl == "none":
        return None
    if case.on_cpu:
        return "CUDA graphs need a GPU"
    if impl not in UNMEASURED:
        return "local CUDA graphs hold whole layers of a GPT model, whatever the modules: this worker makes none"
    least = UNMEASURED[impl]
    wrong = case.training.warmup_steps < least
    return f"{impl} CUDA graphs with fewer than {least} warm-up steps leave none to replay in" if wrong else None


def _waits_in_iteration(case: Case) -> str | None:
    """Dropless alltoall waits for the token counts (token_dispatcher.py:950), allgather always (`.cpu()`, :317)."""
    sent, padded = case.text(DISPATCHER, "allgather"), case.number(CAPACITY, -1.0) >= 0 and case.on(PADDED)
    if case.text(IMPL, "none") != "full_iteration" or (sent == "alltoall" and padded):
        return None
    return f"{sent} {'' if padded else 'without a padded capacity '}makes the host wait inside the captured iteration"


def _captured_optimizer(case: Case) -> str | None:
    return "this worker does not capture the optimizer's step" if case.on(OPTIMIZER_GRAPH) else None


def _replaced_parameters(case: Case) -> str | None:
    wrong = case.on(OFFLOAD) and not case.on(SHARDED)
    return f"{OFFLOAD} loses its parameters to the bf16 optimizer without {SHARDED}" if wrong else None


def _captured_pointers(case: Case) -> str | None:
    """The CUTLASS kernel reads an array of pointers that each call fills on the host: a replay finds a later call's."""
    impl = implementation(case)
    experts = impl == "full_iteration" or (impl in LAYERED and (not captured(case) or "moe" in captured(case)))
    wrong = experts and case.on(GROUPED) and case.env.get(CUTLASS, "0") != "0"
    return f"{CUTLASS} inside a CUDA graph: replays compute with the pointers of another call" if wrong else None


def _late_in_graph(case: Case) -> str | None:
    """Megatron-LM refuses it only where gradients are reduced as they come (OVL-16)."""
    wrong = implementation(case) in LAYERED and late_and_captured(case) and not case.on(ACCUMULATE)
    return f"{DELAY_WGRAD} with captured weights but without {ACCUMULATE} trains to other losses" if wrong else None


def _fused_experts(case: Case) -> str | None:
    """Megatron-Core asks for the variable, which RUN-07 keeps out of trials."""
    wrong = gated_fuser(case) and CUTEDSL not in case.env
    return f"{FUSER} for gated experts needs {CUTEDSL}, which this worker cannot set for a trial" if wrong else None


def _user_buffers(case: Case) -> str | None:
    return "this worker does not set up Transformer Engine's user buffers yet" if case.on(TP_OVERLAP) else None


def _no_second_try(case: Case) -> str | None:
    """Megatron-LM runs a step again, dropless, where a rank got more tokens than its buffer holds.

    The buffer is the factor times tokens x topk of one rank (token_dispatcher.py:1096; :1606 times ETP), and a rank can
    be sent those of the whole group at most. Not counted: FP8 rounds up the rows of each expert.
    """
    if case.on(STASH):
        return f"{STASH}: this worker does not repeat steps whose tokens overflow"
    factor = case.number(RANK_FACTOR, 0.0)  # 0: no buffer of one size, as without
    enough = case.layout.expert if backend(case) == "ncclep" else group(case)
    wrong = 0 < factor < enough
    return f"{RANK_FACTOR} {factor:g} of {enough} can overflow, and this worker repeats no step" if wrong else None


def _experts_in_one_tensor(case: Case) -> str | None:
    wrong = case.on(ALONE) and case.training.layout_independent_init
    return (
        "this worker draws expert weights one by one: each EP rank would start with the same experts" if wrong else None
    )


def _read_before_the_fork(case: Case) -> str | None:
    wrong = case.env.get(CUTEDSL, "0") != "0"
    return (
        f"Transformer Engine reads {CUTEDSL} when it is imported, before a trial's process is forked" if wrong else None
    )


def _cores_of_another_trial(case: Case) -> str | None:
    several = case.cluster.workers_per_trial < min(case.cluster.workers_per_node, case.cluster.workers)
    wrong = case.text(AFFINITY) == "exclusive" and several
    return "several trials run on a node at once, and a rank knows only the ranks of its own" if wrong else None


def _alone_anyway(case: Case) -> str | None:
    wrong = case.text(AFFINITY) == "exclusive" and min(case.cluster.workers_per_node, case.world) == 1
    return "the only rank of a node has all its cores anyway" if wrong else None


def _kernels_of_a_gpu(case: Case) -> str | None:
    asked = [name for name in (ACCUMULATE, DOWN, DISPATCH_BACKWARD) if case.on(name)]
    if case.on(LOSS) and case.text(LOSS_IMPL, "native") == "te":
        asked.append(f"{LOSS_IMPL} te")
    return f"{asked[0]} is of layers and kernels that a CPU worker has not" if case.on_cpu and asked else None


def _variables_of_a_gpu(case: Case) -> str | None:
    asked = [name for name in GPU_VARIABLES if name in case.env]
    return f"{asked[0]} changes nothing on a CPU" if case.on_cpu and asked else None


def _no_latent_queries(case: Case) -> str | None:
    if not case.on(DOWN):
        return None
    wrong = not case.model.multi_latent_attention or case.model.q_lora_rank is None
    return f"{DOWN} without latent attention that compresses its queries has nothing to fuse" if wrong else None


def _split_projections(case: Case) -> str | None:
    """A tensor-parallel rank computes its share of each of the two."""
    model, ranks = case.model, case.layout.tensor
    if not case.on(DOWN) or ranks == 1 or not model.multi_latent_attention:
        return None
    queries, keys, positions = model.q_lora_rank, model.kv_lora_rank, model.qk_pos_emb_head_dim
    if queries is None or keys is None or positions is None:  # RUN-12, and a shape that its own check refuses
        return None
    uneven = [width for width in (queries, keys + positions) if width % ranks]
    return f"{DOWN}: a width of {uneven[0]} does not split over TP {ranks}" if uneven else None


def _rotary(case: Case) -> str | None:
    wrong = case.on(ROPE) and case.model.multi_latent_attention and case.text("rope_type", "rope") != "yarn"
    return f"this worker gives latent attention plain rotary positions; {ROPE} is for YaRN there" if wrong else None


def _no_shared_experts(case: Case) -> str | None:
    wrong = case.on(SHARED_OVERLAP) and case.model.moe_shared_expert_intermediate_size is None
    return f"{SHARED_OVERLAP} in a model without shared experts changes nothing" if wrong else None


def _unequal_gather(case: Case) -> str | None:
    """Ranks that share an expert exchange what each was sent, which is equal where all tokens stay and none is lost."""
    if not case.on_cpu or case.layout.expert_tensor == 1 or case.text(DISPATCHER, "allgather") != "alltoall":
        return None
    drops = case.knobs.get(CAPACITY) is not None and not case.on(PADDED)
    wrong = case.layout.expert > 1 or drops
    return "alltoall with split experts gathers unequal numbers of tokens, which gloo cannot" if wrong else None


RULES = (
    Rule(
        "RUN-02", frozenset({IMPL}), _graphs,
        "train_worker/megatron/graphs.py; core/transformer/transformer_layer.py:541",
        f"set {IMPL} to transformer_engine, full_iteration or none, and training.warmup_steps to 3 or more",
    ),
    Rule(
        "RUN-04", frozenset({TP_OVERLAP}), _user_buffers, "MLM training/initialize.py:187, initialize_ub",
        f"set {TP_OVERLAP} to false",
    ),
    Rule(
        "RUN-05", GROUP | {RANK_FACTOR, STASH}, _no_second_try, "TRAP-11; MLM training/training.py:3626",
        f"leave {STASH} out, and {RANK_FACTOR} too or set it to the number of ranks that share the experts",
    ),
    Rule(
        "RUN-06", frozenset({ALONE}), _experts_in_one_tensor, "train_worker/megatron/init.py",
        f"set {ALONE} to false, or training.layout_independent_init",
    ),
    Rule(
        "RUN-07", frozenset({CUTEDSL}), _read_before_the_fork,
        "TE pytorch/ops/fused/forward_grouped_mlp.py, its last lines: the fusion is registered at import",
        "leave it out",
    ),
    Rule(
        "RUN-08", frozenset({AFFINITY}), _cores_of_another_trial, "train_worker/host.py",
        f"leave {AFFINITY} out, or give a trial all workers of a node",
    ),
    Rule("RUN-09", frozenset({AFFINITY}), _alone_anyway, "train_worker/host.py", f"leave {AFFINITY} out"),
    Rule(
        "RUN-10", frozenset({ACCUMULATE, DOWN, DISPATCH_BACKWARD, LOSS, LOSS_IMPL}), _kernels_of_a_gpu,
        "train_worker/cpu.py: Megatron's local layers", "leave it out on a CPU",
    ),
    Rule("RUN-11", frozenset(GPU_VARIABLES), _variables_of_a_gpu, "train_worker/cpu.py", "leave it out on a CPU"),
    Rule(
        "RUN-12", frozenset({DOWN}), _no_latent_queries, "core/transformer/multi_latent_attention.py:1259",
        f"set {DOWN} to false", level="build",
    ),
    Rule(
        "RUN-12b", frozenset({DOWN, TP}), _split_projections, "core/transformer/multi_latent_attention.py:1352",
        f"lower TP or set {DOWN} to false", "first step",
    ),
    Rule(
        "RUN-13", frozenset({ROPE, "rope_type"}), _rotary, "train_worker/megatron/config.py", f"set {ROPE} to false"
    ),
    Rule(
        "RUN-14", frozenset({SHARED_OVERLAP}), _no_shared_experts,
        "read back from the real MoELayer (core/transformer/moe/moe_layer.py:189)", "leave it out",
    ),
    Rule(
        "RUN-15", frozenset({TP, ETP, EP, DISPATCHER, CAPACITY, PADDED}), _unequal_gather,
        "train_worker/cpu.py: ProcessGroupGloo::allgather, invalid tensor size", "use allgather, or pad to capacity",
    ),
    Rule(
        "RUN-16", frozenset({IMPL, DISPATCHER, CAPACITY, PADDED}), _waits_in_iteration,
        "read in core/transformer/moe/token_dispatcher.py:317, 950",
        f"use alltoall with {CAPACITY} and {PADDED}", "first step",
    ),
    Rule(
        "RUN-17", frozenset({OFFLOAD, SHARDED}), _replaced_parameters,
        "read in core/optimizer/optimizer.py:1018 and cpu_offloading/hybrid_optimizer.py:199 and :339",
        f"set {SHARDED} to true", "first step",
    ),
    Rule(
        "RUN-18", frozenset({OPTIMIZER_GRAPH}), _captured_optimizer, "MLM training/training.py:3633",
        f"leave {OPTIMIZER_GRAPH} out",
    ),
    Rule(
        "RUN-19", GRAPHS | {GROUPED, CUTLASS}, _captured_pointers,
        "seen on one H200 (transformer-engine 2.20.2): the same losses until the first replay, then NaN with whole "
        "iterations and with attn+moe, and losses 8 to 12% off with moe alone",
        f"leave {CUTLASS} out, or capture no experts", "first step",
    ),
    Rule(
        "RUN-20", GRAPHS | {DELAY_WGRAD, SHARED_OVERLAP, ACCUMULATE}, _late_in_graph,
        "seen with two ranks on one H200 (transformer-engine 2.20.2): the losses are 2.4 to 4.7% off from the first "
        "replay on; Bridge asks for the same", f"set {ACCUMULATE} to true, or capture other modules",
        "first step",
    ),
    Rule(
        "RUN-21", KERNEL, _fused_experts, "core/transformer/moe/experts.py:395; seen on one H200",
        f"set {FUSER} to false", "build",
    ),
)  # fmt: skip
