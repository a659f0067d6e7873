"""Which library stands behind the flex dispatcher, and the limits of HybridEP, which megatron-core does not check.

An NVLink domain is the set of GPUs that reach each other over NVLink: the GPUs of a node, or up to 72 of a rack of
GB200 or GB300. The group is the ETP x EP ranks that exchange tokens; its ranks are neighbours in rank order.
"""

import re

from search_spaces.rules.rule import Case, Rule

DISPATCHER, BACKEND, DEEPEP = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"
TP, SP, CP = "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"
EP, ETP, MBS = "expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size"
LATENT, VARIABLE, PAD_UNEVEN = "moe_latent_size", "variable_seq_lengths", "moe_hybridep_pad_uneven_dispatch_inputs"
FUSED_PERMUTE, PERMUTE = "moe_permute_fusion_into_hybridep", "moe_permute_fusion"
DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
CHUNKS = tuple(f"NUM_OF_TOKENS_PER_CHUNK_{api}_API" for api in ("DISPATCH", "COMBINE", "PREPROCESSING"))
BACKEND_KNOBS = frozenset({DISPATCHER, BACKEND, DEEPEP})
GROUP = BACKEND_KNOBS | {TP, EP, ETP}
TOKENS = "tokens_per_rank"  # in an explicit case: what the ranks of a group send, where that is known
UNEQUAL = ("unequal", "uneven", "different", "variable")
LARGEST_DOMAIN = 72
QUEUE = 65535  # depth of one InfiniBand queue; a dispatched token takes 3 entries, and 1 is kept
DEFAULT_CHUNK = 64


def backend(case: Case) -> str:
    """The backend in use; "" where the dispatcher is not flex. The old switch overwrites the name."""
    if case.text(DISPATCHER) != "flex":
        return ""
    return "deepep" if case.on(DEEPEP) else case.text(BACKEND, "deepep")


def group(case: Case) -> int:
    """Ranks that exchange tokens."""
    return case.layout.expert_tensor * case.layout.expert


def _detected(case: Case) -> int | None:
    """Ranks of a group that share an NVLink domain by the cluster's shape; None: a rack larger than one domain."""
    if any(rack in (case.cluster.gpu_arch or "") for rack in ("GB200", "GB300", "VR200")):
        return group(case) if group(case) <= LARGEST_DOMAIN else None
    return min(case.cluster.workers_per_node, group(case))


def _said(case: Case) -> int | None:
    said = case.env.get(DOMAIN, "")
    return int(said) if said.isdecimal() and int(said) else None


def _limits(case: Case) -> str | None:
    if backend(case) != "hybridep" or case.dense or group(case) == 1:
        return None
    return _domain_limits(case) or _hidden_limit(case) or _uneven_tokens(case) or _queue_limit(case)


def _domain_limits(case: Case) -> str | None:
    domain, ranks = _said(case) or _detected(case), group(case)
    if domain is None:
        return None
    if domain > LARGEST_DOMAIN:
        return f"an NVLink domain of {domain} ranks; HybridEP is built for {LARGEST_DOMAIN}"
    if ranks % domain:
        return f"{ranks} expert ranks are not divisible by the {domain} ranks of an NVLink domain"
    chunks = [int(size) for name in CHUNKS if (size := case.env.get(name, "")).isdecimal()]
    if any(chunk * domain % 4 for chunk in chunks):
        return f"a chunk of {min(chunks)} tokens x {domain} ranks of a domain is not divisible by 4"
    return _experts_limit(case, domain)


def _experts_limit(case: Case, domain: int) -> str | None:
    local = case.model.num_moe_experts // case.layout.expert
    wrong = local * domain % 4
    return f"{local} experts a rank x {domain} ranks of a domain are not divisible by 4" if wrong else None


def _hidden_limit(case: Case) -> str | None:
    """Tokens travel in bf16 whatever the model's precision: Megatron never asks for FP8 dispatch."""
    width = case.integer(LATENT, 0) or case.model.hidden_size
    return f"HybridEP needs a width divisible by 16, not {width}" if width % 16 else None


