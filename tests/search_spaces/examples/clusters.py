"""Clusters and settings that the examples of several areas share."""

from search_spaces.candidate import KnobValue
from tests.search_spaces.cases import gpus

H8, H2, H1, BLACKWELL = gpus(8), gpus(2), gpus(1), gpus(8, "B200 sm_100")
ADA, AMPERE = gpus(8, "L40S sm_89"), gpus(8, "A100 sm_80")
CUTLASS = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FLEX = {"dispatcher": "flex"}
OVERLAP = {"overlap": True, "dispatcher": "alltoall", "ep": 2}
MLA = {"multi_latent_attention": True}
KEPT_NORM: dict[str, KnobValue] = {
    "recompute": "selective", "modules": "layernorm", "graphs": "transformer_engine",
}  # fmt: skip
