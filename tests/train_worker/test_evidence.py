"""What each knob must show, on made-up observations; what GPU kernels add, on names of a real H200."""

from typing import Any

import pytest

from search_spaces.candidate import Candidate, KnobValue
from train_worker.evidence import evidence_of, merged, missing
from train_worker.evidence_checks import CHECKS
from train_worker.kernels import GpuEvent, StepTrace
from train_worker.observed import Calls, Observed, OptimizerState, Sent, kernels_of
from train_worker.outcome import Evidence, Measured, Rejected

NO_CALLS = Calls(forward=0, again=0)
ONCE = {
    name: Calls(forward=8, again=0) for name in ("layer", "attn", "core_attn", "moe", "moe_router", "moe_preprocess")
}
FLOAT = OptimizerState(classes=("FusedAdam",), dtypes={"exp_avg": ("float32",)}, host_bytes=0, device_bytes=800)
PLAIN = Observed(
    device="cuda", first_step=False, micro_batches=2, layers=4, moe_layers=4, low_precision_layers=4, last_stage=True,
    captured=(), graphs_captured=0, graphs_replayed=0, dispatched={"alltoall": 8}, experts={"TEGroupedMLP": 8},
    parts=ONCE, part_sizes={"attn": 4, "core_attn": 4, "moe": 4, "moe_router": 4}, fused={},
    reductions=Sent(early=0, late=0), gathers=Sent(early=0, late=0), planned_layers=0, paired_layers=0,
    delayed_wgrads=0, shared_overlapped=0, offloaded_bytes={}, optimizer=FLOAT, precisions={}, quantized_parameters={},
    fused_gradients=0,
)  # fmt: skip
GRAPHED: dict[str, KnobValue] = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn+moe_router"}
REPLAYED = {"captured": ("attn", "moe_router"), "graphs_captured": 8, "graphs_replayed": 8}
IN_GRAPHS = {**REPLAYED, "parts": {**ONCE, "attn": NO_CALLS, "core_attn": NO_CALLS, "moe_router": NO_CALLS}}
ROUTER_GRAPHED: dict[str, KnobValue] = GRAPHED | {"cuda_graph_modules": "moe_router+moe_preprocess"}
# DeepSeek-V3's first three layers are dense: with PP 16 they may be a stage of their own.
DENSE_STAGE: dict[str, Any] = {
    "moe_layers": 0, "part_sizes": {"attn": 4, "mlp": 4}, "parts": ONCE | {"moe_preprocess": NO_CALLS},
}  # fmt: skip
SELECTIVE: dict[str, KnobValue] = {"recompute_granularity": "selective"}
FP8: dict[str, KnobValue] = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
FLEX: dict[str, KnobValue] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
MASTER = FLOAT.model_copy(update={"dtypes": {"exp_avg": ("float32",), "master_param": ("int16",)}})
HYBRID = OptimizerState(classes=("HybridDeviceOptimizer",), dtypes={}, host_bytes=800, device_bytes=0)


def active(knobs: dict[str, KnobValue], knob: str, **seen: Any) -> bool | None:
    """What the evidence says of one knob, where a plain run is seen but for what is given."""
    observed = PLAIN.model_copy(update=seen)
    (row,) = [row for row in evidence_of(Candidate(knobs=knobs), observed) if row.knob == knob]
    return row.active


def again(**calls: int) -> dict[str, Any]:
    return {"parts": ONCE | {name: Calls(forward=8, again=count) for name, count in calls.items()}}