def _said_tokens(case: Case) -> tuple[int, ...]:
    """Token counts of the ranks where a case says them: one for all, or a list; () otherwise."""
    return tuple(int(count) for count in re.findall(r"\d+", case.text(TOKENS)))


def _uneven_tokens(case: Case) -> str | None:
    counts, word = set(_said_tokens(case)), case.text(TOKENS).strip().lower()
    if len(counts) > 1 or word in UNEQUAL:
        return f"{TOKENS} differ, and HybridEP waits for ever"
    wrong = case.on(VARIABLE) and not case.on(PAD_UNEVEN)
    return f"{VARIABLE} gives ranks unequal token counts, and HybridEP waits for ever" if wrong else None


def _tokens(case: Case) -> int:
    layout = case.layout
    whole = case.training.sequence_length * case.integer(MBS, 1) // layout.context
    return whole // layout.tensor if layout.sequence_parallel else whole


def _queue_limit(case: Case) -> str | None:
    domain = _said(case) or _detected(case)
    if domain is None or group(case) <= domain:
        return None
    tokens = max(_said_tokens(case), default=0) or _tokens(case)
    wrong = 3 * tokens + 1 > QUEUE
    return (
        f"{tokens} tokens a rank between NVLink domains; HybridEP's queues hold {(QUEUE - 1) // 3}" if wrong else None
    )


def _other_permute(case: Case) -> str | None:
    if backend(case) != "hybridep":
        return None
    if case.on(FUSED_PERMUTE):
        return f"{FUSED_PERMUTE} falls back to the unfused kernels where DeepEP is too old for it"
    return f"{PERMUTE} is ignored by HybridEP, which has its own" if case.on(PERMUTE) else None


def _other_domain(case: Case) -> str | None:
    said, found = _said(case), _detected(case)
    wrong = backend(case) == "hybridep" and said is not None and found is not None and said != found
    return f"{DOMAIN} {said} where {found} ranks share NVLink" if wrong else None


def _unequal_chunks(case: Case) -> str | None:
    if backend(case) != "hybridep" or not case.on(FUSED_PERMUTE):
        return None
    said = [case.env.get(name, "") for name in CHUNKS]
    sizes = [int(size) if size.isdecimal() else DEFAULT_CHUNK for size in said]
    return (
        f"{FUSED_PERMUTE} with chunks of {' and '.join(map(str, sorted(set(sizes))))} tokens"
        if len(set(sizes)) > 1
        else None
    )


RULES = (
    Rule(
        "DSP-18", GROUP | {SP, CP, MBS, LATENT, VARIABLE, PAD_UNEVEN, TOKENS, DOMAIN, *CHUNKS}, _limits,
        "DeepEP hybrid-ep csrc/hybrid_ep/config.cuh, hybrid_ep_buffer.py; Megatron-LM#3999, DeepEP#604",
        "use another backend or change the sizes", level="first step",
    ),
    Rule(
        "TRAP-09", BACKEND_KNOBS | {FUSED_PERMUTE, PERMUTE}, _other_permute,
        "fused_a2a.py:371 of megatron-core 0.19.2", "compare the kernels of a profile", level="runtime risk",
    ),
    Rule(
        "TRAP-35", GROUP | {DOMAIN}, _other_domain, "DeepEP hybrid-ep hybrid_ep_buffer.py; DeepEP#596",
        "leave it out or set it to the ranks of a group on one NVLink domain", level="runtime risk",
    ),
    Rule(
        "TRAP-36", BACKEND_KNOBS | {FUSED_PERMUTE, *CHUNKS}, _unequal_chunks,
        "DeepEP hybrid-ep csrc/hybrid_ep/config.cuh", "set all three chunk sizes to one value, or none",
        level="first step",
    ),
)  # fmt: skip
