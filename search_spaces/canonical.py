"""One form for all settings that mean the same: what the stack changes is applied, what it ignores is dropped.

Names (TRAP-xx) are those of the catalogue of silent traps. What is *refused* because it would measure something else is
a rule; here is only what is benign: another word for the same run.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from search_spaces.candidate import MODULE_SEPARATOR, KnobValue, layout_of, modules

TP, EP, ETP = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP, VPP = "sequence_parallel", "virtual_pipeline_model_parallel_size"
EP_OVERLAP = "overlap_moe_expert_parallel_comm"
DISPATCHER, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
GRANULARITY, RECOMPUTED = "recompute_granularity", "recompute_modules"
IMPL, CAPTURED, CAPACITY = "cuda_graph_impl", "cuda_graph_modules", "moe_expert_capacity_factor"
MODULE_LISTS = (RECOMPUTED, CAPTURED, "offload_modules")
BOTH = {"megatron-bridge", "megatron-lm"}
BY_LAYER = ("transformer_engine", "local")
Knobs = Mapping[str, KnobValue]


class Canonical(NamedTuple):
    """`knobs`: the canonical form. `changed`: what the stack sets otherwise than requested, by knob. `notes`: what it
    ignores, in words."""

    knobs: dict[str, KnobValue]
    changed: dict[str, KnobValue]
    notes: tuple[str, ...]

    def resolved(self, requested: Knobs) -> dict[str, KnobValue]:
        """The request with what the stack changes, and still with what it ignores: what rules judge."""
        return {**requested, **self.changed}


class _Ignored(NamedTuple):
    """Knobs that mean nothing where `idle` holds."""

    knobs: tuple[str, ...]
    idle: Callable[[Knobs], bool]
    why: str


def _off(knob: str) -> Callable[[Knobs], bool]:
    return lambda knobs: not knobs.get(knob)


_IGNORED = (
    _Ignored(
        (BACKEND, "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms",
         "moe_hybridep_num_sms_preprocessing", "moe_permute_fusion_into_hybridep"),
        lambda knobs: knobs.get(DISPATCHER) != "flex" and knobs.get(BACKEND) != "ncclep",
        "without the flex dispatcher (TRAP-03)",
    ),
    _Ignored(
        ("moe_permute_fusion",), lambda knobs: knobs.get(DISPATCHER) == "flex" and knobs.get(BACKEND) == "hybridep",
        "with HybridEP (TRAP-09)",
    ),
    _Ignored(
        (RECOMPUTED,), lambda knobs: knobs.get(GRANULARITY) != "selective", "without selective recompute (TRAP-08)"
    ),
    _Ignored(
        ("recompute_method", "recompute_num_layers"), lambda knobs: knobs.get(GRANULARITY) != "full",
        "without full recompute",
    ),
    _Ignored((CAPTURED,), lambda knobs: knobs.get(IMPL, "none") not in BY_LAYER, "without graphs of layers (TRAP-14)"),
    _Ignored(("fp8_recipe", "fp8_wgrad"), _off("fp8"), "without fp8"),
    _Ignored(("fp4_recipe",), _off("fp4"), "without fp4"),
    _Ignored(
        ("offload_modules", "activation_offload_fraction"), _off("fine_grained_activation_offloading"),
        "without fine_grained_activation_offloading",
    ),
    _Ignored(("optimizer_offload_fraction",), _off("optimizer_cpu_offload"), "without optimizer_cpu_offload"),
    _Ignored(("moe_token_drop_policy",), _off(CAPACITY), "without moe_expert_capacity_factor"),
    _Ignored(("cross_entropy_fusion_impl",), _off("cross_entropy_loss_fusion"), "without cross_entropy_loss_fusion"),
    _Ignored(("manual_gc_interval",), _off("manual_gc"), "without manual_gc"),
    _Ignored(("bucket_size",), _off("overlap_grad_reduce"), "without overlap_grad_reduce (TRAP-26)"),
)  # fmt: skip


# Knobs whose value is what their absence means too.
_NOTHING_SAID: Mapping[str, Callable[[Knobs], bool]] = {
    GRANULARITY: lambda knobs: knobs.get(GRANULARITY) == "selective" and knobs.get(RECOMPUTED) == "",
    SP: lambda knobs: knobs.get(SP) is False and layout_of(knobs).tensor == 1,
    ETP: lambda knobs: knobs.get(ETP) == 1 and layout_of(knobs).tensor == 1,
    IMPL: lambda knobs: knobs.get(IMPL) == "none",
}


def canonical(
    requested: Knobs, launchers: frozenset[str] = frozenset(), installed: frozenset[str] = frozenset()
) -> Canonical:
    """The canonical form of knobs. `launchers`: those whose own habits apply ("megatron-bridge", "megatron-lm").
    `installed`: those that may run it, of which only what all launchers do is taken over."""
    changed = _changes(requested, launchers, installed)
    # An empty list is not an absent one (Megatron's default); None is.
    knobs = {name: value for name, value in {**requested, **changed}.items() if value is not None}
    for name in MODULE_LISTS:
        if name in knobs:
            knobs[name] = _sorted_list(knobs[name])
    for name in [name for name, said in _NOTHING_SAID.items() if said(knobs)]:
        del knobs[name]
    notes = []
    for ignored in _IGNORED:
        if found := [name for name in ignored.knobs if name in knobs and ignored.idle(knobs)]:
            notes.append(f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} ignored {ignored.why}")
    idle = {name for ignored in _IGNORED if ignored.idle(knobs) for name in ignored.knobs}
    return Canonical({n: v for n, v in knobs.items() if n not in idle}, changed, tuple(notes))


def _changes(knobs: Knobs, launchers: frozenset[str], installed: frozenset[str]) -> dict[str, KnobValue]:
    """What the stack sets by itself, or otherwise than requested."""
    changed: dict[str, KnobValue] = {}
    layout = layout_of(knobs)
    if knobs.get(ETP) is None and layout.tensor > 1:  # TRAP-07: two meshes for one request
        bridge = "megatron-bridge" in launchers and layout.expert > 1
        changed[ETP] = 1 if bridge else layout.tensor
    if layout.sequence_parallel and layout.tensor == 1 and (launchers | installed) & BOTH:
        changed[SP] = False  # TRAP-06; megatron-core itself refuses it
    if knobs.get(VPP) == 1 and not _interleaves_one_chunk(knobs, launchers):
        changed[VPP] = None  # one chunk a stage is the schedule without chunks
    if isinstance(factor := knobs.get(CAPACITY), int | float) and factor < 0:
        changed[CAPACITY] = None  # TRAP-24: dropless
    if knobs.get(GRANULARITY) == "selective" and knobs.get(RECOMPUTED) is None:
        changed[RECOMPUTED] = "core_attn"  # TRAP-08
    if knobs.get(IMPL) in BY_LAYER and knobs.get(CAPTURED) is None and not knobs.get("cuda_graph_scope"):
        changed[CAPTURED] = ""  # TRAP-15: the whole layer
    router = {"moe_router", "moe_preprocess"}
    captured = modules(knobs.get(CAPTURED))
    if knobs.get(IMPL) == "local" and len(router & set(captured)) == 1:
        missing = (router - set(captured)).pop()
        changed[CAPTURED] = MODULE_SEPARATOR.join((*captured, missing))  # TRAP-17
    return changed


def _interleaves_one_chunk(knobs: Knobs, launchers: frozenset[str]) -> bool:
    """Megatron-LM (arguments.py:944) and published tables mean "no chunks" by VPP 1; to megatron-core any number is
    the interleaved schedule, and the EP overlap's condition (transformer_config.py:2675) is met by it."""
    if "megatron-lm" in launchers:
        return False
    return "megatron-core" in launchers or (bool(knobs.get(EP_OVERLAP)) and layout_of(knobs).pipeline > 1)


def _sorted_list(value: KnobValue) -> str:
    return MODULE_SEPARATOR.join(sorted(set(modules(value))))
