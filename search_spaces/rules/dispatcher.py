"""Rules of the token dispatcher and of the library behind `flex`; see also `hybridep` and `ncclep`."""

from search_spaces.bridge_paths import APPLY
from search_spaces.rules import hybridep, ncclep
from search_spaces.rules.hybridep import BACKEND, BACKEND_KNOBS, DEEPEP, DISPATCHER, EP, ETP, TP, backend, group
from search_spaces.rules.rule import Case, Launcher, Rule

CAPACITY, PADDED = "moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity"
FUSER = "use_transformer_engine_op_fuser"
SHARED, SHARED_OVERLAP = "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"
SMS = ("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms")
TOKEN_DROP = "apply_moe_token_drop"  # a function of Bridge
PACKAGES = ("deep_ep", "hybrid_ep", "nccl_ep")  # in an explicit case: "not importable"
GROUP = BACKEND_KNOBS | {TP, EP, ETP}
BACKENDS = ("deepep", "hybridep", "ncclep")
# Group sizes DeepEP v1 has tuned configurations for (deep_ep/buffers/legacy.py:259).
DEEPEP_GROUPS = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})
MLM: frozenset[Launcher] = frozenset({"megatron-lm"})


def _unknown_type(case: Case) -> str | None:
    kind = case.text(DISPATCHER, "allgather")
    wrong = kind not in ("allgather", "alltoall", "flex") and not case.dense
    return f"no token dispatcher {kind!r}" if wrong else None


def _unknown_backend(case: Case) -> str | None:
    wrong = backend(case) not in ("", *BACKENDS) and not case.dense
    return f"no flex backend {backend(case)!r}" if wrong else None


def _first_flex(case: Case) -> str | None:
    wrong = case.text(DISPATCHER) == "flex" and not case.on(DEEPEP)
    return f"flex without {DEEPEP}: release 0.15 has DeepEP only" if wrong else None


def _deepep_flag(case: Case) -> str | None:
    if not case.on(DEEPEP):
        return None
    if case.text(DISPATCHER, "allgather") != "flex":
        return f"{DEEPEP} without the flex dispatcher"
    other = case.text(BACKEND, "deepep")  # hybridep is refused, ncclep overwritten
    return f"{DEEPEP} with the backend {other}" if other in ("hybridep", "ncclep") else None


def _padded_deepep(case: Case) -> str | None:
    return f"DeepEP with {PADDED}" if backend(case) == "deepep" and case.on(PADDED) else None


def _two_sm_counts(case: Case) -> str | None:
    unified, *old = (case.knobs.get(name) for name in SMS)
    wrong = unified is None and None not in old and old[0] != old[1]
    return f"{SMS[1]} {old[0]} and {SMS[2]} {old[1]} contradict each other" if wrong else None


def _nowhere_to_send(case: Case) -> str | None:
    used = backend(case)
    return f"{used} needs ETP x EP above 1" if used and group(case) == 1 and not case.dense else None


def _missing(case: Case, package: str) -> bool:
    """An explicit case says "not importable" of a package that is not there, or whose names are not."""
    said = case.knobs.get(package)
    return said is False or str(said).lower().startswith(("not", "missing"))


def _package(case: Case) -> str | None:
    name = {"deepep": "deep_ep", "hybridep": "hybrid_ep", "ncclep": "nccl_ep"}.get(backend(case))
    if name is None or case.dense:
        return None
    if _missing(case, name):
        return f"{backend(case)} needs the package {name}, which cannot be imported"
    if case.stack is None:
        return None
    packages = {"deep_ep": case.stack.deep_ep, "hybrid_ep": case.stack.hybrid_ep}
    missing = packages.get(name, case.stack.transformer_engine) is None
    shown = name if name in packages else "transformer_engine"
    return f"{backend(case)} needs the package {shown}, which the workers lack" if missing else None


def _rank_capacity(case: Case) -> str | None:
    if case.knobs.get(CAPACITY) is None:
        return None
    said = "deepep" if case.on(DEEPEP) else case.text(BACKEND, "deepep")  # the word, whatever the dispatcher
    if said not in ("hybridep", "ncclep"):
        return f"{CAPACITY} with the backend {said}"
    return f"{CAPACITY} with hybridep but without {FUSER}" if said == "hybridep" and not case.on(FUSER) else None


