"""What the device cannot do: knobs that need a GPU, and knobs that run on a CPU but would measure something else."""

from search_spaces.rules.rule import Case, Rule

GROUPED, CUTLASS = "moe_grouped_gemm", "NVTE_USE_CUTLASS_GROUPED_GEMM"
FUSER, CUTEDSL = "use_transformer_engine_op_fuser", "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
OFFLOADS = ("fine_grained_activation_offloading", "cpu_offloading", "optimizer_cpu_offload")
RANK_FACTOR = "moe_expert_rank_capacity_factor"
DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
_CPU = "measured with megatron-core 0.19.2 under gloo"


def _flex(case: Case) -> str | None:
    wrong = case.on_cpu and case.text("moe_token_dispatcher_type") == "flex"
    return "the flex dispatcher needs a GPU library (DeepEP, HybridEP or NCCL)" if wrong else None


def _quantized(case: Case) -> str | None:
    return "FP8 and FP4 need a GPU" if case.on_cpu and (case.text("fp8") or case.text("fp4")) else None


def _graphs(case: Case) -> str | None:
    wrong = case.on_cpu and case.text("cuda_graph_impl", "none") != "none"
    return "CUDA graphs need a GPU" if wrong else None


def _overlap(case: Case) -> str | None:
    wrong = case.on_cpu and case.on("overlap_moe_expert_parallel_comm")
    return "EP overlap has one stream on a CPU: it would run, and overlap nothing" if wrong else None


def _context(case: Case) -> str | None:
    wrong = case.on_cpu and case.layout.context > 1
    return "context parallelism needs Transformer Engine's attention, which needs a GPU" if wrong else None


def _activation(case: Case) -> str | None:
    wrong = case.on_cpu and "moe_act" in case.parts("recompute_modules")
    return "moe_act recompute is ignored by the CPU's experts (SequentialMLP)" if wrong else None


def _tensor_overlap(case: Case) -> str | None:
    return "tp_comm_overlap needs a GPU" if case.on_cpu and case.on("tp_comm_overlap") else None


def _offload(case: Case) -> str | None:
    wrong = case.on_cpu and any(case.on(name) for name in OFFLOADS)
    return "offload moves memory from a GPU to the host" if wrong else None


def _experts(case: Case) -> str | None:
    wrong = case.on_cpu and case.on(GROUPED)
    return "moe_grouped_gemm is ignored by the CPU's experts (SequentialMLP)" if wrong else None


def _split_latent_attention(case: Case) -> str | None:
    wrong = case.on_cpu and case.model.multi_latent_attention and case.layout.tensor > 1
    return "latent attention split over TP trains to another loss on a CPU (3.5e-5 off)" if wrong else None


def _cutlass_alone(case: Case) -> str | None:
    wrong = case.env.get(CUTLASS, "0") != "0" and not case.on(GROUPED)
    return f"{CUTLASS} without moe_grouped_gemm changes nothing" if wrong else None


def _grouped_gemm(case: Case) -> str | None:
    wrong = case.on_cpu and case.env.get(CUTLASS) is not None
    return f"{CUTLASS} picks a GPU kernel" if wrong else None


def _cutlass(case: Case) -> str | None:
    capability = case.compute_capability
    asked = case.env.get(CUTLASS, "0") != "0"
    wrong = asked and capability is not None and capability[0] != 9
    return f"the CUTLASS grouped GEMM runs on Hopper only; {case.cluster.gpu_arch} ignores it" if wrong else None


def _cutlass_precision(case: Case) -> str | None:
    asked = case.env.get(CUTLASS, "0") != "0"
    wrong = asked and (case.text("fp8") or case.text("fp4") or case.training.params_dtype == "fp32")
    return "the CUTLASS grouped GEMM computes in bf16 only and is ignored otherwise" if wrong else None


def _cutedsl(case: Case) -> str | None:
    """Where a rank's capacity is set Megatron itself asks for the op fuser, and for the variable with it."""
    capability = case.compute_capability
    asked = case.env.get(CUTEDSL, "0") != "0" and case.on(FUSER) and case.knobs.get(RANK_FACTOR) is None
    wrong = asked and capability is not None and capability[0] != 10
    return f"no fused grouped MLP but on sm_10x; {case.cluster.gpu_arch} runs the unfused" if wrong else None


def _old_gpu(case: Case) -> str | None:
    backend, capability = case.text(BACKEND, "deepep"), case.compute_capability
    asked = case.text(DISPATCHER) == "flex" and backend in ("deepep", "hybridep")
    wrong = asked and capability is not None and (8, 0) <= capability < (9, 0)
    return f"{backend} is written for sm_90 and newer, and untried on {case.cluster.gpu_arch}" if wrong else None


RULES = (
    Rule("CPU-01", frozenset({"moe_token_dispatcher_type"}), _flex, _CPU, "use alltoall or allgather"),
    Rule("CPU-02", frozenset({"fp8", "fp4"}), _quantized, _CPU, "leave them out"),
    Rule("CPU-03", frozenset({"cuda_graph_impl"}), _graphs, _CPU, "set cuda_graph_impl to none"),
    Rule("CPU-04", frozenset({"overlap_moe_expert_parallel_comm"}), _overlap, _CPU, "set it to false"),
    Rule("CPU-05", frozenset({"context_parallel_size"}), _context, _CPU, "set context_parallel_size to 1"),
    Rule("CPU-06", frozenset({"recompute_modules"}), _activation, _CPU, "recompute other modules"),
    Rule("CPU-07", frozenset({"tp_comm_overlap"}), _tensor_overlap, _CPU, "set it to false"),
    Rule("CPU-08", frozenset(OFFLOADS), _offload, _CPU, "set it to false"),
    Rule("CPU-09", frozenset({CUTLASS}), _grouped_gemm, _CPU, "leave it out"),
    Rule("CPU-10", frozenset({GROUPED}), _experts, f"core/models/backends.py; {_CPU}", "set it to false"),
    Rule(
        "CPU-11", frozenset({"tensor_model_parallel_size"}), _split_latent_attention, _CPU,
        "set tensor_model_parallel_size to 1",
    ),
    Rule(
        "DUP-15", frozenset({CUTLASS, GROUPED}), _cutlass_alone,
        "TE common/gemm/cublaslt_gemm.cu, nvte_multi_tensor_gemm: read there only; seen on an H200",
        "set moe_grouped_gemm to true or leave it out",
    ),
    Rule(
        "DUP-14", frozenset({CUTLASS}), _cutlass,
        "TE common/gemm/cublaslt_gemm.cu, nvte_multi_tensor_gemm", "leave it out on this GPU",
    ),
    Rule(
        "DUP-13", frozenset({CUTLASS, "fp8", "fp4"}), _cutlass_precision,
        "TE common/gemm/cublaslt_gemm.cu, nvte_multi_tensor_gemm", "leave it out or train in bf16",
    ),
    Rule(
        "HW-06", frozenset({CUTEDSL, FUSER, RANK_FACTOR}), _cutedsl,
        "TRAP-20; TE 2.20.2 pytorch/ops grouped_mlp.py:1080,2851", f"switch {FUSER} off on this GPU",
        since="0.18.0",
    ),
    Rule(
        "HW-08", frozenset({DISPATCHER, BACKEND}), _old_gpu,
        "DeepEP setup.py, Bridge training/flex_dispatcher_backend.py:72", "use alltoall on this GPU",
        level="runtime risk",
    ),
)  # fmt: skip
