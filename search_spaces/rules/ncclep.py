"""Rules of ncclep, the flex backend inside Transformer Engine, new in megatron-core 0.19."""

from search_spaces.rules.hybridep import BACKEND, BACKEND_KNOBS, DISPATCHER, backend
from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import older

CAPACITY, FUSER, GROUPED = "moe_expert_rank_capacity_factor", "use_transformer_engine_op_fuser", "moe_grouped_gemm"
PATCHED = "+ncclep"  # ends the version of Megatron-Core's copy that benchmarks/ncclep_patch.py makes
STATIC, ZERO_COPY, CUTEDSL = "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "NVTE_CUTEDSL_FUSED_GROUPED_MLP"


def _no_ncclep_yet(case: Case) -> str | None:
    return "ncclep came with megatron-core 0.19" if backend(case) == "ncclep" else None


def _ncclep_without_flex(case: Case) -> str | None:
    wrong = case.text(BACKEND) == "ncclep" and case.text(DISPATCHER, "allgather") != "flex"
    return "the backend ncclep without the flex dispatcher" if wrong else None


def _ncclep_capacity(case: Case) -> str | None:
    wrong = backend(case) == "ncclep" and case.knobs.get(CAPACITY) is None
    return f"ncclep sizes its receive buffer by {CAPACITY}, which is not set" if wrong else None


def _static(case: Case) -> bool:
    return backend(case) == "ncclep" and case.on(STATIC)


def _static_experts(case: Case) -> str | None:
    wrong = _static(case) and not (case.on(FUSER) and case.on(GROUPED))
    return f"{STATIC} without {FUSER} and {GROUPED}" if wrong else None


def _static_quantized(case: Case) -> str | None:
    if not _static(case) or not (case.text("fp8") or case.text("fp4")):
        return None
    capability = case.compute_capability
    if capability is not None and capability[0] < 10:
        return f"{STATIC} with FP8 or FP4 on {case.cluster.gpu_arch}, which is before Blackwell"
    said = case.env.get(CUTEDSL, "")
    wrong = not said.isdecimal() or int(said) == 0
    return f"{STATIC} with FP8 or FP4 without {CUTEDSL}=1" if wrong else None


def _zero_copy(case: Case) -> str | None:
    wrong = backend(case) == "ncclep" and case.on(ZERO_COPY) and not case.on(STATIC)
    return f"{ZERO_COPY} without {STATIC}" if wrong else None


def _ncclep_versions(case: Case) -> str | None:
    if case.stack is None or backend(case) != "ncclep":
        return None
    engine, nccl = case.stack.transformer_engine, case.stack.nccl
    patched = case.stack.megatron_core.endswith(PATCHED)
    first, last, least = ("2.19", "2.21", "2.32.3") if patched else ("2.17", "2.19", "2.30.4")
    works = engine is not None and not older(engine, first) and older(engine, last)
    works = works and not (nccl is not None and older(nccl, least))
    return None if works else f"ncclep does not start with transformer-engine {engine} and NCCL {nccl}"


def _ncclep_sources(case: Case) -> str | None:
    """The kernels of NCCL EP are compiled at the first dispatch, by nvcc."""
    if case.stack is None or case.stack.transformer_engine is None or backend(case) != "ncclep":
        return None
    engine = case.stack.transformer_engine
    wrong = not older(engine, "2.17") and older(engine, "2.19")
    return f"the wheels of transformer-engine {engine} leave out the sources that ncclep compiles" if wrong else None


_CONFIG, _SENDER = "core/transformer/transformer_config.py", "core/transformer/moe/token_dispatcher.py"
RULES = (
    Rule(
        "DSP-02c", BACKEND_KNOBS, _no_ncclep_yet, "megatron-core 0.18.0 token_dispatcher.py:1442",
        "use deepep or hybridep", level="build", until="0.19",
    ),
    Rule(
        "DSP-05", frozenset({DISPATCHER, BACKEND}), _ncclep_without_flex, f"{_CONFIG}:1611",
        f"set {DISPATCHER} to flex or leave the backend out", since="0.19",
    ),
    Rule(
        "DSP-11", BACKEND_KNOBS | {CAPACITY}, _ncclep_capacity, f"{_SENDER}:1564",
        f"set {CAPACITY} or use another backend", level="build", since="0.19",
    ),
    Rule(
        "DSP-12", BACKEND_KNOBS | {STATIC, FUSER, GROUPED}, _static_experts, f"{_SENDER}:1540",
        f"switch both on or {STATIC} off", level="build", since="0.19",
    ),
    Rule(
        "DSP-13", BACKEND_KNOBS | {STATIC, "fp8", "fp4", CUTEDSL}, _static_quantized, f"{_SENDER}:1547",
        f"switch {STATIC} off, or export {CUTEDSL}=1 on Blackwell", level="build", since="0.19",
    ),
    Rule(
        "DSP-14", BACKEND_KNOBS | {STATIC, ZERO_COPY}, _zero_copy, f"{_SENDER}:1530", f"switch {STATIC} on",
        level="build", since="0.19",
    ),
    Rule(
        "DSP-15", BACKEND_KNOBS, _ncclep_versions, "core/transformer/moe/fused_a2a.py:650",
        "use another dispatcher, what docs/expert-parallel.md lists, or transformer-engine 2.17 or 2.18 (see DSP-15b) "
        "with NCCL 2.30.4 or newer",
        level="first step", since="0.19",
    ),
    Rule(
        "DSP-15b", BACKEND_KNOBS, _ncclep_sources, "read in the wheels of 2.17.1 and 2.18.0: libtransformer_engine.so "
        "names the folder of its own build, and NCCL_EP_HOME and NCCL_EP_JIT_SOURCE_DIR as its substitutes",
        "build it from source, or export NCCL_EP_HOME (NVIDIA/nccl, contrib/nccl_ep, of the commit it was built with)",
        level="runtime risk", since="0.19",
    ),
)  # fmt: skip
