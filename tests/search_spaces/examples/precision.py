"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.candidate import KnobValue
from search_spaces.rules import Case
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.examples.clusters import ADA, AMPERE, BLACKWELL, H8
from tests.search_spaces.oracle import Oracle
from tests.search_spaces.oracle_precision import (
    data_parallel_refusal,
    lost_attention,
    lost_wgrad,
    optimizer_refusal,
    recipe_refusal,
)

SMALL_BLACKWELL = gpus(8, "RTX PRO 6000 sm_120")
MX: dict[str, KnobValue] = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
BLOCKS: dict[str, KnobValue] = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
SCALED: dict[str, KnobValue] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
STORED_FP8: dict[str, KnobValue] = {"fp8": "hybrid", "fp8_param_gather": True}
PADDED_ROUTER: dict[str, KnobValue] = {
    "fp4": "e2m1", "dispatcher": "alltoall", "moe_router_padding_for_quantization": True,
}  # fmt: skip

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "UNK-01": (case(H8, fp8="e5m2"), case(H8, fp8="hybrid")),
    "UNK-02": (case(BLACKWELL, fp4="e2m1", fp4_recipe="mxfp4"), case(BLACKWELL, fp4="e2m1", fp4_recipe="nvfp4")),
    "PRC-01": (case(H8, fp16=True), case(H8, fp16=True, bf16=False)),
    "PRC-02": (
        case(H8, fp8="hybrid", fp8_recipe="delayed", first_last_layers_bf16=True),
        case(H8, **SCALED, first_last_layers_bf16=True),
    ),
    "PRC-03": (
        case(BLACKWELL, **MX, first_last_layers_bf16=True, pp=2, num_layers_at_end_in_bf16=3),
        case(BLACKWELL, **MX, first_last_layers_bf16=True, pp=2, num_layers_at_end_in_bf16=2),
    ),
    "PRC-04": (
        case(H8, fp8="e4m3", fp8_recipe="custom"),
        case(H8, fp8="e4m3", fp8_recipe="custom", fp8_quantizer_factory="ours.quantizers"),
    ),
    "PRC-05": (case(H8, fp8_param=True), case(H8, fp8_param=True, fp8="hybrid")),
    "PRC-06": (
        case(BLACKWELL, fp8="e4m3", fp8_recipe="blockwise", fp8_output_proj=True),
        case(BLACKWELL, **MX, fp8_output_proj=True),
    ),
    "PRC-07": (case(BLACKWELL, fp8="hybrid", fp4="e2m1"), case(BLACKWELL, fp4="e2m1")),
    "PRC-08": (
        case(BLACKWELL, fp4="e2m1", stack={"transformer_engine": "2.6.0"}),
        case(BLACKWELL, fp4="e2m1", stack={"transformer_engine": "2.7.0"}),
    ),
    "PRC-09": (
        case(H8, fp8="hybrid", moe_grouped_gemm=True, stack={"transformer_engine": "1.10.0"}),
        case(H8, fp8="hybrid", moe_grouped_gemm=True, stack={"transformer_engine": "1.11.0"}),
    ),
    "PRC-09b": (
        case(H8, **BLOCKS, stack={"transformer_engine": "2.2.0"}),
        case(H8, **BLOCKS, stack={"transformer_engine": "2.3.0"}),
    ),
    "PRC-11": (
        case(H8, fp8="e4m3", reuse_grad_buf_for_mxfp8_param_ag=True),
        case(H8, fp8="e4m3", reuse_grad_buf_for_mxfp8_param_ag=True, fp8_param_gather=True),
    ),
    "PRC-11b": (case(H8, **STORED_FP8), case(H8, **STORED_FP8, use_distributed_optimizer=True)),
    "PRC-12": (
        case(BLACKWELL, **MX, training={"sequence_length": 31_936}, tp=4, sp=True),
        case(BLACKWELL, **MX, training={"sequence_length": 32_768}, tp=4, sp=True),
    ),
    "PRC-12b": (
        case(BLACKWELL, **MX, model={"moe_ffn_hidden_size": 48}),
        case(BLACKWELL, **SCALED, model={"moe_ffn_hidden_size": 48}),
    ),
    "PRC-13": (
        case(H8, dispatcher="alltoall", moe_router_padding_for_quantization=True),
        case(H8, dispatcher="alltoall", moe_router_padding_for_quantization=True, fp8="hybrid"),
    ),
    "PRC-14": (
        case(H8, use_precision_aware_optimizer=True),
        case(H8, use_precision_aware_optimizer=True, use_distributed_optimizer=True),
    ),
    "PRC-15": (
        case(H8, optimizer_cpu_offload=True),
        case(H8, optimizer_cpu_offload=True, use_precision_aware_optimizer=True),
    ),
    "PRC-17": (
        case(H8, activation_func_fp8_input_store=True, gated_linear_unit=False),
        case(H8, activation_func_fp8_input_store=True),
    ),
    "PRC-18": (
        case(H8, accumulate_allreduce_grads_in_fp32=True, main_grads_dtype="bf16"),
        case(H8, accumulate_allreduce_grads_in_fp32=True, main_grads_dtype="fp32"),
    ),
    "TRAP-10": (
        case(BLACKWELL, **PADDED_ROUTER, training={"sequence_length": 64}),
        case(BLACKWELL, **PADDED_ROUTER, training={"sequence_length": 128}),
    ),
    "TRAP-21": (case(H8, **SCALED, fp8_wgrad=False), case(H8, fp8="hybrid", fp8_wgrad=False)),
    "TRAP-22": (
        case(H8, **BLOCKS, fp8_dot_product_attention=True),
        case(H8, **SCALED, fp8_dot_product_attention=True),
    ),
    "TRAP-23": (case(BLACKWELL, **BLOCKS), case(H8, **BLOCKS)),
    "HW-01": (case(AMPERE, fp8="hybrid"), case(ADA, fp8="hybrid")),
    "HW-02": (
        case(H8, **BLOCKS, stack={"cuda": None, "torch": "2.8.0+cu128"}),
        case(H8, **BLOCKS, stack={"cuda": None, "torch": "2.8.0+cu129"}),
    ),
    "HW-03": (case(SMALL_BLACKWELL, **MX), case(BLACKWELL, **MX)),
    "HW-04": (case(H8, fp4="e2m1"), case(BLACKWELL, fp4="e2m1")),
    "HW-05": (case(SMALL_BLACKWELL, fp4="e2m1", fp4_recipe="nvfp4"), case(BLACKWELL, fp4="e2m1", fp4_recipe="nvfp4")),
}
ORACLE: dict[str, Oracle] = {
    "UNK-01": recipe_refusal,
    "UNK-02": recipe_refusal,
    "PRC-08": recipe_refusal,
    "PRC-09b": recipe_refusal,
    "PRC-11": data_parallel_refusal,
    "PRC-14": optimizer_refusal,
    "TRAP-21": lost_wgrad,
    "TRAP-22": lost_attention,
}
