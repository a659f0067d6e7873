"""Rules of expert capacity, routing and the paged stash."""

import json

from search_spaces.candidate import KnobValue
from search_spaces.partial import PartialModel
from search_spaces.rules.rule import Case, Rule

FACTOR, PADDED, RANK_FACTOR = (
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_expert_rank_capacity_factor",
)  # fmt: skip
STASH, FUSER, OFFLOADED, LAYERWISE = (
    "moe_paged_stash", "use_transformer_engine_op_fuser", "offload_modules", "cpu_offloading",
)  # fmt: skip
DISPATCHER, BACKEND, EP = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "expert_model_parallel_size"
BALANCING, COEFFICIENT, FUSED = "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_fusion"
TOPK, SCORE, BIAS = "moe_router_topk", "moe_router_score_function", "moe_router_enable_expert_bias"
GROUPS, GROUP_TOPK, DEVICES = "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"
PRE_SOFTMAX, FORCED = "moe_router_pre_softmax", "moe_router_force_load_balancing"
DROPPING_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def items(value: KnobValue) -> tuple[object, ...]:
    """The parts of a value that may be a list: '["aux_loss", "none"]' -> its two words, 0.1 -> (0.1,)."""
    listed = json.loads(value) if isinstance(value, str) and value.startswith("[") else [value]
    return tuple(listed)


def balancing(case: Case) -> tuple[str, ...]:
    """Kinds of load balancing: the knob's where it says so, else the training job's."""
    given = case.knobs.get(BALANCING)
    return tuple(map(str, items(case.training.moe_router_load_balancing_type if given is None else given)))


def coefficients(case: Case) -> tuple[float, ...]:
    """Weights of the auxiliary losses. Absent beside a knob for their kind they are Megatron's default, 0."""
    given = case.knobs.get(COEFFICIENT)
    if given is not None:
        return tuple(float(str(each)) for each in items(given))
    return (case.training.moe_aux_loss_coeff if case.knobs.get(BALANCING) is None else 0.0,)


def topk(case: Case) -> int:
    """Experts a token goes to."""
    given = case.knobs.get(TOPK)
    return case.model.moe_router_topk if given is None else int(given)


def score(case: Case) -> str:
    """The router's score function."""
    return case.text(SCORE) or case.model.moe_router_score_function


def _listed(value: KnobValue) -> bool:
    return isinstance(value, str) and value.startswith("[")


def _capacity(case: Case) -> str | None:
    if case.knobs.get(FACTOR) is None:
        return None
    others = [kind for kind in balancing(case) if kind not in DROPPING_LOSSES]
    return f"{FACTOR} with load balancing by {' and '.join(others)}" if others else None


def _padding(case: Case) -> str | None:
    wrong = case.on(PADDED) and case.number(FACTOR, -1.0) < 0
    return f"{PADDED} without {FACTOR}" if wrong else None


def _stash(case: Case) -> str | None:
    if not case.on(STASH):
        return None
    if case.on(LAYERWISE):
        return f"{STASH} with cpu_offloading"
    if case.knobs.get(RANK_FACTOR) is None:
        return f"{STASH} without {RANK_FACTOR}"
    both = sorted({"expert_fc1", "moe_act", "fused_group_mlp"} & set(case.parts(OFFLOADED)))
    return f"{STASH} covers what offload_modules {', '.join(both)} move" if both else None


def _stash_never_used(case: Case) -> str | None:
    wrong = case.on(STASH) and not case.on(FUSER)
    return f"{STASH} without {FUSER} is never used" if wrong else None


def _no_rank_budget(case: Case) -> str | None:
    asked = [name for name in (RANK_FACTOR, STASH) if case.knobs.get(name)]
    wrong = asked and case.text(DISPATCHER, "allgather") != "flex"
    return f"{' and '.join(asked)} is ignored by any dispatcher but flex" if wrong else None


