"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.common import H2, H8, MLA

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "RCP-01": (case(recompute="partial"), case(recompute="selective")),
    "RCP-02": (case(recompute="full", layers=1), case(recompute="full", method="block", layers=1)),
    "RCP-03": (case(recompute="full", layers=3, pp=2), case(recompute="full", layers=2, pp=2)),
    "RCP-04": (case(recompute="selective", method="block"), case(recompute="selective")),
    "RCP-07": (case(recompute="selective", modules="attn"), case(recompute="selective", modules="core_attn")),
    "RCP-08": (
        case(H2, recompute="selective", modules="layernorm+moe_act"),
        case(H2, recompute="selective", modules="layernorm+moe_act", moe_grouped_gemm=True),
    ),
    "RCP-09": (
        case(recompute="selective", modules="mla_up_proj"),
        case(recompute="selective", modules="mla_up_proj", model=MLA),
    ),
    "RCP-10": (case(recompute="selective", modules="gdn_norm_out"), case(modules="gdn_norm_out")),
    "RCP-13": (
        case(H8, recompute="selective", modules="layernorm", fp8="hybrid"),
        case(H8, recompute="selective", modules="layernorm", fp8="hybrid", fp8_recipe="blockwise"),
    ),
    "DUP-04": (
        case(recompute="selective", modules="shared_experts"),
        case(recompute="selective", modules="shared_experts", model={"moe_shared_expert_intermediate_size": 128}),
    ),
    "DUP-05": (
        case(recompute="selective", modules="mlp"),
        case(recompute="selective", modules="mlp", model={"first_dense_layers": 1}),
    ),
    "DUP-06": (case(modules="moe"), case(recompute="selective", modules="moe")),
    "DUP-07": (case(layers=1), case(layers=1, recompute="full")),
    "DUP-08": (
        case(recompute="full", method="block", layers=1, pp=2, vpp=2),
        case(recompute="full", method="block", layers=1, pp=2),
    ),
}
