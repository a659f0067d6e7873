"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import H2, H8, MLA
from tests.search_spaces.oracle import Oracle
from tests.search_spaces.oracle_recompute import prediction_refusal

SPLIT: dict[str, KnobValue] = {
    "recompute": "full", "method": "uniform", "layers": 1, "distribute_saved_activations": True, "tp": 2,
}  # fmt: skip
PREDICTION: dict[str, KnobValue] = {"recompute": "full", "method": "uniform", "mtp_num_layers": 1}
SHARED = {"moe_shared_expert_intermediate_size": 128}

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "RCP-01": (case(recompute="layer"), case(recompute="selective")),
    "RCP-02": (case(recompute="full", layers=1), case(recompute="full", method="block", layers=1)),
    "RCP-03": (case(recompute="full", method="uniform"), case(recompute="full", method="uniform", layers=1)),
    "RCP-03b": (case(**PREDICTION, layers=2), case(**PREDICTION, layers=1)),
    "RCP-03c": (
        case(recompute="full", method="uniform", layers=0),
        case(recompute="full", method="block", layers=0),
    ),
    "RCP-04": (case(recompute="selective", layers=1), case(recompute="selective")),
    "RCP-04b": (case(recompute="selective", method="block"), case(recompute="selective")),
    "RCP-05": (case(**SPLIT, sp=True), case(**SPLIT)),
    "RCP-05b": (case(**SPLIT | {"tp": 1}), case(**SPLIT)),
    "RCP-07": (case(recompute="selective", modules="attn"), case(recompute="selective", modules="core_attn")),
    "RCP-07b": (
        case(recompute="selective", modules="gdn_norm_out"),
        case(recompute="selective", modules="layernorm"),
    ),
    "RCP-08": (
        case(H2, recompute="selective", modules="moe_act", moe_grouped_gemm=False),
        case(H2, recompute="selective", modules="moe_act", moe_grouped_gemm=True),
    ),
    "RCP-09": (
        case(recompute="selective", modules="mla_up_proj"),
        case(recompute="selective", modules="mla_up_proj", model=MLA),
    ),
    "RCP-10": (case(recompute="selective", modules="gdn_norm_out"), case(modules="gdn_norm_out")),
    "RCP-11": (
        case(recompute="selective", modules="shared_experts", moe_shared_expert_overlap=True, model=SHARED,
             dispatcher="alltoall"),
        case(recompute="selective", modules="shared_experts", model=SHARED, dispatcher="alltoall"),
    ),
    "RCP-12": (
        case(recompute="full", method="uniform", layers=1, moe_layer_recompute=True),
        case(recompute="selective", moe_layer_recompute=True),
    ),
    "RCP-13": (
        case(H8, recompute="selective", modules="moe_act+layernorm", fp8="hybrid", moe_grouped_gemm=True),
        case(
            H8, recompute="selective", modules="moe_act+layernorm", fp8="hybrid", moe_grouped_gemm=True,
            fp8_recipe="blockwise",
        ),
    ),
    "RCP-14": (
        case(H8, recompute="selective", cpu_offloading=True, cpu_offloading_num_layers=1),
        case(H8, cpu_offloading=True, cpu_offloading_num_layers=1),
    ),
    "DUP-04": (
        case(recompute="selective", modules="shared_experts"),
        case(recompute="selective", modules="shared_experts", model=SHARED),
    ),
    "DUP-05": (
        case(recompute="selective", modules="mlp"),
        case(recompute="selective", modules="mlp", moe_layer_freq="[0, 1, 1, 1]"),
    ),
    "DUP-08": (
        case(recompute="full", method="block", layers=1, pp=2, vpp=2),
        case(recompute="full", method="block", layers=1, pp=2),
    ),
}  # fmt: skip
ORACLE: dict[str, Oracle] = {"RCP-03b": prediction_refusal}
