"""For each knob, what the observed step must show (`train_worker.observed.Observed`). Pure.

A check gets the requested value, all that was requested, and what was observed. It returns None where the value
switches nothing on; that depends on the request alone, so that all ranks of a gang give the same rows. It says "not
active" only where the code behind the knob would have been seen: a part inside a replayed CUDA graph runs no Python, a
stage without MoE layers dispatches nothing, and a first step tells nothing of buckets.
"""

from collections.abc import Callable

from search_spaces.candidate import KnobValue, modules
from train_worker.evidence_parts import Asked, graph_modules, graphs, recompute, recompute_modules
from train_worker.observed import (
    ALL_IN_BF16,
    IN_GRAPH,
    NO_LAYER,
    NO_MOE,
    NO_STATE,
    SHARES_NOTHING,
    Calls,
    Observed,
    Seen,
    Sent,
    told,
)

Check = Callable[[KnobValue, Asked, Observed], Seen | None]
Switch = Callable[[Observed], Seen]


def switched(check: Switch) -> Check:
    """The check of a switch: asked only where it is on."""
    return lambda value, _, observed: check(observed) if value is True else None


def in_layers(check: Switch) -> Check:
    """The same for what only transformer layers have: a stage without any cannot tell."""
    return switched(lambda observed: check(observed) if observed.layers else Seen(NO_LAYER, None))


def _dispatcher(value: KnobValue, _: Asked, observed: Observed) -> Seen | None:
    return _dispatched(str(value), observed, 0)


