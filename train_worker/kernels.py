"""What a GPU did in one step: its events, what kind of work each is, and the arithmetic of their intervals. Pure.

On a CPU the working operators of torch are the events (and gloo's collectives), so that everything downstream is the
same there. Times are microseconds from the beginning of the step.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["kernel", "memcpy", "memset"]
Phase = Literal["forward", "backward", "reduction", "optimizer", "unknown"]
Category = Literal[
    "gemm", "fp8_gemm", "attention", "moe", "quantise", "optimizer", "elementwise", "communication", "memcpy"
]
Interval = tuple[float, float]


class GpuEvent(NamedTuple):
    """One kernel or copy. `phase` is where it was launched: recompute runs in "backward", and so do gradient
    reductions that overlap it, others in "reduction"; what the forward and the schedule launch (delayed weight
    gradients too) is "forward"; clearing the gradients before is the optimizer's. `shortest_us`: of a collective, its
    shortest run over the ranks, this one's included; None where that is not known."""

    name: str
    start_us: float
    duration_us: float
    stream: int
    kind: Kind = "kernel"
    phase: Phase = "unknown"
    size_bytes: int = 0  # of a copy; 0 where it was not said
    shortest_us: float | None = None

    @property
    def interval(self) -> Interval:
        return self.start_us, self.start_us + self.duration_us

    @property
    def transfer(self) -> Interval:
        """A collective's own part, at its end; before it the rank waited for the last of its peers."""
        start, end = self.interval
        return (start if self.shortest_us is None else max(start, end - self.shortest_us)), end

    @property
    def category(self) -> Category:
        return "memcpy" if self.kind != "kernel" else category_of(self.name)


class StepTrace(NamedTuple):
    """One profiled step of this rank. `host_calls`: CUDA calls by name (cudaLaunchKernel, cudaGraphLaunch), counted.

    `repeated`: micro-batches of a whole step for each one of this: a slow step is profiled with fewer.
    """

    events: tuple[GpuEvent, ...]
    step_time_us: float
    host_calls: dict[str, int]
    repeated: float = 1.0


# Read from the top: the first pattern that is found in the name decides. Templates carry misleading words (CUTLASS
# GEMMs say "NoPermute", flash attention is built on CUTLASS), so the specific come before the general.
_PATTERNS: tuple[tuple[Category, str], ...] = (
    # NCCL (ncclDevKernel_*, ncclSymk*), DeepEP, HybridEP, NVSHMEM, TE's userbuffers, torch's symmetric memory; gloo
    ("communication", r"nccl|deep_?ep|hybrid_?ep|nvshmem|userbuffers|multimem|(one|two)_shot_all|^gloo:|^c10d::"),
    # cuDNN (cudnn_generated_*_sdpa_*, cudnn::fusion::compute_dot_do_o), flash-attention 2 and 3, TE's softmax and THD
    (
        "attention",
        r"sdpa|flash|fmha|fused_attn|cudnn::fusion|cudnn_generated|scaled_(masked|upper|aligned|softmax)|attention",
    ),
    # The Hadamard transform of NVFP4 is a GEMM by name and a quantisation by purpose (TE common/hadamard_transform)
    ("quantise", r"hadamard|rht_gemm"),
    # cuBLASLt names the operand types, q for e4m3 and r for e5m2: nvjet_sm90_qqtst_*, qrtst backward (seen on an H200)
    ("fp8_gemm", r"nvjet_(sm\d+_)?([a-z]{0,2}[qr]{2})[a-z]*_|gemm.*(e4m3|e5m2|f8f8|fp8|float8|mxf)"),
    ("fp8_gemm", r"(e4m3|e5m2|f8f8|fp8|float8|float_e[45]m[23]|float_ue8m0|mxf[48]).*(gemm|xmma)"),
    ("gemm", r"nvjet|gemm|gemv|xmma|cublas|cutlass|splitk|^aten::(addmm|mm|bmm|baddbmm|dot|mv|addbmm)$"),
    # TE's fused router and permutation (CUDA and Triton), torch's sort, top-k and gather/scatter of the unfused path
    (
        "moe",
        r"permut|row_id_map|chunk_sort|sort_chunks|chunks_by_map|multi_(un)?padding|fused_topk|fused_score|moe_|router"
        r"|top_?k|radix_?sort|bitonic|segmented_sort|gather|scatter|index_|index(select|ing|func)|histogram|bincount|histc|nonzero|_scan|cumsum"
        r"|^aten::(sort|argsort|one_hot|masked_select)",
    ),
    (
        "quantise",
        r"quantize|cast_transpose|cast_(fp8|mxfp8|nvfp4|gated|kernel)|block_scal|blockwise|amax|delayed_scaling|fp8"
        r"|compute_scale|scale_inv|swizzle|nvfp4|mxfp8|float8|e4m3|e5m2|transformer_engine.*transpose|_transpose_kernel",
    ),
    ("optimizer", r"multi_tensor|adam|l2norm|\bsgd|_foreach_|^aten::_fused_(adam|sgd)"),
    ("memcpy", r"^memcpy|^memset"),
)
_COMPILED = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _PATTERNS)


@lru_cache(maxsize=8192)
def category_of(name: str) -> Category:
    """What work a kernel does, by its (demangled) name; "elementwise" is everything that no pattern knows."""
    return next((category for category, pattern in _COMPILED if pattern.search(name)), "elementwise")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same points; touching ones are joined. O(n log n)."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What of `left` lies outside `right`. Both sorted and disjoint, as `union` returns them. O(n + m)."""
    rest: list[Interval] = []
    index = 0
    for start, end in left:
        while index < len(right) and right[index][1] <= start:
            index += 1
        at = index
        while at < len(right) and right[at][0] < end:
            if right[at][0] > start:
                rest.append((start, right[at][0]))
            start = max(start, right[at][1])
            at += 1
        if start < end:
            rest.append((start, end))
    return rest


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What lies in both. Both sorted and disjoint. O(n + m)."""
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            both.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(disjoint: Iterable[Interval]) -> float:
    """Summed length of disjoint intervals, microseconds."""
    return sum(end - start for start, end in disjoint)


def working(spans: Iterable[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Of the nested operators (start, end, name) of one thread those that work: one of a known category counts whole
    (aten::mm, whatever it calls), else the innermost do. What is returned does not overlap."""
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    following = [*ordered[1:], (float("inf"), float("inf"), "")]
    chosen: list[tuple[float, float, str]] = []
    for span, after in zip(ordered, following, strict=True):
        if chosen and span[0] < chosen[-1][1]:
            continue
        if after[0] >= span[1] or category_of(span[2]) != "elementwise":
            chosen.append(span)
    return chosen


def is_disjoint(intervals: Sequence[Interval]) -> bool:
    """Whether the intervals are sorted and apart, as `union` returns them."""
    return all(left[1] < right[0] for left, right in pairwise(intervals))