CASES: list[tuple[str, dict[str, KnobValue], dict[str, Any], bool | None]] = [
    ("moe_flex_dispatcher_backend", FLEX, {"dispatched": {"flex/hybridep": 8}}, True),
    ("moe_flex_dispatcher_backend", FLEX, {"dispatched": {"flex/deepep": 8}}, False),
    ("moe_token_dispatcher_type", FLEX, {"dispatched": {"flex/deepep": 8}}, True),
    ("moe_token_dispatcher_type", FLEX, {"dispatched": {"flex/deepep": 4, "alltoall": 4}}, False),
    ("moe_token_dispatcher_type", FLEX, {"moe_layers": 0, "dispatched": {}}, None),
    ("moe_token_dispatcher_type", FLEX, {"captured": ("full_iteration",), "dispatched": {}}, None),
    ("moe_grouped_gemm", {"moe_grouped_gemm": True}, {}, True),
    ("moe_grouped_gemm", {"moe_grouped_gemm": True}, {"experts": {"SequentialMLP": 8}}, False),
    ("moe_grouped_gemm", {"moe_grouped_gemm": True}, {"experts": {"fused operations": 8}}, True),
    ("use_transformer_engine_op_fuser", {"use_transformer_engine_op_fuser": True}, {}, False),
    ("recompute_modules", SELECTIVE | {"recompute_modules": "moe_act"}, again(moe_act=8), True),
    ("recompute_modules", SELECTIVE | {"recompute_modules": "moe_act"}, {}, False),
    ("recompute_modules", SELECTIVE | {"recompute_modules": "moe_act"}, {"experts": {"fused operations": 8}}, None),
    ("recompute_modules", SELECTIVE | {"recompute_modules": "moe+core_attn"}, again(moe=8, core_attn=4), False),
    ("recompute_modules", SELECTIVE | {"recompute_modules": "moe+core_attn"}, {**IN_GRAPHS, **again(moe=8)}, True),
    ("recompute_modules", SELECTIVE | {"recompute_modules": "core_attn"}, IN_GRAPHS, None),
    ("recompute_granularity", SELECTIVE, again(core_attn=8), True),
    ("recompute_granularity", SELECTIVE, {}, False),
    ("recompute_granularity", {"recompute_granularity": "full", "recompute_method": "block"}, again(layer=2), True),
    ("recompute_granularity", {"recompute_granularity": "full", "recompute_method": "block"}, {}, False),
    ("recompute_granularity", {"recompute_granularity": "full"}, again(layer=2), False),
    ("recompute_granularity", {"recompute_granularity": "full"}, {"layers": 0, "parts": {}}, None),
    ("cuda_graph_impl", GRAPHED, IN_GRAPHS, True),
    ("cuda_graph_impl", GRAPHED, {"graphs_captured": 8}, False),
    ("cuda_graph_impl", GRAPHED, {"layers": 0}, None),
    ("cuda_graph_impl", ROUTER_GRAPHED, DENSE_STAGE, None),
    ("cuda_graph_impl", GRAPHED, DENSE_STAGE, False),  # its attention should have been captured
    ("cuda_graph_modules", ROUTER_GRAPHED, DENSE_STAGE, None),
    ("cuda_graph_modules", GRAPHED, DENSE_STAGE, False),
    ("cuda_graph_modules", GRAPHED, IN_GRAPHS, True),
    ("cuda_graph_modules", GRAPHED, REPLAYED, False),  # every call is still an eager one
    ("delay_wgrad_compute", {"delay_wgrad_compute": True}, {"delayed_wgrads": 40}, True),
    ("delay_wgrad_compute", {"delay_wgrad_compute": True}, {}, False),
    ("delay_wgrad_compute", {"delay_wgrad_compute": True}, {"device": "cpu"}, None),
    ("moe_permute_fusion", {"moe_permute_fusion": True}, {"fused": {"moe_permute_fusion": 16}}, True),
    ("moe_permute_fusion", {"moe_permute_fusion": True}, {}, False),
    ("moe_permute_fusion", {"moe_permute_fusion": True}, {"dispatched": {"flex/hybridep": 8}}, None),
    ("moe_router_fusion", {"moe_router_fusion": True}, {}, False),
    ("moe_router_fusion", {"moe_router_fusion": True}, IN_GRAPHS, None),
    ("apply_rope_fusion", {"apply_rope_fusion": True}, {"fused": {"apply_rope_fusion": 16}}, True),
    ("apply_rope_fusion", {"apply_rope_fusion": True}, {}, False),
    ("masked_softmax_fusion", {"masked_softmax_fusion": True}, {}, False),
    ("cross_entropy_loss_fusion", {"cross_entropy_loss_fusion": True}, {"last_stage": False}, None),
    ("gradient_accumulation_fusion", {"gradient_accumulation_fusion": True}, {"fused_gradients": 40}, True),
    ("gradient_accumulation_fusion", {"gradient_accumulation_fusion": True}, {}, False),
    ("gradient_accumulation_fusion", {"gradient_accumulation_fusion": True}, REPLAYED, None),
    ("mla_down_proj_fusion", {"mla_down_proj_fusion": True}, again(mla_down_proj=0), True),
    ("mla_down_proj_fusion", {"mla_down_proj_fusion": True}, {}, False),
    (
        "offload_modules", {"fine_grained_activation_offloading": True, "offload_modules": "moe_act+core_attn"},
        {"offloaded_bytes": {"moe_act": 10, "core_attn": 20}}, True,
    ),
    (
        "offload_modules", {"fine_grained_activation_offloading": True, "offload_modules": "moe_act+core_attn"},
        {"offloaded_bytes": {"moe_act": 10}}, False,
    ),
    ("fine_grained_activation_offloading", {"fine_grained_activation_offloading": True}, {}, False),
    ("optimizer_cpu_offload", {"optimizer_cpu_offload": True}, {"optimizer": HYBRID}, True),
    ("optimizer_cpu_offload", {"optimizer_cpu_offload": True}, {}, False),
    ("use_precision_aware_optimizer", {"use_precision_aware_optimizer": True}, {"optimizer": MASTER}, True),
    ("use_precision_aware_optimizer", {"use_precision_aware_optimizer": True}, {}, False),
    ("fp8", FP8, {"precisions": {"hybrid/blockwise": 24}}, True),
    ("fp8", FP8, {"precisions": {"hybrid/blockwise": 20, "hybrid/delayed": 4}}, False),
    ("fp8", FP8, {}, False),
    ("fp8", FP8, {"low_precision_layers": 0}, None),
    ("fp4", {"fp4": "e2m1"}, {"precisions": {"e2m1/nvfp4": 24}}, True),
    ("fp8_param", {"fp8_param": True}, {"quantized_parameters": {"Float8Tensor": 24}}, True),
    ("fp8_param", {"fp8_param": True}, {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("knob", "knobs", "seen", "verdict"), CASES)
def test_what_was_seen_decides(
    knob: str, knobs: dict[str, KnobValue], seen: dict[str, Any], verdict: bool | None
) -> None:
    assert active(knobs, knob, **seen) is verdict


def test_every_check_is_tried_both_ways_here_or_on_real_megatron() -> None:
    from tests.train_worker.test_megatron_evidence import KNOBS

    tried = {(knob, verdict) for knob, _, _, verdict in CASES}
    tried |= {(knob.split(",")[0], verdict) for knob in KNOBS for verdict in (True, False)}
    tried |= {("NVTE_USE_CUTLASS_GROUPED_GEMM", verdict) for verdict in (True, False)}  # by its kernels, below
    alike = {("use_transformer_engine_op_fuser", True), ("moe_router_fusion", True), ("masked_softmax_fusion", True)}
    alike |= {("fine_grained_activation_offloading", True), ("fp4", False), ("fp4_param", True), ("fp4_param", False)}
    alike |= {("overlap_dispatch_backward_with_experts_wgrad", verdict) for verdict in (True, False)}
    assert {(knob, verdict) for knob in CHECKS for verdict in (True, False)} - tried - alike == set()


OFF: dict[str, KnobValue] = {
    "moe_grouped_gemm": False, "recompute_granularity": None, "recompute_modules": "moe", "cuda_graph_impl": "none",
    "cuda_graph_modules": "attn", "fp8": None, "fp4": "none", "offload_modules": "core_attn",
    "moe_flex_dispatcher_backend": "deepep", "overlap_grad_reduce": False,
}  # fmt: skip


def test_what_is_off_or_belongs_to_what_is_off_leaves_no_row() -> None:
    candidate = Candidate(knobs=OFF, env={"NVTE_USE_CUTLASS_GROUPED_GEMM": "0"})
    assert evidence_of(candidate, PLAIN) == ()


def told(active: bool | None, seen: str = "x") -> Evidence:
    return Evidence(knob="fp8", requested="hybrid", seen=seen, active=active)


def test_one_rank_that_saw_nothing_run_speaks_for_the_gang() -> None:
    assert merged([[told(None)], [told(True, "y")]]) == (told(True, "y"),)
    assert merged([[told(True)], [told(False, "0 modules")], [told(None)]]) == (told(False, "0 modules"),)
    assert merged([[], []]) == ()


def test_one_stage_that_pairs_micro_batches_is_enough() -> None:
    knob = "overlap_moe_expert_parallel_comm"
    idle, busy, blind = (Evidence(knob=knob, requested=True, seen="x", active=each) for each in (False, True, None))
    assert merged([[blind], [idle], [busy]]) == (busy,)
    assert merged([[blind], [idle]]) == (idle,)


def test_a_refusal_tells_what_was_asked_and_seen_and_keeps_the_rest() -> None:
    good = Evidence(knob="moe_grouped_gemm", requested=True, seen="TEGroupedMLP: 8 forward passes", active=True)
    assert missing([good, told(None)]) is None
    assert missing([good, told(False, "no modules")]) == Rejected(
        rule="not-active",
        reason="asked for and not active: fp8: requested 'hybrid', seen: no modules",
        evidence=(good, told(False, "no modules")),
    )


# Of one profiled step each on an H200 (torch 2.11.0+cu130, Transformer Engine 2.20.2), cut: name -> launches
BF16 = {
    "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_NTN": 125,
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nt_align1>(cutlass_75_tensorop_bf16_s1688": 48,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0": 8,
}
CUTLASS = BF16 | {
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS1_10": 32
}
BLOCKWISE = {
    "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN": 2,
    "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_Avec128_Bvec128_TNT": 169,
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN": 90,
}
TENSORWISE = {
    "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN": 2,
    "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT": 193,
    "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*, __nv_fp8_e4m3*, float": 354,
}
OTHER_GPU = {"nvjet_sm100_tst_64x8": 10}  # a name nobody has seen
OTHER_CUBLAS = {  # made up: the same GPU, where only cuDNN says so
    "nvjet_qqtst_128x128_128x6": 259,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0": 8,
}


def profiled(names: dict[str, int], candidate: Candidate, **seen: Any) -> Evidence:
    events = [GpuEvent(name, at * 2.0, 1.0, 7) for name, count in names.items() for at in range(count)]
    kernels = kernels_of(StepTrace(tuple(events), 1e6, {"cudaGraphLaunch": 16}))
    (row,) = evidence_of(candidate, PLAIN.model_copy(update={**seen, "kernels": kernels}))
    return row


@pytest.mark.parametrize(
    ("recipe", "names", "seen", "verdict"),
    [
        ("blockwise", BLOCKWISE, "259 of 261 GEMM kernels in FP8, 259 of them scaled by blocks", True),
        ("blockwise", TENSORWISE, "193 of 195 GEMM kernels in FP8, 0 of them scaled by blocks", False),
        ("blockwise", BF16, "0 of 173 GEMM kernels in FP8, 0 of them scaled by blocks", False),
        ("tensorwise", TENSORWISE, "193 of 195 GEMM kernels in FP8, 0 of them scaled by blocks", True),
        ("tensorwise", BF16, "0 of 173 GEMM kernels in FP8, 0 of them scaled by blocks", False),
        ("delayed", BF16, "0 of 173 GEMM kernels in FP8, 0 of them scaled by blocks", True),
        ("blockwise", OTHER_CUBLAS, "259 of 259 GEMM kernels in FP8, 0 of them scaled by blocks", True),
        ("blockwise", OTHER_GPU, "0 of 10 GEMM kernels in FP8, 0 of them scaled by blocks", True),
    ],
)
def test_fp8_is_seen_in_the_kernels_where_their_names_are_known(
    recipe: str, names: dict[str, int], seen: str, verdict: bool
) -> None:
    """Modules that say FP8 are not enough where the GEMMs are known by name; elsewhere they are."""
    candidate = Candidate(knobs={"fp8": "hybrid", "fp8_recipe": recipe})
    row = profiled(names, candidate, precisions={f"hybrid/{recipe}": 24})
    assert row.seen == f"hybrid/{recipe}: 24 modules; {seen}"
    assert row.active is verdict


@pytest.mark.parametrize(
    ("names", "verdict"),
    [(CUTLASS, True), (BLOCKWISE, False), (BF16, False), (OTHER_GPU, None), (OTHER_CUBLAS, None)],
)
def test_grouped_cutlass_kernels_are_seen_or_the_fallback_is(names: dict[str, int], verdict: bool | None) -> None:
    row = profiled(names, Candidate(knobs={}, env={"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}))
    assert row.active is verdict


@pytest.mark.parametrize(
    ("candidate", "absent"),
    [
        (Candidate(knobs={"fp8": "hybrid", "fp8_recipe": "blockwise"}), {"low_precision_layers": 0}),
        (Candidate(knobs={}, env={"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}), {"moe_layers": 0}),
    ],
)
def test_kernels_of_a_stage_without_such_layers_say_nothing(candidate: Candidate, absent: dict[str, int]) -> None:
    assert profiled(BF16, candidate, **absent).active is None


def test_a_fused_kernel_tells_of_a_call_that_a_graph_hides() -> None:
    fused = {"void transformer_engine::fused_router::fused_topk_with_score_function_forward_kernel<float>()": 8}
    candidate = Candidate(knobs={"moe_router_fusion": True})
    assert profiled(fused, candidate, **IN_GRAPHS).active is True
    assert profiled(BF16, candidate, **IN_GRAPHS).active is None


def test_graph_launches_and_hidden_communication_are_told() -> None:
    assert profiled(BF16, Candidate(knobs={"cuda_graph_impl": "local"}), **IN_GRAPHS).seen.endswith("16 graph launches")
    sent, computed = GpuEvent("ncclDevKernel_SendRecv(x)", 0, 10, 1), GpuEvent("gemm", 6, 10, 2)
    kernels = kernels_of(StepTrace((sent, computed), 20, {}))
    assert (kernels.communication_s, kernels.hidden_communication_s) == (10e-6, 4e-6)
    copy = GpuEvent("Memcpy DtoH (Device -> Pinned)", 0, 1, 3, "memcpy", size_bytes=64)
    assert kernels_of(StepTrace((copy,), 20, {})).to_host_bytes == 64


def test_rows_from_before_the_evidence_still_load() -> None:
    from tests.tracking.sample import measured

    old = measured(0.1).model_dump(mode="json")
    del old["evidence"]
    assert Measured.model_validate(old).evidence == ()
    assert Rejected.model_validate({"kind": "rejected", "rule": "x", "reason": "y"}).evidence == ()
