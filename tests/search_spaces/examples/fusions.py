"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from collections.abc import Mapping

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces import oracle_fusions as real
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import BLACKWELL, H8, MLA
from tests.search_spaces.oracle import Oracle

LM = ("megatron-lm",)
ON = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
OFF = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0"}
GROUPED: dict[str, KnobValue] = {"moe_grouped_gemm": True}
FUSER: dict[str, KnobValue] = GROUPED | {"use_transformer_engine_op_fuser": True}
SHARED: dict[str, KnobValue] = {
    "use_grouped_gemm_for_shared_expert": True, "fp8": "e4m3", "fp8_recipe": "mxfp8",
}  # fmt: skip
ONE_SHARED = {"moe_shared_expert_intermediate_size": 128}


def engine(version: str | None, core: str = "0.19.2") -> Mapping[str, object]:
    return {"transformer_engine": version, "megatron_core": core}


EXAMPLES: dict[str, tuple[Case, Case]] = {
    "FUS-01": (
        case(H8, moe_permute_fusion=True, stack=engine("2.0.0")),
        case(H8, moe_permute_fusion=True, stack=engine("2.1.0")),
    ),
    "FUS-02": (
        case(H8, moe_router_fusion=True, moe_aux_loss_coeff=0.01, stack=engine("2.6.0")),
        case(H8, moe_router_fusion=True, moe_aux_loss_coeff=0.01, stack=engine("2.7.0")),
    ),
    "FUS-03": (
        case(BLACKWELL, **GROUPED, moe_single_grouped_weight=True),
        case(BLACKWELL, **FUSER, moe_single_grouped_weight=True),
    ),
    "FUS-03b": (
        case(BLACKWELL, **FUSER, moe_single_grouped_weight=True, stack=engine("2.16.0", "0.18.0")),
        case(
            BLACKWELL, **FUSER, moe_single_grouped_weight=True, fp8="e4m3", fp8_recipe="mxfp8",
            stack=engine("2.16.0", "0.18.0"),
        ),
    ),
    "FUS-04": (
        case(BLACKWELL, **FUSER, env=ON, tp=2, sp=True, etp=2),
        case(BLACKWELL, **FUSER, env=ON, tp=2, sp=True, etp=1),
    ),
    "FUS-04b": (case(BLACKWELL, **FUSER), case(BLACKWELL, **FUSER, env=ON)),
    "FUS-04c": (case(BLACKWELL, **FUSER, env=OFF), case(BLACKWELL, **FUSER, env=ON)),
    "TRAP-20": (
        case(BLACKWELL, **FUSER, env=OFF, stack=engine("2.16.0", "0.18.0")),
        case(BLACKWELL, **FUSER, env=ON, stack=engine("2.16.0", "0.18.0")),
    ),
    "FUS-05": (
        case(H8, **GROUPED, bias_dropout_fusion=True, add_bias_linear=True, etp=1),
        case(H8, **GROUPED, bias_dropout_fusion=False, add_bias_linear=True, etp=1),
    ),
    "FUS-12": (
        case(H8, gradient_accumulation_fusion=True, stack={"apex": None}),
        case(H8, gradient_accumulation_fusion=True, stack={"apex": "0.1"}),
    ),
    "FUS-06": (
        case(H8, moe_apply_probs_on_input=True, moe_router_topk=2),
        case(H8, moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True),
    ),
    "FUS-07": (
        case(H8, bias_activation_fusion=True, activation_func="squared_relu", gated_linear_unit=False),
        case(H8, bias_activation_fusion=True, activation_func="silu", gated_linear_unit=False),
    ),
    "FUS-07b": (
        case(H8, use_te_activation_func=True, activation_func="quick_gelu"),
        case(H8, use_te_activation_func=True, activation_func="gelu"),
    ),
    "FUS-08": (
        case(H8, model=MLA, apply_rope_fusion=True, rope_type="rope"),
        case(H8, model=MLA, apply_rope_fusion=True, rope_type="yarn"),
    ),
    "FUS-09": (
        case(H8, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te", launchers=LM),
        case(H8, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native", launchers=LM),
    ),
    "FUS-10": (
        case(BLACKWELL, ONE_SHARED, **SHARED),
        case(BLACKWELL, ONE_SHARED, **SHARED, moe_shared_expert_glu_interleave_size=32),
    ),
    "FUS-11": (
        case(H8.model_copy(update={"gpu_arch": "V100 sm_70"}), **GROUPED, launchers=LM),
        case(H8.model_copy(update={"gpu_arch": "A100 sm_80"}), **GROUPED, launchers=LM),
    ),
    "TRAP-18": (
        case(H8, transformer_impl="local", moe_grouped_gemm=True),
        case(H8, transformer_impl="local", moe_grouped_gemm=False),
    ),
    "TRAP-19": (
        case(BLACKWELL, **GROUPED, env=ON, moe_mlp_glu_interleave_size=32),
        case(BLACKWELL, **FUSER, env=ON, moe_mlp_glu_interleave_size=32),
    ),
}  # fmt: skip
ORACLE: dict[str, Oracle] = {
    "FUS-01": real.config_refusal,
    "FUS-02": real.router_refusal,
    "FUS-04": real.experts_refusal,
    "FUS-04c": real.experts_refusal,
    "FUS-05": real.experts_refusal,
    "FUS-06": real.expert_forward_refusal,
    "FUS-07": real.config_refusal,
    "FUS-07b": real.config_refusal,
    "FUS-08": real.config_refusal,
    "FUS-10": real.shared_expert_refusal,
    "FUS-12": real.output_layer_refusal,
    "TRAP-18": real.one_by_one,
    "TRAP-19": real.slow_experts,
}
