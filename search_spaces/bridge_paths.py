"""Megatron Bridge's configuration paths, told as plain Megatron-Core knobs.

A user of Bridge writes "model.X", "comm_overlap.X", "mixed_precision.X", "ddp.X" ..., or a whole object by its name.
Bridge runs its parts in this order (0.6.2 training/config.py:1853, rule BRG-01): environment, mixed_precision.setup,
comm_overlap.setup, validation. So a field of the model that one of the two setups owns is overwritten wherever that
part exists; `flatten` keeps such a losing value under its path, and the rules TRAP-01 and TRAP-02 read it there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from search_spaces.bridge_recipes import PRECISION_DEFAULTS, precision_recipe

# Parts whose fields are Megatron-Core knobs or names of the training loop.
PLAIN = ("model", "ddp", "optimizer", "train", "dist", "rerun_state_machine", "rng", "checkpoint", "validation")
# Parts that keep their path: their names would collide with the model's.
KEPT = (
    "dataset", "scheduler", "logger", "tokenizer", "profiling", "ft", "peft", "straggler", "tensor_inspect",
    "nvrx_straggler", "inprocess_restart",
)  # fmt: skip
PARTS = (*PLAIN, *KEPT, "comm_overlap", "mixed_precision", "env_vars")
APPLY = "apply_flex_dispatcher_backend"
HARNESS_OVERLAP = "moe_a2a_overlap"
# Names that are Bridge's without a path, whatever their value.
BARE = ("comm_overlap", "mixed_precision", "dataset", APPLY, HARNESS_OVERLAP)
# Switched on in both the ddp and the optimizer where one has them on (rule BRG-02, config.py:1945-1981).
IN_STEP = ("use_distributed_optimizer", "overlap_param_gather")

# training/comm_overlap.py:354-373: the fields that comm_overlap.setup writes.
OF_COMM_OVERLAP = frozenset({
    "tp_comm_overlap", "tp_comm_bootstrap_backend", "overlap_p2p_comm", "batch_p2p_comm", "overlap_grad_reduce",
    "overlap_param_gather", "overlap_param_gather_with_optimizer_step", "align_param_gather", "bucket_size",
    "defer_embedding_wgrad_compute", "wgrad_deferral_limit", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
})  # fmt: skip
# Those that it writes as False where its own field is None (comm_overlap.py:434-439); the others follow the layout.
OFF_UNLESS_ASKED = frozenset({
    "tp_comm_overlap", "defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
})  # fmt: skip
OF_DATA_PARALLEL = frozenset({
    "overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step", "align_param_gather",
    "bucket_size",
})  # fmt: skip
# A path that overrides one field of a recipe tells what the recipe holds beside it.
_IMPLIED = {"mxfp8": "e4m3", "delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "hybrid"}


@dataclass(frozen=True)
class Flat:
    """What Bridge's paths set. `knobs`: plain names with the values in force, and under their path the values that are
    overwritten and the fields of `KEPT` parts. `env`: the recipe's variables; one that the job exports wins over them
    (config.py:1850). `is_bridge`: some path was found, so the launcher is Bridge.
    """

    knobs: Mapping[str, object]
    env: Mapping[str, str] = field(default_factory=dict)
    is_bridge: bool = False


@dataclass(frozen=True)
class _Setup:
    """One of the two parts that overwrite: whether it is there, its known fields, and whether these are all it has."""

    present: bool
    fields: Mapping[str, object]
    complete: bool = False


def flatten(knobs: Mapping[str, object], unread: Callable[[str], bool] | None = None) -> Flat:
    """Plain names mean "in force", but those that a whole comm_overlap or mixed_precision object owns mean the model's
    field. None is "not said". `unread`: whether a path ("checkpoint.save"; "profiling." a whole part) is left out.
    """
    given = split_paths(knobs)
    if not given:
        return Flat(dict(knobs))
    paths = {
        part: {name: value for name, value in fields.items() if not (unread and unread(f"{part}.{name}"))}
        for part, fields in given.items()
    }
    overlap, precision = _comm_overlap(paths), _mixed_precision(paths)
    plain = {name: value for name, value in knobs.items() if _split(name, value) is None}
    owned = {name for name in plain if overlap.complete and name in OF_COMM_OVERLAP}
    owned |= {name for name in plain if precision.complete and name in PRECISION_DEFAULTS}
    made = _of_parts(paths, overlap, precision)
    for name in owned:
        made |= _of_part("ddp" if name in OF_DATA_PARALLEL else "model", name, plain[name], overlap, precision)
    made |= {name: value for name, value in overlap.fields.items() if value is not None}
    made |= _precision_in_force(precision)
    made |= {name: value for name, value in plain.items() if name not in owned}
    made |= _harness(paths, made)
    if overlap.present:
        made |= _point_to_point(made)
    for part in KEPT:
        made |= {f"{part}.{name}".removesuffix("."): value for name, value in paths.get(part, {}).items()}
    if "dataset.seq_length" in made:
        made.setdefault("seq_length", made["dataset.seq_length"])
    env = {name: str(value) for name, value in paths.get("env_vars", {}).items() if name and value is not None}
    return Flat(made, env, is_bridge=True)


def _split(name: str, value: object) -> tuple[str, str] | None:
    """("model", "fp8") for "model.fp8" or "cfg.model.fp8"; None for a plain knob, such as "optimizer": "adam"."""
    part, dot, rest = name.removeprefix("cfg.").partition(".")
    if part in (*PARTS, *BARE) and (dot or part in BARE or isinstance(value, Mapping)):
        return part, rest.removeprefix("transformer.") if part == "model" else rest
    return None


def split_paths(knobs: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Part -> field -> value; a whole object is opened, has True under "", and a path wins over it."""
    found: dict[str, dict[str, object]] = {}
    for name, value in sorted(knobs.items(), key=lambda item: item[0].count(".")):
        if (at := _split(name, value)) is not None:
            part, rest = at
            found.setdefault(part, {}).update(_leaves(rest, value, deep=part in KEPT))
    return found


