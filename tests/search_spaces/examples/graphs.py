"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.common import EXPANDABLE, H1, H8, KEPT_NORM

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "CGR-01": (case(H8, graphs="cudagraph"), case(H8, graphs="full_iteration")),
    "CGR-02": (case(H8, graphs="full_iteration", captured="attn"), case(H8, graphs="local", captured="attn")),
    "CGR-06": (
        case(H8, graphs="transformer_engine", captured="moe+moe_router"),
        case(H8, graphs="transformer_engine", captured="moe"),
    ),
    "CGR-07": (
        case(H8, graphs="transformer_engine", captured="moe_preprocess"),
        case(H8, graphs="transformer_engine", captured="moe_router+moe_preprocess"),
    ),
    "CGR-09": (
        case(H8, graphs="local", captured="mlp"),
        case(H8, graphs="local", captured="mlp", model={"first_dense_layers": 1}),
    ),
    "CGR-10": (
        case(H8, graphs="local", captured="moe", moe_expert_capacity_factor=1.0),
        case(
            H8,
            graphs="local",
            captured="moe",
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=True,
        ),
    ),
    "CGR-13": (
        case(H8, recompute="full", graphs="transformer_engine"),
        case(H8, recompute="full", graphs="full_iteration"),
    ),
    "CGR-14": (
        case(H8, recompute="selective", modules="moe", graphs="transformer_engine", captured="attn+moe_router"),
        case(H8, recompute="selective", modules="moe", graphs="transformer_engine", captured="attn"),
    ),
    "CGR-20": (
        case(H8, graphs="transformer_engine", env=EXPANDABLE),
        case(H8, graphs="transformer_engine", env=EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}),
    ),
    "RUN-01": (
        case(H1, graphs="local", captured="attn"),
        case(H1, graphs="local", captured="attn+moe_router+moe_preprocess"),
    ),
    "STK-01": (
        case(H1, graphs="transformer_engine", stack={"transformer_engine": None}),
        case(H1, graphs="local", stack={"transformer_engine": None}),
    ),
    "DUP-16": (
        case(H8, **KEPT_NORM, captured="attn+moe_router+moe_preprocess", dispatcher="allgather"),
        case(H8, **KEPT_NORM, captured="attn+moe_router+moe_preprocess", dispatcher="alltoall"),
    ),
    "DUP-10": (case(H8, captured="attn"), case(H8, captured="attn", graphs="local")),
    "DUP-11": (case(H8, graphs="local"), case(H8, graphs="full_iteration")),
    "DUP-12": (
        case(H8, graphs="local", captured="attn+moe_router"),
        case(H8, graphs="transformer_engine", captured="attn+moe_router"),
    ),
}