def _first_rank_capacity(case: Case) -> str | None:
    fit = case.text(BACKEND) == "hybridep" and case.on(FUSER)
    return f"{CAPACITY} without hybridep and {FUSER}" if case.knobs.get(CAPACITY) is not None and not fit else None


def _variable_lengths(case: Case) -> str | None:
    wrong = case.text(DISPATCHER, "allgather") == "allgather" and case.on("variable_seq_lengths")
    return "variable_seq_lengths with the allgather dispatcher" if wrong else None


def _deepep_group(case: Case) -> str | None:
    wrong = backend(case) == "deepep" and group(case) > 1 and group(case) not in DEEPEP_GROUPS and not case.dense
    return f"DeepEP has no configuration for {group(case)} expert ranks" if wrong else None


def _gpu_lacks(case: Case, used: str) -> bool:
    """Whether Megatron Bridge keeps a backend from this GPU. DeepEP on Blackwell: B200 and B300, not GB200 or GB300."""
    if (capability := case.compute_capability) is None or used not in BACKENDS:
        return False
    name = (case.cluster.gpu_arch or "").removeprefix("NVIDIA ")
    if used == "deepep" and name.startswith(("B200", "B300")):
        return False
    majors = {"deepep": (8, 9), "hybridep": (8, 9, 10), "ncclep": (9, 10)}
    return capability[0] not in majors[used]


def _gpu(case: Case) -> str | None:
    if case.text(APPLY) and "megatron-bridge" in case.launchers:
        return None  # it has turned to alltoall before anything is validated: DSP-19
    wrong = _gpu_lacks(case, backend(case))
    return f"{backend(case)} does not support {case.cluster.gpu_arch}" if wrong else None


def _fake_group(case: Case) -> str | None:
    wrong = case.on("fake_process_group") and case.text(DISPATCHER) == "flex"
    return "the flex dispatcher with a fake process group" if wrong else None


def _shared_overlap(case: Case) -> str | None:
    if not case.on(SHARED_OVERLAP) or case.model.moe_shared_expert_intermediate_size is None:
        return None
    kind = case.text(DISPATCHER, "allgather")
    return f"{SHARED_OVERLAP} with the {kind} dispatcher" if kind not in ("alltoall", "flex") else None


def _shared_overlap_flex(case: Case) -> str | None:
    shared = case.model.moe_shared_expert_intermediate_size is not None
    wrong = shared and case.on(SHARED_OVERLAP) and case.text(DISPATCHER) == "flex"
    return f"{SHARED_OVERLAP} with the flex dispatcher before megatron-core 0.18" if wrong else None


def _latent_overlap(case: Case) -> str | None:
    shared = case.model.moe_shared_expert_intermediate_size is not None
    wrong = shared and case.on(SHARED_OVERLAP) and case.integer("moe_latent_size", 0) > 0
    return f"{SHARED_OVERLAP} with moe_latent_size" if wrong else None


def _no_shared_width(case: Case) -> str | None:
    width = case.knobs.get(SHARED)
    return f"{SHARED} {width} must be above 0" if width is not None and int(width) <= 0 else None


def _biased_shared(case: Case) -> str | None:
    shared = case.model.moe_shared_expert_intermediate_size is not None and not case.dense
    return "biases in shared experts" if shared and case.on("add_bias_linear") else None


def _token_drop(case: Case) -> str | None:
    kind = case.text(DISPATCHER, "allgather")
    wrong = case.knobs.get(TOKEN_DROP) and kind not in ("alltoall", "alltoall_seq") and not case.dense
    return f"{TOKEN_DROP} with the {kind} dispatcher" if wrong else None


