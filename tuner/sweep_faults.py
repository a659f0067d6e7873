"""Finds what is wrong with a sweep file: words first, then values, then what does not fit together. All at once."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.hf_config import read_hf_config
from search_spaces.named_spaces import NAMED_SPACES
from search_spaces.presets import gpu_named, load_model, model_names
from search_spaces.rules import case_of, compute_capability, rules_for
from search_spaces.rules.versions import version_faults
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions, TrainingShape
from search_spaces.space import SearchSpace, nearest
from tuner.objective import BETTER
from tuner.sweep_spec import ModelChoice, SpaceChoice, SweepSpec
from tuner.sweep_yaml import PlacedData, parse, read_text

TRIED = 1000  # other defaults, to name one that can run


def checked(path: Path) -> tuple[SweepSpec, str, ModelShape, SearchSpace]:
    """The spec, text, model and space of a faultless file. Raises InputError with every fault, by line."""
    text = read_text(path)
    placed = parse(text, str(path))
    _refuse_other_documents(placed)
    _fill_direction(placed)
    spec, faults = _spec(placed)
    model, model_faults = _model(placed, path.parent)
    space, space_faults = _space(placed)
    named = [*placed.faults, *model_faults, *space_faults]
    places = {(fault.line, fault.column) for fault in named}  # what we word ourselves says more than pydantic does
    faults = [*named, *(fault for fault in faults if (fault.line, fault.column) not in places)]
    if model is not None and space is not None:
        faults += _misfits(placed, model, space)
    if faults or spec is None or model is None or space is None:
        unique = sorted(dict.fromkeys(faults), key=lambda fault: (fault.line, fault.column))
        raise InputError(unique, f"mend {path} and try again, or write a new one with `moetune init`")
    return spec, text, model, space


def _refuse_other_documents(placed: PlacedData) -> None:
    """A file of another kind or schema version has one fault: its keys mean nothing to us."""
    if not isinstance(placed.data, dict):
        raise InputError([placed.fault((), "not a sweep file: no keys at the top")], "write one with `moetune init`")
    version = placed.data.get("schema_version", 1)
    if version != 1 or isinstance(version, bool):
        fault = placed.fault(("schema_version",), f"schema_version {version!r} is unknown; this version reads 1")
        raise InputError([fault], "use the moetune that wrote it, or write a new one with `moetune init`")


def _fill_direction(placed: PlacedData) -> None:
    """A metric has one sensible direction, so the file need not say it."""
    objective = placed.data.get("objective") if isinstance(placed.data, dict) else None
    if isinstance(objective, dict) and isinstance(metric := objective.get("metric"), str) and metric in BETTER:
        objective.setdefault("direction", BETTER[metric])


def _parsed[Section: BaseModel](kind: type[Section], data: object) -> Section:
    """Strict, and through JSON: there a list is a tuple, an integer a float, and "4" no number."""
    return kind.model_validate_json(json.dumps(data), strict=True)


def _spec(placed: PlacedData) -> tuple[SweepSpec | None, list[Fault]]:
    try:
        return _parsed(SweepSpec, placed.data), []
    except ValidationError as error:
        return None, _worded(placed, error.errors())


def _section[Section: BaseModel](placed: PlacedData, name: str, kind: type[Section]) -> Section | None:
    """One part of the file, where that part alone is right."""
    data = placed.data.get(name) if isinstance(placed.data, dict) else None
    try:
        return None if data is None else _parsed(kind, data)
    except ValidationError:
        return None


def _worded(placed: PlacedData, errors: Iterable[Any]) -> list[Fault]:
    """pydantic's errors as faults; one a place, and a misspelt key is not also reported as missing."""
    faults: dict[tuple[object, ...], Fault] = {}
    meant: set[tuple[object, ...]] = set()
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        where = tuple(error["loc"])
        if error["type"] == "extra_forbidden":
            known = _keys_at(where[:-1])
            hint = nearest(str(where[-1]), known)
            meant |= {(*where[:-1], key) for key in known if hint == f"did you mean {key}?"}
            faults[where] = placed.fault(where, f"unknown key {where[-1]!r}", hint, at_key=True)
        elif error["type"] == "missing":
            if where not in meant:
                place = where[:-1]
                faults[where] = placed.fault(place, f"{'.'.join(map(str, where))} is missing", at_key=bool(place))
        else:
            known_place = _with_place(placed, where)
            faults.setdefault(known_place, _wrong_value(placed, known_place, error))
    return list(faults.values())


def _with_place(placed: PlacedData, where: Sequence[str | int]) -> tuple[str | int, ...]:
    """The longest part of `where` that the file has: pydantic appends names of union members."""
    path = tuple(where)
    while path and path not in placed.values:
        path = path[:-1]
    return path


def _wrong_value(placed: PlacedData, where: tuple[str | int, ...], error: Any) -> Fault:
    words = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    hint = nearest(str(error["input"]), words) if error["type"] == "literal_error" else ""
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool) and message.startswith("Input") else ""
    text = f"{'.'.join(map(str, where)) or 'file'}: {message[:1].lower()}{message[1:]}{shown}"
    return placed.fault(where, text, hint, at_key=isinstance(given, dict))


def _keys_at(where: Sequence[str | int]) -> list[str]:
    """The keys that the noun at `where` knows."""
    kind: type[BaseModel] | None = SweepSpec
    for part in where:
        annotation = kind.model_fields[str(part)].annotation if kind and str(part) in kind.model_fields else None
        options = [annotation, *get_args(annotation)]
        kind = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    return list(kind.model_fields) if kind else []


