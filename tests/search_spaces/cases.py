"""Small cases to try rules and spaces on: the tiny model on two CPU ranks, and on some H200s."""

from collections.abc import Mapping
from dataclasses import replace

from search_spaces.candidate import KnobValue
from search_spaces.presets import load_model
from search_spaces.rules import Case, Launcher
from search_spaces.shapes import ClusterShape, StackVersions, TrainingShape

TINY = load_model("tiny-moe")
LAPTOP_RANKS = ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=2)
TRAINING = TrainingShape(sequence_length=128, global_batch_size=16, params_dtype="fp32")
GPU_TRAINING = TrainingShape(sequence_length=128, global_batch_size=16)
STACK = StackVersions(
    megatron_core="0.19.2", torch="2.11.0+cu130", transformer_engine="2.20.2", nccl="2.28.9", cuda="13.0", apex="0.1"
)

# Short names, so that a table of cases stays readable.
SHORT = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mbs": "micro_batch_size",
    "p2p": "overlap_p2p_comm",
    "dispatcher": "moe_token_dispatcher_type",
    "backend": "moe_flex_dispatcher_backend",
    "overlap": "overlap_moe_expert_parallel_comm",
    "delay": "delay_wgrad_compute",
    "recompute": "recompute_granularity",
    "modules": "recompute_modules",
    "method": "recompute_method",
    "layers": "recompute_num_layers",
    "graphs": "cuda_graph_impl",
    "captured": "cuda_graph_modules",
}


def gpus(count: int, arch: str = "H200 sm_90") -> ClusterShape:
    """A cluster of `count` GPUs, all for one trial."""
    return ClusterShape(
        device="cuda", workers=count, workers_per_trial=count, workers_per_node=min(count, 8), gpu_arch=arch
    )


def cpus(count: int) -> ClusterShape:
    return ClusterShape(device="cpu", workers=count, workers_per_trial=count, workers_per_node=count)


def case(
    cluster: ClusterShape = LAPTOP_RANKS,
    model: Mapping[str, object] | None = None,
    training: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    stack: Mapping[str, object] | None = None,
    launchers: tuple[Launcher, ...] = (),
    **knobs: KnobValue,
) -> Case:
    """A case of the tiny model. `model`, `training` and `stack` change single facts; knobs by short or full name.

    Without `stack` the versions are unknown.
    """
    base = TRAINING if cluster.device == "cpu" else GPU_TRAINING
    made = Case(
        {SHORT.get(name, name): value for name, value in knobs.items()},
        TINY.model_copy(update=dict(model or {})),
        cluster,
        base.model_copy(update=dict(training or {})),
        dict(env or {}),
        launchers=frozenset(launchers),
    )
    return made if stack is None else replace(made, stack=STACK.model_copy(update=dict(stack)))
