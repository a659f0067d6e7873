"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible.

Written as a user of Bridge writes them, with paths.
"""

from search_spaces.bridge_paths import flatten
from search_spaces.rules import Case
from search_spaces.shapes import ClusterShape
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.examples.clusters import BLACKWELL, H8

GRACE = gpus(8, "GB200 sm_100")
OVERLAP = "overlap_moe_expert_parallel_comm"
PACKED = {"dataset.enable_offline_packing": True, "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "mlp"}
MXFP8 = {"mixed_precision.fp8_recipe": "mxfp8", "mixed_precision.fp8_param_gather": True}


def bridge(cluster: ClusterShape = H8, **paths: object) -> Case:
    """A case of a Bridge user: paths are flattened as `check` does it."""
    flat = flatten(paths)
    return case(cluster, launchers=("megatron-bridge",), **flat.knobs)  # type: ignore[arg-type]


EXAMPLES: dict[str, tuple[Case, Case]] = {
    "TRAP-01": (
        bridge(**{f"model.{OVERLAP}": True, "comm_overlap": {"tp_comm_overlap": False}, "ep": 2}),
        bridge(**{f"comm_overlap.{OVERLAP}": True, "comm_overlap": {"tp_comm_overlap": False}, "ep": 2}),
    ),
    "TRAP-02": (
        bridge(**{"model.fp8": "e4m3", "mixed_precision": "bf16_mixed"}),
        bridge(**{"mixed_precision.fp8": "e4m3", "mixed_precision": "bf16_mixed"}),
    ),
    "DSP-19": (
        bridge(GRACE, apply_flex_dispatcher_backend="deepep"),
        bridge(BLACKWELL, apply_flex_dispatcher_backend="deepep"),
    ),
    "TRAP-32": (
        bridge(**{"moe_a2a_overlap": False, f"comm_overlap.{OVERLAP}": True, "ep": 2}),
        bridge(**{"moe_a2a_overlap": True, f"comm_overlap.{OVERLAP}": True, "ep": 2}),
    ),
    "PRC-10": (
        bridge(BLACKWELL, **MXFP8, **{"mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": False}),
        bridge(BLACKWELL, **MXFP8, **{"mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": True}),
    ),
    "CGR-22": (
        bridge(cuda_graph_impl="local", cuda_graph_modules="attn"),
        bridge(cuda_graph_impl="transformer_engine", cuda_graph_modules="attn"),
    ),
    "CGR-24": (bridge(**PACKED), bridge(**PACKED, **{"dataset.pad_to_max_length": True})),
    "BRG-03": (
        bridge(**{"model.seq_length": 8192, "dataset.seq_length": 4096}),
        bridge(**{"model.seq_length": 4096, "dataset.seq_length": 4096}),
    ),
    "BRG-04": (
        bridge(**{"dataset.enable_offline_packing": True, "train.micro_batch_size": 2}),
        bridge(**{"dataset.enable_offline_packing": True, "train.micro_batch_size": 1}),
    ),
}