def _model(placed: PlacedData, folder: Path) -> tuple[ModelShape | None, list[Fault]]:
    choice = _section(placed, "model", ModelChoice)
    if choice is None:
        return None, []
    if choice.facts is not None:
        return choice.facts, []
    if choice.hf_config is not None:
        if (folder / choice.hf_config).exists() and not (folder / choice.hf_config).is_file():
            return None, [placed.fault(("model", "hf_config"), f"{choice.hf_config} is not a regular file")]
        try:
            return read_hf_config(folder / choice.hf_config), []
        except InputError as error:
            named = placed.fault(("model", "hf_config"), f"{choice.hf_config} cannot be used")
            return None, [named, *error.faults]
    name = str(choice.preset)
    if name not in model_names():
        return None, [placed.fault(("model", "preset"), f"no model preset {name!r}", nearest(name, model_names()))]
    return load_model(name), []


def _space(placed: PlacedData) -> tuple[SearchSpace | None, list[Fault]]:
    """Looks at the raw section, so that one wrong choice does not hide the others."""
    raw = placed.data.get("space") if isinstance(placed.data, dict) else None
    name = raw.get("name") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(name, str):
        return None, []
    space = NAMED_SPACES.get(name)
    if space is None:
        return None, [placed.fault(("space", "name"), f"no space {name!r}", nearest(name, list(NAMED_SPACES)))]
    choices = raw.get("choices", {})
    listed = {k: v for k, v in choices.items() if isinstance(v, list)} if isinstance(choices, dict) else {}
    faults = []
    for fault in space.choice_faults(cast(dict[str, list[KnobValue]], listed)):
        where = ("space", "choices", fault.knob) + (() if fault.position is None else (fault.position,))
        faults.append(placed.fault(where, fault.message, fault.hint, at_key=fault.position is None))
    choice = _section(placed, "space", SpaceChoice)
    return (None if faults or choice is None else space.restrict(choice.choices)), faults


def _misfits(placed: PlacedData, model: ModelShape, space: SearchSpace) -> list[Fault]:
    """What is right by itself and wrong together. Says nothing where a part it needs is wrong by itself."""
    cluster = _section(placed, "cluster", ClusterShape)
    training = _section(placed, "training", TrainingShape)
    if cluster is None or training is None:
        return []
    faults = _device_faults(placed, cluster)
    if training.sequence_length > model.max_position_embeddings:
        longest = f"{model.name} has positions for {model.max_position_embeddings}"
        where = ("training", "sequence_length")
        faults.append(placed.fault(where, f"sequence_length {training.sequence_length}: {longest}"))
    stack = _section(placed, "stack", StackVersions)
    faults += _version_faults(placed, stack)
    rules = rules_for(frozenset(), stack.megatron_core if stack else None)

    def refusals(candidate: Candidate) -> list[str]:
        case = case_of(candidate, model, cluster, training, stack)
        return [f"{reason} [{rule.id}]" for rule in rules if (reason := rule.refusal(case))]

    if refused := refusals(space.default()):
        hint = _listed_first(space, lambda candidate: not refusals(candidate))
        words = "the default configuration cannot run here"
        faults += [placed.fault(("space",), f"{words}: {why}", hint, at_key=True) for why in refused]
    return faults


def _listed_first(space: SearchSpace, can_run: Callable[[Candidate], bool]) -> str:
    """Which choices to list first so that the default can run: the first is it where a knob's own is not listed."""
    own = NAMED_SPACES[space.name].by_name
    knobs = [knob for knob in space.knobs if len(knob.choices) > 1 and knob.default != own[knob.name].default]
    points = list(islice(product(*(knob.choices for knob in knobs)), TRIED))
    points.sort(key=lambda point: sum(value != knob.default for value, knob in zip(point, knobs, strict=True)))
    for point in points:
        changed = {k.name: value for value, k in zip(point, knobs, strict=True) if value != k.default}
        if changed and can_run(space.canonical(changed)):
            listed = " and ".join(f"{json.dumps(value)} first under {name}" for name, value in changed.items())
            return f"the first choice listed is a knob's default where its own is not listed: put {listed}"
    return ""


def _device_faults(placed: PlacedData, cluster: ClusterShape) -> list[Fault]:
    if cluster.device == "cpu":
        wrong = cluster.gpu_arch is not None
        return [placed.fault(("cluster", "gpu_arch"), "gpu_arch on a cpu cluster")] if wrong else []
    if cluster.gpu_arch is None:
        return [placed.fault(("cluster",), 'cluster.gpu_arch is missing, such as "H200 sm_90"', at_key=True)]
    if compute_capability(cluster.gpu_arch) is None:
        message = f"gpu_arch {cluster.gpu_arch!r} names no compute capability"
        return [placed.fault(("cluster", "gpu_arch"), message, 'such as "H200 sm_90"')]
    try:
        gpu_named(cluster.gpu_arch)
    except InputError as error:
        return [placed.fault(("cluster", "gpu_arch"), fault.message, fault.hint) for fault in error.faults]
    return []


def _version_faults(placed: PlacedData, stack: StackVersions | None) -> list[Fault]:
    """Releases that no rule set fits; newer ones are only a warning (`tuner.sweep_warnings`)."""
    faults = version_faults(stack.model_dump())[0] if stack else []
    return [placed.fault(("stack", package), message, hint) for package, message, hint in faults]