def _leaves(name: str, value: object, deep: bool) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping) or (name and not deep):
        yield name, value
        return
    yield name, True
    for key, inner in value.items():
        yield from _leaves(f"{name}.{key}".removeprefix("."), inner, deep)


def _comm_overlap(paths: Mapping[str, Mapping[str, object]]) -> _Setup:
    fields = paths.get("comm_overlap", {})
    whole = fields.get("")
    named = {name: value for name, value in fields.items() if name in OF_COMM_OVERLAP}
    return _Setup(bool(named) or whole not in (None, False), named, complete=whole is True)


def _mixed_precision(paths: Mapping[str, Mapping[str, object]]) -> _Setup:
    """A recipe by name, a whole object, single fields over either, or over a recipe that is not told."""
    fields = paths.get("mixed_precision", {})
    whole = fields.get("")
    named = {name: value for name, value in fields.items() if name in PRECISION_DEFAULTS}
    base = {} if whole is True else precision_recipe(whole) if isinstance(whole, str) else None
    if base is not None:
        return _Setup(True, {**PRECISION_DEFAULTS, **_synced(base), **_synced(named)}, complete=True)
    if not named:
        return _Setup(isinstance(whole, str), {})
    named = _synced(named)
    recipe = str(named.get("fp8_recipe"))
    # Every object of Bridge's has the default recipe, whatever its format: alone it says nothing.
    asked = recipe != PRECISION_DEFAULTS["fp8_recipe"] or named.get("fp8_param_gather")
    if recipe in _IMPLIED and asked and "fp8" not in named and not named.get("fp4"):
        named["fp8"] = _IMPLIED[recipe]
    if named.get("fp8_recipe") == "mxfp8" and named.get("fp8_param_gather"):
        named.setdefault("reuse_grad_buf_for_mxfp8_param_ag", True)
    return _Setup(True, named)


