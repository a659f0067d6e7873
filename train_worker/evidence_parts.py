"""Evidence of what is switched on for parts of the layers: recompute, and the modules that CUDA graphs hold. Pure."""

from collections.abc import Mapping

from search_spaces.candidate import KnobValue, modules
from train_worker.observed import IN_GRAPH, NO_LAYER, NO_MOE, Calls, Observed, Seen

Asked = Mapping[str, KnobValue]
# Which graph modules hold the code of a recomputed part (transformer_config.py, cuda_graph_modules).
HELD_BY = {
    "core_attn": ("attn",),
    "mla_up_proj": ("attn",),
    "layernorm": ("attn", "moe_router", "moe", "mlp"),
    "moe": ("moe",),
    "moe_act": ("moe",),
    "mlp": ("mlp",),
    "shared_experts": ("moe_router", "moe"),
}
PARTS_OF_MOE = ("moe", "moe_act")
NO_MODULE = "no such module on this rank"


def recompute(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
    if value == "full":
        return _full(asked, observed)
    named = modules(asked.get("recompute_modules"))  # they have a row of their own
    return _selective(asked, observed) if value == "selective" and not named else None


def _full(asked: Asked, observed: Observed) -> Seen:
    """Uniform: every layer again (recompute.py:166); block: the first of each chunk (:183), so any number but none."""
    calls = observed.parts.get("layer", Calls(forward=0, again=0))
    block = asked.get("recompute_method") == "block"
    if not observed.layers:
        return Seen(NO_LAYER, None)
    if observed.captured:
        return Seen(IN_GRAPH, None)
    active = calls.again > 0 if block else calls.again == calls.forward > 0
    return Seen(f"{calls.again} of {calls.forward} layer passes recomputed", active)


def recompute_modules(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
    selective = asked.get("recompute_granularity") == "selective"
    return _selective(asked, observed) if selective and modules(value) else None


def _selective(asked: Asked, observed: Observed) -> Seen:
    """Every module that is asked for (Megatron's own default is core_attn: transformer_config.py:408)."""
    names = modules(asked.get("recompute_modules")) or ("core_attn",)
    found = [(name, _recomputed(name, observed)) for name in names]
    seen = "; ".join(f"{name}: {one.seen}" for name, one in found)
    verdicts = {one.active for _, one in found}
    return Seen(seen, False if False in verdicts else True if True in verdicts else None)


def _recomputed(name: str, observed: Observed) -> Seen:
    calls = observed.parts.get(name, Calls(forward=0, again=0))
    if name in PARTS_OF_MOE and not observed.moe_layers:
        return Seen(NO_MOE, None)
    if name not in PARTS_OF_MOE and not observed.part_sizes.get(name):
        # A dense MLP or shared expert may be on other stages; where no stage has it, the readers have said so.
        return Seen(NO_MODULE, None)
    if not calls.again and observed.hidden(*HELD_BY[name]):
        return Seen(IN_GRAPH, None)
    if name == "moe_act" and "fused operations" in observed.experts:
        return Seen("inside Transformer Engine's fused operations, where no call is seen", None)
    # Norms: Megatron leaves one of a layer's two alone where a graph or FP8 needs it (transformer_layer.py:458).
    active = calls.again > 0 if name == "layernorm" else calls.again >= calls.forward > 0
    return Seen(f"recomputed in {calls.again} of {calls.forward} passes", active)


def graphs(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
    if value in (None, "none"):
        return None
    if not observed.layers:
        return Seen(NO_LAYER, None)
    named = modules(asked.get("cuda_graph_modules"))
    if named and not any(_here(name, observed) for name in named):
        return Seen(NO_MODULE, None)
    captured, replayed = observed.graphs_captured, observed.graphs_replayed
    return Seen(f"{captured} graphs captured, {replayed} replays in a step", 0 < captured <= replayed)


def graph_modules(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
    """A module that is replayed runs no Python: none of its eager calls is left. Named by the module of that name."""
    if asked.get("cuda_graph_impl", "none") == "none" or not modules(value):
        return None
    full = {name: observed.micro_batches * count for name in modules(value) if (count := _here(name, observed))}
    if not full:
        return Seen(NO_MODULE, None)
    eager = {name: observed.parts[name].forward for name in full}
    seen = ", ".join(f"{name}: {count} eager calls of {full[name]}" for name, count in eager.items())
    return Seen(seen, observed.graphs_replayed > 0 and all(eager[name] < full[name] for name in full))


def _here(module: str, observed: Observed) -> int:
    """How many of a graph module this rank has: a pipeline stage of dense layers alone has none of the router."""
    return observed.moe_layers if module == "moe_preprocess" else observed.part_sizes.get(module, 0)
