"""What the kernels of the profiled step add to the evidence. Pure.

A name that was seen on a real GPU (H200, torch 2.11, Transformer Engine 2.20.2, cuBLAS 13) may speak against a knob;
names that are only read from sources speak for it where they are found, and are silent where they are not.
"""

import re
from collections.abc import Callable, Mapping

from search_spaces.candidate import KnobValue
from train_worker.kernels import category_of
from train_worker.observed import NOT_HERE, Kernels, Seen

Asked = Mapping[str, KnobValue]
Check = Callable[[Asked, Kernels], Seen]
# In the name of every GEMM of the cuBLAS that was seen; with another one the names below have not been seen. cuDNN's
# names have the architecture too, whatever cuBLAS there is.
KNOWN_CUBLAS = re.compile(r"nvjet_sm90_")
BLOCKS = re.compile(r"[AB](blk|vec)128")  # nvjet_sm90_qrtst_..._Ablk128_Bvec128_TNN: scales by blocks of 128
CUTLASS_GROUPED = re.compile(r"GroupProblemShape")  # _ZN7cutlass13device_kernelI...17GroupProblemShape...
# Names from the sources: TE common/triton/permutation.py, common/fused_router, common/fused_rope, common/triton/
# cross_entropy.py; torch's Inductor names its kernels after the operators it fused.
NAMES = {
    "moe_permute_fusion": re.compile(r"_(un)?permute(_bwd_with_merging_probs)?_kernel|_sort_chunks_by_map_kernel"),
    "moe_router_fusion": re.compile(r"fused_topk"),
    "apply_rope_fusion": re.compile(r"fused_(qkv_)?rope|rotary_(fwd|bwd)_(q|kv)_kernel"),
    "cross_entropy_loss_fusion": re.compile(r"cross_entropy_(forward|backward|tp)"),
    "bias_activation_fusion": re.compile(r"triton_\w*silu"),
}


def both(calls: Seen, kernels: Seen | None) -> Seen:
    """One verdict of two observations: against beats for, and for beats cannot tell.

    A rank without what the knob is about has no kernels of it either, and they say nothing."""
    if kernels is None or calls.seen in NOT_HERE:
        return calls
    found = {calls.active, kernels.active}
    return Seen(f"{calls.seen}; {kernels.seen}", False if False in found else True if True in found else None)


def in_kernels(knob: str, asked: Asked, kernels: Kernels) -> Seen | None:
    """What the kernels say of one knob; None where they say nothing of it."""
    if knob in CHECKS:
        return CHECKS[knob](asked, kernels)
    pattern = NAMES.get(knob)
    if pattern is None:
        return None
    count = _count(kernels, lambda name: pattern.search(name) is not None)
    return Seen(f"{count} kernels named so", True if count else None)


def _count(kernels: Kernels, wanted: Callable[[str], bool]) -> int:
    return sum(kernel.count for kernel in kernels.kernels if wanted(kernel.name))


def _names_are_known(kernels: Kernels) -> bool:
    return _count(kernels, lambda name: KNOWN_CUBLAS.search(name) is not None) > 0


def _fp8(asked: Asked, kernels: Kernels) -> Seen:
    """nvjet_sm90_qqtst (e4m3 x e4m3) and _qrtst (e4m3 x e5m2); scaled by blocks in the blockwise recipe only."""
    names = [kernel for kernel in kernels.kernels if category_of(kernel.name) == "fp8_gemm"]
    count = sum(kernel.count for kernel in names)
    blocks = sum(kernel.count for kernel in names if BLOCKS.search(kernel.name))
    gemms = _count(kernels, lambda name: category_of(name) in ("gemm", "fp8_gemm"))
    seen = f"{count} of {gemms} GEMM kernels in FP8, {blocks} of them scaled by blocks"
    recipe = asked.get("fp8_recipe") or "delayed"
    if not _names_are_known(kernels) or recipe not in ("blockwise", "tensorwise"):
        return Seen(seen, True if count else None)
    return Seen(seen, blocks > 0 if recipe == "blockwise" else count > blocks)


def _cutlass(_: Asked, kernels: Kernels) -> Seen:
    """Transformer Engine falls back to one GEMM an expert without a word (other types, one expert)."""
    count = _count(kernels, lambda name: CUTLASS_GROUPED.search(name) is not None)
    return Seen(f"{count} grouped CUTLASS kernels", True if count else False if _names_are_known(kernels) else None)


def _grouped(_: Asked, kernels: Kernels) -> Seen:
    return Seen(f"{_count(kernels, lambda name: category_of(name) in ('gemm', 'fp8_gemm'))} GEMM kernels", None)


def _graphs(_: Asked, kernels: Kernels) -> Seen:
    return Seen(f"{kernels.graph_launches} graph launches", None)


def _hidden(_: Asked, kernels: Kernels) -> Seen:
    """Interval union, so that two streams at once count once. Names of NCCL's kernels are public and old."""
    hidden, whole = kernels.hidden_communication_s * 1e3, kernels.communication_s * 1e3
    return Seen(f"{hidden:.3g} of {whole:.3g} ms of communication under compute", None)


def _sent(_: Asked, kernels: Kernels) -> Seen:
    count = _count(kernels, lambda name: category_of(name) == "communication")
    return Seen(f"{count} communication kernels, {kernels.communication_s * 1e3:.3g} ms", None)


def _copied(_: Asked, kernels: Kernels) -> Seen:
    return Seen(f"{kernels.to_host_bytes:,} bytes copied to the host, {kernels.to_device_bytes:,} back", None)


CHECKS: dict[str, Check] = {
    "fp8": _fp8,
    "NVTE_USE_CUTLASS_GROUPED_GEMM": _cutlass,
    "moe_grouped_gemm": _grouped,
    "cuda_graph_impl": _graphs,
    "moe_token_dispatcher_type": _sent,
    "overlap_moe_expert_parallel_comm": _hidden,
    "overlap_grad_reduce": _hidden,
    "overlap_param_gather": _hidden,
    "moe_shared_expert_overlap": _hidden,
    "fine_grained_activation_offloading": _copied,
    "optimizer_cpu_offload": _copied,
}
