"""Rules of Megatron Bridge only: what its configuration layers overwrite, and what its own validation refuses.

They read what `bridge_paths.flatten` leaves: plain knobs are in force, a knob under its path ("model.fp8") was
overwritten, and fields of the data set keep their path. Lines are those of megatron-bridge 0.6.2.
"""

from search_spaces.bridge_paths import (
    APPLY,
    HARNESS_OVERLAP,
    OF_COMM_OVERLAP,
    OF_DATA_PARALLEL,
    OFF_UNLESS_ASKED,
    same,
)
from search_spaces.bridge_recipes import PRECISION_DEFAULTS
from search_spaces.candidate import KnobValue
from search_spaces.rules.rule import WORLD, Case, Launcher, Rule

IMPL, CAPTURED, SCOPE = "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"
PP, VPP, CP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size"
OVERLAP, DELAY = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"
MBS, SEQUENCE = "micro_batch_size", "seq_length"
OPTIMIZER, FSDP = "use_distributed_optimizer", "use_megatron_fsdp"
PARAM, GATHER, RECIPE, REUSE = "fp8_param", "fp8_param_gather", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"
PER_TOKEN, AVERAGE = "calculate_per_token_loss", "average_in_collective"
OFFLINE, IN_BATCH, SPECS = (
    "dataset.enable_offline_packing",
    "dataset.enable_in_batch_packing",
    "dataset.offline_packing_specs",
)
PAD_LENGTHS, PAD_SEQUENCES = f"{SPECS}.pad_cu_seqlens", "dataset.pad_to_max_length"
PAD_BY_KWARGS, DATASET = "dataset.dataset_kwargs.pad_to_max_length", "dataset"
BUCKET = 128 * 1024 * 1024
_OWNERS = ("model", "ddp", "optimizer")


def _overwritten(case: Case) -> str | None:
    lost = []
    for name in sorted(OF_COMM_OVERLAP):
        for owner in _OWNERS:
            value = case.knobs.get(f"{owner}.{name}")
            if value is not None and not same(value, wins := _after_overlap(case, name, value)):
                lost.append(f"{owner}.{name} {value} becomes {wins}")
    return f"comm_overlap overwrites it: {', '.join(lost)}" if lost else None


def _after_overlap(case: Case, name: str, value: KnobValue) -> KnobValue:
    """What comm_overlap.setup leaves in a field; the value itself where the field has no effect in this layout."""
    if name in OF_DATA_PARALLEL and case.knobs.get(OPTIMIZER) is False:
        return value  # it writes these only for the distributed optimizer
    asked = case.knobs.get(name)
    if name in OFF_UNLESS_ASKED or (asked is not None and not same(asked, value)):
        return asked if asked is not None else False
    staged = case.integer(PP, 1) > 1
    interleaved = staged and case.integer(VPP, 1) > 1
    if name in OF_DATA_PARALLEL:
        if case.data_parallel < 2:
            return value  # nothing to reduce
        by_layout: dict[str, KnobValue] = {
            "bucket_size": BUCKET, "align_param_gather": interleaved, "overlap_param_gather_with_optimizer_step": False,
        }  # fmt: skip
        return by_layout.get(name, True)
    if name in ("overlap_p2p_comm", "batch_p2p_comm"):
        return interleaved is (name == "overlap_p2p_comm") if staged else value
    if name == "tp_comm_bootstrap_backend":
        return "nccl" if case.on("tp_comm_overlap") else value
    return -1 if case.on("defer_embedding_wgrad_compute") else value


def _precision_overwritten(case: Case) -> str | None:
    paths = (f"{owner}.{name}" for name in PRECISION_DEFAULTS for owner in _OWNERS)
    lost = [path for path in paths if case.knobs.get(path) is not None]
    off = [name for name in lost if not case.knobs.get(name.partition(".")[2])]
    became = " (off in the run)" if off == lost else ""
    return f"mixed_precision overwrites {', '.join(lost)}{became}" if lost else None


def _falls_back(case: Case) -> str | None:
    backend = case.text(APPLY)
    if not backend:
        return None
    if backend not in ("deepep", "hybridep", "ncclep"):
        return f"{APPLY} does nothing for {backend!r}"
    if case.dense:
        return f"{APPLY} does nothing in a model without experts"
    if case.compute_capability is None:
        return None
    major = case.compute_capability[0]
    name = (case.cluster.gpu_arch or "").removeprefix("NVIDIA ")
    runs = {
        "deepep": major in (8, 9) or name.startswith(("B200", "B300")),
        "hybridep": major in (8, 9, 10),
        "ncclep": major in (9, 10),
    }
    return None if runs[backend] else f"{APPLY} turns {backend} into alltoall on {case.cluster.gpu_arch}"


def _harness(case: Case) -> str | None:
    asked = case.knobs.get(HARNESS_OVERLAP)
    if asked is True and case.knobs.get(DELAY) is False:
        return f"{HARNESS_OVERLAP} switches {DELAY} on as well"
    return f"{HARNESS_OVERLAP} false does not switch the overlap off" if asked is False and case.on(OVERLAP) else None


def _grad_buffer(case: Case) -> str | None:
    gathered = case.text(RECIPE) == "mxfp8" and (case.on(GATHER) or case.on(PARAM))
    wrong = gathered and not case.on(REUSE) and not case.on(FSDP)
    return "MXFP8 parameters are gathered without reuse of the gradient buffer" if wrong else None