def _rank_overflow(case: Case) -> str | None:
    """The worst case is every token of EP ranks sent to the experts of one of them."""
    backend, factor = case.text(BACKEND, "deepep"), case.number(RANK_FACTOR, 0.0)
    if case.knobs.get(RANK_FACTOR) is None or case.text(DISPATCHER) != "flex" or backend not in ("hybridep", "ncclep"):
        return None
    ranks, chosen = case.layout.expert, topk(case)
    worst = ranks * min(chosen, case.model.num_moe_experts // ranks) / chosen
    forced = case.on(FORCED) or case.training.routing == "forced"
    if factor >= (1.0 if forced else worst):
        return None
    what = "drops tokens" if backend == "hybridep" else "stops with a trap"
    return f"{RANK_FACTOR} {factor:g}: a rank that gets more (at worst {worst:g}) {what}"


def _one_expert(case: Case) -> str | None:
    # Not said for a model that is known in full, a search's, the worker sets it (train_worker/megatron/config.py).
    if case.on(PRE_SOFTMAX) or (case.knobs.get(PRE_SOFTMAX) is None and not isinstance(case.model, PartialModel)):
        return None
    wrong = topk(case) == 1 and score(case) == "softmax" and balancing(case) != ("sinkhorn",)
    return "softmax over the one expert chosen is 1 and has no gradient" if wrong else None


def _groups(case: Case) -> str | None:
    chosen, groups = case.integer(GROUP_TOPK, 0), case.integer(GROUPS, 0)
    if not chosen:
        return None
    if case.on(DEVICES):
        return f"{GROUP_TOPK} with the deprecated {DEVICES}"
    if not groups:
        return f"{GROUP_TOPK} without {GROUPS}"
    if case.model.num_moe_experts % groups:
        return f"{case.model.num_moe_experts} experts do not split into {groups} groups"
    return f"{GROUP_TOPK} {chosen} of {groups} groups" if chosen > groups else None


def _narrow_groups(case: Case) -> str | None:
    chosen, groups = case.integer(GROUP_TOPK, 0), case.integer(GROUPS, 0)
    if not chosen or not groups or case.on(FUSED):
        return None
    each, size = topk(case) // chosen, case.model.num_moe_experts // groups
    return f"{each} experts of each group, which has {size}" if each > size else None


def _bias(case: Case) -> str | None:
    biased = case.model.moe_router_enable_expert_bias if case.knobs.get(BIAS) is None else case.on(BIAS)
    wrong = biased and score(case) not in ("sigmoid", "sqrtsoftplus")
    return f"an expert bias with the score function {score(case)}" if wrong else None


def _young_score(case: Case) -> str | None:
    return "no score function sqrtsoftplus in this release" if score(case) == "sqrtsoftplus" else None


def _sinkhorn(case: Case) -> str | None:
    wrong = balancing(case) == ("sinkhorn",) and any(coefficients(case))
    return f"sinkhorn routing with {COEFFICIENT} {max(coefficients(case)):g}" if wrong else None


def _quantile(case: Case) -> str | None:
    if balancing(case) != ("quantile_balancing",):
        return None
    wrong = [name for name in (FUSED,) if case.on(name)]
    wrong += [name for name in (GROUPS, GROUP_TOPK) if case.knobs.get(name) is not None]
    return f"quantile balancing with {' and '.join(wrong)}" if wrong else None


def _unequal_lists(case: Case) -> str | None:
    if not _listed(given := case.knobs.get(BALANCING)):
        return None
    weights = case.knobs.get(COEFFICIENT)
    wrong = not _listed(weights) or len(items(weights)) != len(items(given))
    return f"{len(items(given))} kinds of load balancing and {COEFFICIENT} {weights}" if wrong else None


_CONFIG, _MOE = "core/transformer/transformer_config.py", "core/transformer/moe"
_KIND = frozenset({BALANCING, COEFFICIENT})
# STA-01 before the traps: what the configuration refuses is said first.
RULES: tuple[Rule, ...] = (
    Rule(
        "CAP-01", frozenset({FACTOR, BALANCING}), _capacity, f"{_CONFIG}:1660",
        f"use one of {', '.join(DROPPING_LOSSES)}",
    ),
    Rule("CAP-02", frozenset({PADDED, FACTOR}), _padding, f"{_CONFIG}:1686", f"set {FACTOR}"),
    Rule(
        "STA-01", frozenset({STASH, RANK_FACTOR, LAYERWISE, OFFLOADED}), _stash, f"{_CONFIG}:1904",
        f"set {RANK_FACTOR} and do not offload the experts", since="0.18.0",
    ),
    Rule(
        "TRAP-12", frozenset({STASH, FUSER}), _stash_never_used, f"{_MOE}/experts.py:654, in _fused_forward alone",
        f"switch {FUSER} on or {STASH} off", since="0.18.0",
    ),
    Rule(
        "TRAP-03", frozenset({RANK_FACTOR, STASH, DISPATCHER}), _no_rank_budget,
        f"{_MOE}/token_dispatcher.py:1053,1525, the flex managers alone", f"set {DISPATCHER} to flex", since="0.18.0",
    ),
    Rule(
        "TRAP-11", frozenset({RANK_FACTOR, DISPATCHER, BACKEND, EP, TOPK, FORCED}), _rank_overflow,
        "MLM#6229, #5288; megatron-core token_dispatcher.py:1090,1565", f"raise {RANK_FACTOR} and watch the overflow",
        level="runtime risk", since="0.18.0",
    ),
    Rule(
        "CAP-03", frozenset({TOPK, SCORE, PRE_SOFTMAX, BALANCING}), _one_expert, f"{_CONFIG}:2329",
        f"set {PRE_SOFTMAX}",
    ),
    Rule(
        "CAP-04", frozenset({GROUP_TOPK, GROUPS, DEVICES}), _groups, f"{_CONFIG}:2338",
        f"choose {GROUPS} that divides the experts, and at most as many for {GROUP_TOPK}",
    ),
    Rule(
        "CAP-04b", frozenset({GROUP_TOPK, GROUPS, TOPK, FUSED}), _narrow_groups, f"{_MOE}/moe_utils.py:656",
        f"raise {GROUP_TOPK} or lower {GROUPS}", level="first step",
    ),
    Rule(
        "CAP-05", frozenset({BIAS, SCORE}), _bias, f"{_CONFIG}:2284", f"set {SCORE} to sigmoid or leave the bias out",
    ),
    Rule(
        "CAP-05b", frozenset({SCORE}), _young_score, "megatron-core 0.17.0 core/transformer/moe/moe_utils.py:728",
        "upgrade megatron-core to 0.18 or use sigmoid", level="first step", until="0.18.0",
    ),
    Rule(
        "CAP-06", _KIND, _sinkhorn, f"{_MOE}/router.py:295", f"set {COEFFICIENT} to 0", level="first step",
    ),
    Rule(
        "CAP-06b", frozenset({BALANCING, FUSED, GROUPS, GROUP_TOPK}), _quantile, f"{_MOE}/router.py:323",
        "leave them out or balance by an auxiliary loss", level="first step", since="0.19.0",
    ),
    Rule(
        "CAP-07", _KIND, _unequal_lists, f"{_CONFIG}:1652", f"give {COEFFICIENT} as a list, one number for each kind",
    ),
)  # fmt: skip