def _synced(fields: Mapping[str, object]) -> dict[str, object]:
    """fp8_param and fp8_param_gather are one field to Bridge, and so with fp4 (mixed_precision.py:77-94)."""
    synced = dict(fields)
    for one, other in (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")):
        if one in synced or other in synced:
            synced[one] = synced[other] = synced.get(one, synced.get(other))
    return synced


def _of_parts(paths: Mapping[str, Mapping[str, object]], overlap: _Setup, precision: _Setup) -> dict[str, object]:
    made: dict[str, object] = {}
    for part in PLAIN:
        for name, value in paths.get(part, {}).items():
            made |= _of_part(part, name, value, overlap, precision)
    for name in IN_STEP:
        if name in made and any(paths.get(part, {}).get(name) is True for part in ("ddp", "optimizer")):
            made[name] = True
    return made


def _of_part(part: str, name: str, value: object, overlap: _Setup, precision: _Setup) -> dict[str, object]:
    """One field of the model, ddp, optimizer or training loop: in force, or kept under its path as overwritten."""
    path = f"{part}.{name}"
    if not name or value is None:
        return {}
    if part in ("model", "ddp", "optimizer"):
        if precision.present and name in PRECISION_DEFAULTS:
            wins = precision.fields.get(name)
            unknown = name not in precision.fields and not name.startswith(("fp8", "fp4", "first_last", "num_layers"))
            return {name: value} if unknown or same(value, wins) else {path: value}
        if overlap.present and name in OF_COMM_OVERLAP:
            return _against_overlap(path, name, value, overlap.fields.get(name))
    return {_PLAIN_NAMES.get(path, name): value}


def _against_overlap(path: str, name: str, value: object, wins: object) -> dict[str, object]:
    if wins is not None or name in OFF_UNLESS_ASKED:
        return {name: value} if same(value, wins) else {path: value}
    # What the part's None becomes depends on the layout: rule TRAP-01 works it out.
    return {path: value, name: value} if value is True else {path: value}


_PLAIN_NAMES = {"rng.te_rng_tracker": "use_te_rng_tracker"}  # Bridge switches both on together (config.py:1277)


def same(value: object, other: object) -> bool:
    """Whether two values are one: off is None, and "e4m3 (set directly)" is "e4m3"."""
    return str(value).partition(" (")[0] == str(other).partition(" (")[0] or (not value and not other)


def _precision_in_force(setup: _Setup) -> dict[str, object]:
    """The known fields; of a whole recipe, without those that a format or a switch that is off makes idle."""
    fields = {name: value for name, value in setup.fields.items() if value is not None}
    if not setup.complete:
        return fields
    idle = {name for name in fields if name.startswith("fp8_") and not fields.get("fp8")}
    idle |= {name for name in fields if name.startswith("fp4_") and not fields.get("fp4")}
    idle |= {name for name in fields if name.startswith("num_layers") and not fields["first_last_layers_bf16"]}
    # Only where Bridge's default is not Megatron-Core's need a default be said.
    differ = ("fp8_recipe", "grad_reduce_in_fp32", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    idle |= {name for name, value in fields.items() if value == PRECISION_DEFAULTS[name] and name not in differ}
    return {name: value for name, value in fields.items() if name not in idle}


def _point_to_point(knobs: Mapping[str, object]) -> dict[str, object]:
    """comm_overlap's choice between pipeline stages (comm_overlap.py:453-463), where the user makes none."""
    stages, virtual = knobs.get("pipeline_model_parallel_size"), knobs.get("virtual_pipeline_model_parallel_size")
    if not isinstance(stages, int) or stages < 2 or not isinstance(virtual, int) or virtual < 2:
        return {}
    chosen = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return {name: value for name, value in chosen.items() if knobs.get(name) is None}


def _harness(paths: Mapping[str, Mapping[str, object]], others: Mapping[str, object]) -> dict[str, object]:
    """Switches of Bridge's functions and of its performance scripts; they stay under their names for the rules."""
    made: dict[str, object] = {}
    if (backend := paths.get(APPLY, {}).get("")) is not None:
        # flex_dispatcher_backend.py:97-99
        made |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        made |= {"moe_shared_expert_overlap": False}
    overlap = paths.get(HARNESS_OVERLAP, {}).get("")
    if overlap is True:
        made |= {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    made = {name: value for name, value in made.items() if others.get(name) is None}
    asked = {APPLY: backend, HARNESS_OVERLAP: overlap}
    return made | {name: value for name, value in asked.items() if value is not None}