def _full_iteration(case: Case) -> bool:
    impl = case.text(IMPL, "none")
    named = "full_iteration" in (*case.parts(CAPTURED), *case.text(SCOPE).split(","))
    return impl == "full_iteration" or (impl == "local" and named)


def _local_graphs(case: Case) -> str | None:
    wrong = case.text(IMPL) == "local" and not _full_iteration(case)
    return "Megatron Bridge has local CUDA graphs only of the full iteration" if wrong else None


def _packed_graphs(case: Case) -> str | None:
    if not case.on(OFFLINE):
        return None
    whole = _full_iteration(case)
    padded = case.on(PAD_SEQUENCES) or case.on(PAD_BY_KWARGS)
    if case.on(PAD_LENGTHS) and not padded:
        return f"{PAD_LENGTHS} without {PAD_SEQUENCES}"
    if not whole and case.text(IMPL) != "transformer_engine":
        return None
    if not padded:
        return f"CUDA graphs on packed sequences without {PAD_SEQUENCES}"
    captured = case.parts(CAPTURED)
    attention = whole or not captured or "attn" in captured
    return f"CUDA graphs of packed attention without {PAD_LENGTHS}" if attention and not case.on(PAD_LENGTHS) else None


def _lengths(case: Case) -> str | None:
    data = case.knobs.get("dataset.seq_length")
    if data is None:
        return None
    model = case.integer(SEQUENCE, 0) or case.training.sequence_length
    return f"sequences of {data} tokens in the data set, {model} in the model" if int(data) != model else None


def _packing(case: Case) -> str | None:
    offline, in_batch = case.on(OFFLINE), case.on(IN_BATCH)
    batch = case.integer(MBS, 1)
    if offline and in_batch:
        return f"{OFFLINE} and {IN_BATCH}"
    if case.on(SPECS) and case.knobs.get(OFFLINE) is False:
        return f"{SPECS} without {OFFLINE}"
    if offline and batch > 1:
        return f"{batch} packed sequences in a micro-batch"
    if in_batch and batch == 1:
        return "packing within a micro-batch of one sequence"
    tuned = offline or in_batch or any(word in case.text(DATASET) for word in ("SFT", "Finetun"))
    wrong = tuned and case.integer(CP, 1) > 1 and (not case.on(PER_TOKEN) or case.on(AVERAGE))
    return f"fine-tuning with CP {case.integer(CP, 1)} needs {PER_TOKEN} and no {AVERAGE}" if wrong else None


_BRIDGE: frozenset[Launcher] = frozenset({"megatron-bridge"})
_OVERLAP_PATHS = frozenset(f"{owner}.{name}" for owner in _OWNERS for name in OF_COMM_OVERLAP)
_PRECISION_PATHS = frozenset(f"{owner}.{name}" for owner in _OWNERS for name in PRECISION_DEFAULTS)
_CONFIG = "Bridge training/config.py"
RULES = (
    Rule(
        "TRAP-01", _OVERLAP_PATHS | OF_COMM_OVERLAP | WORLD | {VPP, OPTIMIZER}, _overwritten,
        "Bridge training/comm_overlap.py:604, BRG-01", "set it in comm_overlap", launchers=_BRIDGE,
    ),
    Rule(
        "TRAP-02", _PRECISION_PATHS | PRECISION_DEFAULTS.keys(), _precision_overwritten,
        "Bridge training/mixed_precision.py:138, BRG-01", "set it in mixed_precision", launchers=_BRIDGE,
    ),
    Rule(
        "DSP-19", frozenset({APPLY}), _falls_back, "Bridge training/flex_dispatcher_backend.py:59-87, TRAP-04",
        "ask for a backend that this GPU has, or for alltoall", launchers=_BRIDGE,
    ),
    Rule(
        "TRAP-32", frozenset({HARNESS_OVERLAP, OVERLAP, DELAY}), _harness,
        "Bridge scripts/performance (r0.6.0), NVIDIA-NeMo/Megatron-Bridge#6006", "set comm_overlap's fields instead",
        launchers=_BRIDGE,
    ),
    Rule(
        "PRC-10", frozenset({PARAM, GATHER, RECIPE, REUSE, FSDP}), _grad_buffer, f"{_CONFIG}:1356",
        f"switch {REUSE} on", launchers=_BRIDGE,
    ),
    Rule(
        "CGR-22", frozenset({IMPL, CAPTURED, SCOPE}), _local_graphs, "Bridge utils/cuda_graph.py:148",
        "use transformer_engine or full_iteration", launchers=_BRIDGE,
    ),
    Rule(
        "CGR-24",
        frozenset({OFFLINE, PAD_SEQUENCES, PAD_BY_KWARGS, PAD_LENGTHS, IMPL, CAPTURED, SCOPE}), _packed_graphs,
        f"{_CONFIG}:1165-1188", f"switch {PAD_SEQUENCES} and {PAD_LENGTHS} on", launchers=_BRIDGE,
    ),
    Rule(
        "BRG-03", frozenset({"dataset.seq_length", SEQUENCE}), _lengths, f"{_CONFIG}:1505",
        "give both the same length", launchers=_BRIDGE,
    ),
    Rule(
        "BRG-04", frozenset({OFFLINE, IN_BATCH, SPECS, DATASET, MBS, CP, PER_TOKEN, AVERAGE}), _packing,
        f"{_CONFIG}:1155-1160, 1440-1487",
        "offline packing: micro-batch 1; within the batch: more; with CP: calculate_per_token_loss", launchers=_BRIDGE,
    ),
)  # fmt: skip
