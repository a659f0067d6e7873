"""Rules of the token dispatcher and of the library behind `flex`."""

from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import older

DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
CAPACITY = "moe_expert_rank_capacity_factor"
TP, EP, ETP = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
GROUP = frozenset({DISPATCHER, BACKEND, TP, EP, ETP})
BACKENDS = ("deepep", "hybridep", "ncclep")
# Group sizes DeepEP v1 has tuned configurations for (deep_ep/buffers/legacy.py:259).
DEEPEP_GROUPS = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})


def _backend(case: Case) -> str:
    """The backend in use; "" where the dispatcher is not flex."""
    return case.text(BACKEND, "deepep") if case.text(DISPATCHER) == "flex" else ""


def _group(case: Case) -> int:
    return case.layout.expert_tensor * case.layout.expert


def _unknown_type(case: Case) -> str | None:
    kind = case.text(DISPATCHER, "allgather")
    return f"no token dispatcher {kind!r}" if kind not in ("allgather", "alltoall", "flex") else None


def _unknown_backend(case: Case) -> str | None:
    wrong = case.text(DISPATCHER) == "flex" and _backend(case) not in BACKENDS
    return f"no flex backend {_backend(case)!r}" if wrong else None


def _inert_backend(case: Case) -> str | None:
    backend = case.text(BACKEND)
    wrong = backend and case.text(DISPATCHER, "allgather") != "flex"
    return f"backend {backend} without the flex dispatcher" if wrong else None


def _nowhere_to_send(case: Case) -> str | None:
    backend = _backend(case)
    return f"{backend} needs ETP x EP above 1" if backend and _group(case) == 1 else None


def _package(case: Case) -> str | None:
    if case.stack is None or not (backend := _backend(case)):
        return None
    packages = {"deepep": case.stack.deep_ep, "hybridep": case.stack.hybrid_ep}
    missing = packages.get(backend, case.stack.transformer_engine) is None
    name = {"deepep": "deep_ep", "hybridep": "hybrid_ep"}.get(backend, "transformer_engine")
    return f"{backend} needs the package {name}, which the workers lack" if missing else None


def _ncclep_capacity(case: Case) -> str | None:
    wrong = _backend(case) == "ncclep" and case.knobs.get(CAPACITY) is None
    return f"ncclep sizes its receive buffer by {CAPACITY}, which is not set" if wrong else None


def _ncclep_versions(case: Case) -> str | None:
    if case.stack is None or _backend(case) != "ncclep":
        return None
    engine, nccl = case.stack.transformer_engine, case.stack.nccl
    works = engine is not None and not older(engine, "2.17") and older(engine, "2.19")
    works = works and not (nccl is not None and older(nccl, "2.30.4"))
    return None if works else f"ncclep does not start with transformer-engine {engine} and NCCL {nccl}"


def _deepep_group(case: Case) -> str | None:
    wrong = _backend(case) == "deepep" and _group(case) > 1 and _group(case) not in DEEPEP_GROUPS
    return f"DeepEP has no configuration for {_group(case)} expert ranks" if wrong else None


def _hybridep_hidden(case: Case) -> str | None:
    multiple = 512 if case.text("fp8") else 16
    wrong = _backend(case) == "hybridep" and case.model.hidden_size % multiple
    return f"HybridEP needs a hidden size divisible by {multiple}, not {case.model.hidden_size}" if wrong else None


def _gpu(case: Case) -> str | None:
    backend, capability = _backend(case), case.compute_capability
    if not backend or capability is None:
        return None
    name = case.cluster.gpu_arch or ""
    grace_only = "GB200" in name or "GB300" in name
    majors = {"deepep": (8, 9) if grace_only else (8, 9, 10), "hybridep": (8, 9, 10), "ncclep": (9, 10)}
    wrong = capability[0] not in majors.get(backend, ())
    return f"{backend} does not support {name}" if wrong else None


RULES = (
    Rule(
        "DSP-01", frozenset({DISPATCHER}), _unknown_type, "core/transformer/moe/moe_layer.py:321",
        "use allgather, alltoall or flex",
    ),
    Rule(
        "DSP-02", frozenset({DISPATCHER, BACKEND}), _unknown_backend, "core/transformer/moe/token_dispatcher.py:1798",
        "use deepep, hybridep or ncclep",
    ),
    Rule(
        "DSP-05", frozenset({DISPATCHER, BACKEND}), _inert_backend,
        "core/transformer/transformer_config.py:1611 (ncclep refused), TRAP-03 (the others accepted and inert)",
        "set moe_token_dispatcher_type to flex or leave the backend out",
    ),
    Rule(
        "DSP-07", GROUP, _nowhere_to_send,
        "core/transformer/moe/token_dispatcher.py:1770,1788; hybridep has no check and sends nothing",
        "raise EP or use alltoall",
    ),
    Rule(
        "DSP-08", frozenset({DISPATCHER, BACKEND}), _package, "core/transformer/moe/token_dispatcher.py:1048,1274,1559",
        "install it on the workers or use alltoall",
    ),
    Rule(
        "DSP-11", frozenset({DISPATCHER, BACKEND, CAPACITY}), _ncclep_capacity,
        "core/transformer/moe/token_dispatcher.py:1564", f"set {CAPACITY} or use another backend",
    ),
    Rule(
        "DSP-15", frozenset({DISPATCHER, BACKEND}), _ncclep_versions, "core/transformer/moe/fused_a2a.py:650",
        "use transformer-engine 2.17 or 2.18 with NCCL 2.30.4 or newer",
    ),
    Rule("DSP-17", GROUP, _deepep_group, "DeepEP v1 deep_ep/buffers/legacy.py:259", "choose another EP x ETP"),
    Rule(
        "DSP-18", frozenset({DISPATCHER, BACKEND, "fp8"}), _hybridep_hidden, "DeepEP hybrid-ep csrc/config.cuh",
        "use another backend",
    ),
    Rule(
        "DSP-20", frozenset({DISPATCHER, BACKEND}), _gpu, "Bridge 0.6.2 training/flex_dispatcher_backend.py:106",
        "use another backend or alltoall",
    ),
)  # fmt: skip
