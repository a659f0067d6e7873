"""Rules of context parallelism: how a sequence is cut, and how the parts exchange keys and values."""

import json
from math import prod

from search_spaces.rules.rule import Case, Launcher, Rule

TP, SP, CP = "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"
CP_COMM, CP_SIZES, VARIANT = "cp_comm_type", "hierarchical_context_parallel_sizes", "experimental_attention_variant"
EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")
BOTH_LAUNCHERS: frozenset[Launcher] = frozenset({"megatron-lm", "megatron-bridge"})


def _context_halves(case: Case) -> str | None:
    if case.layout.context == 1:
        return None
    context, sequence = case.layout.context, case.training.sequence_length
    return f"a sequence of {sequence} is not divisible by 2 x CP = {2 * context}" if sequence % (2 * context) else None


def cp_comm_types(case: Case) -> list[str]:
    """How CP exchanges keys and values: one word for all layers, or one a layer; [] where it is not said."""
    text = case.text(CP_COMM)
    return [str(kind) for kind in json.loads(text)] if text.startswith("[") else [text] if text else []


def _no_hierarchy(case: Case) -> bool:
    return "a2a+p2p" in cp_comm_types(case) and not case.text(CP_SIZES)


def _context_hierarchy(case: Case) -> str | None:
    if case.launchers & BOTH_LAUNCHERS and _no_hierarchy(case):
        return f"{CP_COMM} a2a+p2p without {CP_SIZES}"
    sizes = json.loads(case.text(CP_SIZES, "[]"))
    wrong = sizes and prod(sizes) != case.layout.context
    return f"{CP_SIZES} {sizes} multiply to {prod(sizes)}, not to CP {case.layout.context}" if wrong else None


def _context_cut_off(case: Case) -> str | None:
    wrong = case.layout.context > 1 and _no_hierarchy(case) and not case.launchers & BOTH_LAUNCHERS
    return f"{CP_COMM} a2a+p2p without {CP_SIZES}: each rank attends to its own part only" if wrong else None


def _context_list(case: Case) -> str | None:
    if case.layout.context == 1 or not case.text(CP_COMM).startswith("["):
        return None
    found, layers = len(cp_comm_types(case)), case.model.num_layers
    return f"{CP_COMM} names {found} layers, the model has {layers}" if found != layers else None


def _exchanges(case: Case) -> list[str]:
    """What Transformer Engine is told of the exchange; [] where there is none, or DSA's own."""
    return [] if case.layout.context == 1 or case.text(VARIANT) == "dsa" else cp_comm_types(case)


def _unknown_exchange(case: Case) -> str | None:
    wrong = [kind for kind in _exchanges(case) if kind not in EXCHANGES]
    return f"{CP_COMM} {wrong[0][:40]} is none of {', '.join(EXCHANGES)}" if wrong else None


def _heads_to_exchange(case: Case) -> str | None:
    if "a2a" not in _exchanges(case):
        return None
    context, tensor = case.layout.context, case.layout.tensor
    heads, groups = case.model.num_attention_heads // tensor, max(case.model.num_query_groups // tensor, 1)
    wrong = heads % context or groups % context
    return (
        f"{CP_COMM} a2a: {heads} heads and {groups} query groups a rank, not divisible by CP {context}"
        if wrong
        else None
    )


def _sparse_attention(case: Case) -> str | None:
    if case.text(VARIANT) != "dsa" or case.layout.context == 1:
        return None
    kinds = cp_comm_types(case) or ["none"]
    wrong = [kind for kind in kinds if kind.replace("_", "").lower() != "allgather"]
    return f"DSA attention under CP with {CP_COMM} {wrong[0]}" if wrong else None


def _sparse_alone(case: Case) -> str | None:
    wrong = case.text(VARIANT) == "dsa" and case.layout.context > 1
    return "DSA attention under CP before megatron-core 0.19" if wrong else None


def _sparse_rope(case: Case) -> str | None:
    wrong = case.text(VARIANT) == "dsa" and case.on("apply_rope_fusion")
    return "DSA attention with apply_rope_fusion" if wrong else None


def _sparse_bias(case: Case) -> str | None:
    return "DSA attention with biases" if case.text(VARIANT) == "dsa" and case.on("add_bias_linear") else None


def _linear_alone(case: Case) -> str | None:
    wrong = case.text(VARIANT) == "gated_delta_net" and case.layout.context > 1
    return "gated_delta_net under CP before megatron-core 0.18" if wrong else None


def _sequence_split(case: Case) -> str | None:
    layout, sequence = case.layout, case.training.sequence_length
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    return f"a sequence of {sequence} does not split into CP x TP = {parts} parts" if sequence % parts else None


_CONFIG = "core/transformer/transformer_config.py"
_ENGINE = "TE 2.20.2 pytorch/attention/dot_product_attention/context_parallel.py"
RULES = (
    Rule("PAR-18", frozenset({CP}), _context_halves, "MLM arguments.py:1296", "lower CP or lengthen the sequence"),
    Rule(
        "PAR-19", frozenset({CP, CP_COMM, CP_SIZES}), _context_hierarchy,
        "core/parallel_state.py:1129; MLM arguments.py:562; Bridge training/config.py:1544",
        "set sizes whose product is CP, such as [8, 2] for CP 16",
    ),
    Rule(
        "PAR-20", frozenset({CP, CP_COMM}), _context_list, f"{_CONFIG}:2780", "name every layer, or one word for all",
    ),
    Rule(
        "PAR-20b", frozenset({CP, CP_COMM, VARIANT}), _unknown_exchange, f"{_ENGINE}:5778", "choose one of them",
        level="first step",
    ),
    Rule(
        "PAR-20c", frozenset({TP, CP, CP_COMM, VARIANT}), _heads_to_exchange, f"{_ENGINE}:4644",
        "lower CP or TP, or use p2p or all_gather", level="first step",
    ),
    Rule(
        "PAR-33", frozenset({CP, CP_COMM, VARIANT}), _sparse_attention, f"{_CONFIG}:2845",
        f"set {CP_COMM} to all_gather", since="0.19",
    ),
    Rule(
        "PAR-33b", frozenset({"apply_rope_fusion", VARIANT}), _sparse_rope, f"{_CONFIG}:2838",
        "set apply_rope_fusion to false",
    ),
    Rule(
        "PAR-33c", frozenset({CP, VARIANT}), _sparse_alone,
        "megatron-core 0.18.0 core/transformer/transformer_config.py:2544", "set CP to 1", until="0.19",
    ),
    Rule(
        "PAR-33d", frozenset({"add_bias_linear", VARIANT}), _sparse_bias, f"{_CONFIG}:1385",
        "set add_bias_linear to false", since="0.19",
    ),
    Rule(
        "PAR-07b", frozenset({CP, VARIANT}), _linear_alone,
        "megatron-core 0.17.0 core/transformer/transformer_config.py:1102", "set CP to 1", until="0.18",
    ),
    Rule(
        "TRAP-34", frozenset({CP, CP_COMM, CP_SIZES}), _context_cut_off,
        "Bridge training/config.py:1544: fast, and wrong; megatron-core does not check", f"set {CP_SIZES}",
    ),
    Rule(
        "SHP-02", frozenset({TP, SP, CP}), _sequence_split, "core/tensor_parallel/mappings.py, scatter",
        "lower TP or CP, or change training.sequence_length", level="first step",
    ),
)  # fmt: skip
