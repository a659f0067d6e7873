"""Interval arithmetic against counting points one by one, and what known kernels are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_worker.kernels import Interval, category_of, intersect, is_disjoint, length, subtract, union, working

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def points(intervals: list[Interval]) -> set[int]:
    return {at for start, end in intervals for at in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_intervals_are_the_sets_of_their_points(left: list[Interval], right: list[Interval]) -> None:
    one, two = union(left), union(right)
    assert is_disjoint(one)
    assert points(one) == points(left)
    assert points(subtract(one, two)) == points(left) - points(right)
    assert points(intersect(one, two)) == points(left) & points(right)
    assert length(one) == len(points(left))
    assert length(subtract(one, two)) + length(intersect(one, two)) == length(one)


def test_the_innermost_operators_work_and_a_known_one_counts_whole() -> None:
    outer, copied, matrix = (0.0, 10.0, "aten::linear"), (1.0, 2.0, "aten::t"), (3.0, 9.0, "aten::addmm")
    inside = (4.0, 5.0, "aten::resolve_conj")
    after = (10.0, 11.0, "aten::add")
    assert working([inside, matrix, outer, after, copied]) == [copied, matrix, after]


@pytest.mark.parametrize(
    ("category", "name"),
    [
        ("gemm", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT"),
        ("fp8_gemm", "nvjet_qqtst_128x128_128x6_1x2_h_bz_TNT"),
        ("fp8_gemm", "nvjet_sm100_rqtst_128x128_128x6"),
        ("fp8_gemm", "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128"),
        ("gemm", "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape, NoPermute>>"),
        ("attention", "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>"),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_27_128x64x128"),
        ("quantise", "void (anonymous namespace)::block_scaled_1d_cast_transpose_kernel<float, __nv_fp8_e4m3>"),
        ("moe", "_sort_chunks_by_map_kernel"),
        ("moe", "void transformer_engine::fused_topk_with_score_function_forward_kernel<float>"),
        ("moe", "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>"),
        ("optimizer", "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<float>>"),
        ("communication", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
        ("communication", "void deep_ep::intranode::dispatch<8, 768, 8192>"),
        ("communication", "gloo:all_reduce"),
        ("elementwise", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"),
        ("elementwise", "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>"),
        ("gemm", "aten::mm"),
        # from profiles of an H200 (torch 2.11, Transformer Engine 2.20.2)
        ("fp8_gemm", "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_Avec128_Bvec128_TNT"),
        ("gemm", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        (
            "gemm",
            "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleIJiiiEE",
        ),
        ("gemm", "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nt_align1>"),
        ("gemm", "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>"),
        ("attention", "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*)"),
        ("quantise", "transformer_engine::(anonymous namespace)::compute_scale_from_amax_kernel(float const*, float*)"),
        ("quantise", "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*)"),
        ("moe", "void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true, ReduceAdd>"),
        (
            "moe",
            "void transformer_engine::(anonymous namespace)::multi_padding_kernel<4, __nv_bfloat16>(MultiPaddingArgs)",
        ),
        ("moe", "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>"),
        (
            "optimizer",
            "void multi_tensor_apply_kernel<TensorListMetadata<1>, multi_tensor_l2norm::L2NormFunctor<float>>",
        ),
        # "lambda" is no LAMB
        (
            "elementwise",
            "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(TensorIteratorBase&)::{lambda()#3}>",
        ),
        ("elementwise", "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>"),
        ("elementwise", "void (anonymous namespace)::softmax_warp_forward<float, float, float, 5, false, false>"),
    ],
)
def test_a_kernel_is_known_by_its_name(category: str, name: str) -> None:
    assert category_of(name) == category