_CONFIG, _SENDER = "core/transformer/transformer_config.py", "core/transformer/moe/token_dispatcher.py"
RULES = (
    Rule(
        "DSP-01", frozenset({DISPATCHER}), _unknown_type, "core/transformer/moe/moe_layer.py:321",
        "use allgather, alltoall or flex", level="build",
    ),
    Rule(
        "DSP-02", BACKEND_KNOBS, _unknown_backend, f"{_SENDER}:1798", "use deepep, hybridep or ncclep", level="build",
    ),
    Rule(
        "DSP-02b", frozenset({DISPATCHER, DEEPEP}), _first_flex, "megatron-core 0.15.0 token_dispatcher.py:1165",
        f"set {DEEPEP}, or use alltoall", level="build", until="0.16",
    ),
    Rule("DSP-03", BACKEND_KNOBS, _deepep_flag, f"{_CONFIG}:1589", f"leave {DEEPEP} out and name the backend"),
    Rule("DSP-04", BACKEND_KNOBS | {PADDED}, _padded_deepep, f"{_CONFIG}:1604", "use another dispatcher or do not pad"),
    Rule("DSP-06", frozenset(SMS), _two_sm_counts, f"{_CONFIG}:1631", f"set {SMS[0]} alone", since="0.19"),
    Rule(
        "DSP-07", GROUP, _nowhere_to_send,
        f"{_SENDER}:1770,1788; DeepEP hybrid-ep hybrid_ep_buffer.py: needs at least 2 ranks",
        "raise EP or use alltoall", level="build",
    ),
    Rule(
        "DSP-08", BACKEND_KNOBS | {*PACKAGES}, _package, f"{_SENDER}:1048,1274,1559",
        "install it on the workers or use alltoall", level="build",
    ),
    Rule(
        "DSP-10", frozenset({BACKEND, DEEPEP, CAPACITY, FUSER}), _rank_capacity, f"{_CONFIG}:1694",
        f"leave {CAPACITY} out, or use hybridep with {FUSER}", since="0.18",
    ),
    Rule(
        "DSP-10b", frozenset({BACKEND, CAPACITY, FUSER}), _first_rank_capacity,
        "megatron-core 0.18.0 core/transformer/transformer_config.py:1516", "leave it out", since="0.18", until="0.19",
    ),
    Rule(
        "DSP-16", frozenset({DISPATCHER, "variable_seq_lengths"}), _variable_lengths, f"{_CONFIG}:2646",
        "use alltoall",
    ),
    Rule(
        "DSP-17", GROUP, _deepep_group, "DeepEP v1 deep_ep/buffers/legacy.py:259", "choose another EP x ETP",
        level="first step",
    ),
    *ncclep.RULES,
    *hybridep.RULES,
    Rule(
        "DSP-20", BACKEND_KNOBS | {APPLY}, _gpu, "Bridge 0.6.2 training/flex_dispatcher_backend.py:106",
        "use another backend or alltoall",
    ),
    Rule(
        "DSP-21", frozenset({DISPATCHER, "fake_process_group"}), _fake_group, "MLM arguments.py:1702",
        "check this layout with alltoall", launchers=MLM,
    ),
    Rule(
        "DSP-22", frozenset({DISPATCHER, SHARED_OVERLAP}), _shared_overlap, f"{_CONFIG}:1648",
        "use alltoall or flex, or switch the overlap off",
    ),
    Rule(
        "DSP-22b", frozenset({DISPATCHER, SHARED_OVERLAP}), _shared_overlap_flex,
        "megatron-core 0.17.0 core/transformer/transformer_config.py:1261", "use alltoall", until="0.18",
    ),
    Rule(
        "DSP-22c", frozenset({SHARED_OVERLAP, "moe_latent_size"}), _latent_overlap,
        "core/transformer/moe/moe_layer.py:472", f"switch {SHARED_OVERLAP} off", level="first step",
    ),
    Rule("DSP-23", frozenset({SHARED}), _no_shared_width, f"{_CONFIG}:1639", "leave it out: no shared experts"),
    Rule(
        "DSP-23b", frozenset({"add_bias_linear"}), _biased_shared, "core/transformer/moe/shared_experts.py:124",
        "set add_bias_linear to false", level="build",
    ),
    Rule(
        "DSP-24", frozenset({DISPATCHER, TOKEN_DROP}), _token_drop, "Bridge 0.6.2 training/utils/moe_token_drop.py:56",
        "use alltoall",
    ),
)  # fmt: skip