def _backend(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
    flex = asked.get("moe_token_dispatcher_type") == "flex"
    return _dispatched(str(value), observed, 1) if flex and value else None


def _dispatched(word: str, observed: Observed, place: int) -> Seen:
    """The classes that sent tokens: `place` 0 the dispatcher's, 1 that of a flex dispatcher's backend."""
    if not observed.moe_layers:
        return Seen(NO_MOE, None)
    seen = f"{told(observed.dispatched, 'dispatches')} by {observed.moe_layers} MoE layers"
    if not observed.dispatched and observed.hidden("moe"):
        return Seen(IN_GRAPH, None)
    return Seen(seen, {(found + "/").split("/")[place] for found in observed.dispatched} == {word})


def _experts(names: tuple[str, ...]) -> Switch:
    def check(observed: Observed) -> Seen:
        if not observed.moe_layers:
            return Seen(NO_MOE, None)
        if not observed.experts and observed.hidden("moe"):
            return Seen(IN_GRAPH, None)
        ran = bool(observed.experts) and set(observed.experts) <= set(names)
        return Seen(told(observed.experts, "forward passes"), ran)

    return check


def _pairs(observed: Observed) -> Seen:
    """model_chunk_schedule_plan.py:553: a layer forward with one backward. A single micro-batch pairs with none."""
    if observed.hidden():
        return Seen(IN_GRAPH, None)
    seen = f"{observed.paired_layers} of {observed.planned_layers} layer runs interleaved two micro-batches"
    return Seen(f"{seen}; {observed.micro_batches} micro-batches a step", observed.paired_layers > 0)


def _wgrads(observed: Observed) -> Seen:
    if observed.device == "cpu":
        return Seen("a CPU's layers compute their weight gradients at once", None)
    if not observed.delayed_wgrads and observed.hidden("attn", "moe"):
        return Seen(IN_GRAPH, None)
    return Seen(f"{observed.delayed_wgrads} weight gradients computed later", observed.delayed_wgrads > 0)


def _early(read: Callable[[Observed], Sent], what: str) -> Switch:
    def check(observed: Observed) -> Seen:
        sent = read(observed)
        total = sent.early + sent.late
        seen = f"{sent.early} of {total} {what}"
        if observed.first_step:
            return Seen(f"{seen}; a first step only learns the order of the buckets", None)
        if not total:
            if observed.hidden():
                return Seen(IN_GRAPH, None)
            return Seen(SHARES_NOTHING, None)
        return Seen(seen, sent.early > 0)

    return check


def _shared_overlap(observed: Observed) -> Seen:
    if not observed.part_sizes.get("shared_experts"):
        return Seen("no shared experts on this rank", None)
    if not observed.shared_overlapped and observed.hidden("moe"):
        return Seen(IN_GRAPH, None)
    count = observed.shared_overlapped
    return Seen(f"{count} shared-expert outputs computed by the dispatchers", count > 0)


def _fusion(knob: str, *held_by: str) -> Switch:
    def check(observed: Observed) -> Seen:
        count = observed.fused.get(knob, 0)
        elsewhere = _elsewhere(knob, observed)
        if not count and elsewhere:
            return Seen(elsewhere, None)
        if not count and observed.hidden(*held_by):
            return Seen(IN_GRAPH, None)
        return Seen(f"{count} calls of the fused functions", count > 0)

    return check


def _elsewhere(knob: str, observed: Observed) -> str | None:
    """Why a fused function need not have been called on this rank."""
    if knob == "cross_entropy_loss_fusion":
        return None if observed.last_stage else "the loss is on another stage"
    if knob == "bias_activation_fusion":
        return "Transformer Engine's fused operations have it" if "fused operations" in observed.experts else None
    if knob in ("moe_permute_fusion", "moe_router_fusion") and not observed.moe_layers:
        return NO_MOE
    if knob == "moe_permute_fusion" and any(word.startswith("flex/") for word in observed.dispatched):
        # token_dispatcher.py:1203, 1694: HybridEP and NCCL EP hand tokens over in the experts' order
        permutes = any(word == "flex/deepep" for word in observed.dispatched)
        return None if permutes else "this flex backend permutes itself"
    return None


def _projection(observed: Observed) -> Seen:
    calls = observed.parts.get("mla_down_proj", Calls(forward=0, again=0))
    if not calls.forward and observed.hidden("attn"):
        return Seen(IN_GRAPH, None)
    return Seen(f"{calls.forward} passes through the joined projection", calls.forward > 0)


def _cutlass(value: KnobValue, _: Asked, observed: Observed) -> Seen | None:
    """No call shows it: Transformer Engine chooses inside its own C++ (common/gemm/cublaslt_gemm.cu)."""
    if value != "1":
        return None
    if not observed.moe_layers:
        return Seen(NO_MOE, None)
    return Seen("a CPU has no such kernels" if observed.device == "cpu" else "no call shows it", None)


def _accumulated(observed: Observed) -> Seen:
    count = observed.fused_gradients
    if not count and observed.captured:
        return Seen(IN_GRAPH, None)
    return Seen(f"{count} weights had their gradient added up by the GEMM", count > 0)


def _offloading(observed: Observed) -> Seen:
    if observed.device == "cpu":
        return Seen("a CPU has no other memory to offload to", None)
    if not observed.offloaded_bytes and observed.captured:
        return Seen(IN_GRAPH, None)
    return Seen(told(observed.offloaded_bytes, "bytes to the host"), sum(observed.offloaded_bytes.values()) > 0)


def _offloaded(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
    """Each module by its own bytes: tensors under 2^20 elements stay (fine_grained_activation_offload.py:994)."""
    if asked.get("fine_grained_activation_offloading") is not True or not modules(value):
        return None
    if not observed.layers:
        return Seen(NO_LAYER, None)
    whole = _offloading(observed)
    if whole.active is None:
        return whole
    return Seen(whole.seen, all(observed.offloaded_bytes.get(name, 0) > 0 for name in modules(value)))


def _optimizer_on_host(observed: Observed) -> Seen:
    state = observed.optimizer
    if observed.device == "cpu":
        return Seen("a CPU's optimizer is on the host anyway", None)
    if not state.classes:
        return Seen(NO_STATE, None)
    where = f"{state.host_bytes:,} bytes of state on the host, {state.device_bytes:,} on the GPU"
    return Seen(f"{', '.join(state.classes)}: {where}", state.host_bytes > 0)


def _precision_aware(observed: Observed) -> Seen:
    """optimizer/__init__.py:574: main weights inside the optimizer, or moments below fp32. In FP8 other than delayed
    neither happens unless the moments' types are set (optimizer_config.py:404): the knob then changes nothing."""
    dtypes = observed.optimizer.dtypes
    if not observed.optimizer.classes:
        return Seen(NO_STATE, None)
    seen = ", ".join(f"{name} {'/'.join(found)}" for name, found in dtypes.items()) or "no state"
    small = any(set(found) != {"float32"} for name, found in dtypes.items() if name.startswith("exp_avg"))
    held = "master_param" in dtypes
    hybrid = "HybridDeviceOptimizer" in observed.optimizer.classes
    return Seen(f"{', '.join(observed.optimizer.classes)}: {seen}", held or small or hybrid)


def _low_precision(forms: tuple[str, ...]) -> Check:
    def check(value: KnobValue, asked: Asked, observed: Observed) -> Seen | None:
        if value in (None, "none"):
            return None
        found = {word: count for word, count in observed.precisions.items() if word.split("/")[0] in forms}
        if not observed.low_precision_layers:
            return Seen(ALL_IN_BF16, None)
        return Seen(told(found, "modules"), bool(found) and set(found) <= {f"{value}/{_recipe(asked)}"})

    def _recipe(asked: Asked) -> KnobValue:
        return "nvfp4" if "e2m1" in forms else asked.get("fp8_recipe") or "delayed"

    return check


def _quantized(observed: Observed) -> Seen:
    if not observed.low_precision_layers:
        return Seen(ALL_IN_BF16, None)
    return Seen(told(observed.quantized_parameters, "weights"), sum(observed.quantized_parameters.values()) > 0)


# At work where one rank sees it. A pipeline's first stage may run all its forward passes before a backward one and pair
# none (schedules.py, warm-up); its last one has the least to offload (fine_grained_activation_offload.py:1079).
ONE_RANK_IS_ENOUGH = frozenset(
    {"overlap_moe_expert_parallel_comm", "fine_grained_activation_offloading", "offload_modules"}
)
CHECKS: dict[str, Check] = {
    "moe_token_dispatcher_type": _dispatcher,
    "moe_flex_dispatcher_backend": _backend,
    "moe_grouped_gemm": switched(_experts(("TEGroupedMLP", "fused operations"))),
    "use_transformer_engine_op_fuser": switched(_experts(("fused operations",))),
    "recompute_granularity": recompute,
    "recompute_modules": recompute_modules,
    "cuda_graph_impl": graphs,
    "cuda_graph_modules": graph_modules,
    "overlap_moe_expert_parallel_comm": in_layers(_pairs),
    "delay_wgrad_compute": in_layers(_wgrads),
    "overlap_dispatch_backward_with_experts_wgrad": in_layers(_wgrads),
    "overlap_grad_reduce": switched(_early(lambda seen: seen.reductions, "reductions started by the backward pass")),
    "overlap_param_gather": switched(_early(lambda seen: seen.gathers, "gathers left open for the forward pass")),
    "moe_shared_expert_overlap": switched(_shared_overlap),
    "moe_permute_fusion": switched(_fusion("moe_permute_fusion", "moe_preprocess", "moe")),
    "moe_router_fusion": switched(_fusion("moe_router_fusion", "moe_router", "moe")),
    "bias_activation_fusion": in_layers(_fusion("bias_activation_fusion", "mlp", "moe", "moe_router")),
    "apply_rope_fusion": in_layers(_fusion("apply_rope_fusion", "attn")),
    "masked_softmax_fusion": in_layers(_fusion("masked_softmax_fusion", "attn")),
    "cross_entropy_loss_fusion": switched(_fusion("cross_entropy_loss_fusion")),
    "mla_down_proj_fusion": in_layers(_projection),
    "gradient_accumulation_fusion": in_layers(_accumulated),
    "fine_grained_activation_offloading": in_layers(_offloading),
    "offload_modules": _offloaded,
    "optimizer_cpu_offload": switched(_optimizer_on_host),
    "use_precision_aware_optimizer": switched(_precision_aware),
    "fp8": _low_precision(("hybrid", "e4m3")),
    "fp4": _low_precision(("e2m1",)),
    "fp8_param": switched(_quantized),
    "fp4_param": switched(_quantized),
    "NVTE_USE_CUTLASS_GROUPED_GEMM": _cutlass,
}
