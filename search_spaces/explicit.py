"""An explicit configuration, as a user writes it, told as a `Case` that the rules can judge.

The form is that of `moetune check`: stack, gpu_arch, world_size, model (facts, or a preset's name), knobs under their
Megatron-Core names (or Bridge's paths), env, framework. Facts may be missing; the rules that want them keep silent.
Pure: nothing of the stack is imported, so a configuration can be judged on any machine.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from search_spaces.bridge_fields import bridge_faults, read_nowhere
from search_spaces.bridge_paths import flatten
from search_spaces.candidate import KnobValue
from search_spaces.canonical import Canonical, canonical
from search_spaces.errors import InputError
from search_spaces.explicit_facts import dense_layers, fact_fault, frequency_fault, training_of
from search_spaces.explicit_knobs import LARGEST, UNSET, CaseFault, knob_fault, knob_value, shown, texts
from search_spaces.explicit_stack import read_stack
from search_spaces.launcher_words import FRAMEWORKS, MEGATRON_LM_ONLY, launchers_of, plain_words, virtual_stages
from search_spaces.partial import PartialModel
from search_spaces.pipeline_split import filled_split
from search_spaces.presets import gpu_named, load_model
from search_spaces.rules import Case, Launcher
from search_spaces.rules.releases import idle_words
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions
from search_spaces.space import nearest

# What MoE recipes of every launcher set and configurations therefore leave out.
ASSUMED: Mapping[str, KnobValue] = {
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "moe_router_dtype": "fp32", "bf16": True,
}  # fmt: skip
ASSUMED_DENSE: Mapping[str, KnobValue] = {"bf16": True}
PARTS = ("id", "stack", "gpu_arch", "world_size", "model", "knobs", "env", "framework")
# Facts whose words the rules know more of than `ModelShape`: told as knobs too.
ALSO_KNOBS = ("moe_router_topk", "moe_router_score_function", "moe_router_enable_expert_bias", "num_moe_experts")
SHARED = "moe_shared_expert_intermediate_size"
SAID_NONE = ("moe_flex_dispatcher_backend", "pipeline_dtype")  # null here is not the default
HINTED = 20  # faults of one configuration that get a search for the nearest known word
MODEL_NOTES = frozenset({"name", "note", "source", "notes"})


@dataclass(frozen=True)
class Explicit:
    """One configuration, read. `case` None: `faults` say why. `effective`: what the stack sets otherwise."""

    id: str
    case: Case | None
    effective: Mapping[str, KnobValue]
    warnings: tuple[str, ...]
    faults: tuple[CaseFault, ...]


def read_case(raw: Mapping[str, Any], number: int) -> Explicit:
    """Read the `number`-th configuration (from 1, its id where it has none). Lists every fault of it."""
    reader = _Reader(raw)
    name = str(number if raw.get("id") is None else raw["id"])
    case = reader.case()
    if reader.faults or case is None:
        return Explicit(name, None, {}, tuple(reader.warnings), tuple(reader.told()))
    return Explicit(name, case, reader.effective, tuple(reader.warnings), ())


class _Reader:
    """Collects faults and warnings of one case on the way."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.faults: list[CaseFault] = []
        self.warnings: list[str] = []
        self.effective: dict[str, KnobValue] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._origin: dict[str, str] = {}  # words as they stand in the file, where that is otherwise
        self._flags: frozenset[str] = frozenset()

    def case(self) -> Case | None:
        self._misspelt()
        given = self._words("knobs")
        self.faults += bridge_faults(given)
        flat = flatten(given, read_nowhere)
        exported = texts(self._mapping("env"))
        env = {**exported, **{name: value for name, value in flat.env.items() if exported.get(name) in (None, "unset")}}
        knobs = self._knobs(flat.knobs, env)
        stack, launchers = self._stack(), self._launchers(flat.is_bridge)
        if self.raw.get("env") == {} and launchers == {"megatron-lm"}:
            env = {**texts(dict.fromkeys(UNSET)), **env}  # nothing is exported, and no recipe brings variables along
        model = self._model(knobs)
        cluster = self._cluster()
        if cluster is None or model is None or self.faults:
            return None
        knobs = {**self._assumed(model, knobs), **knobs}
        knobs |= virtual_stages(model, knobs)
        knobs |= self._split(model, knobs)
        own = flat.is_bridge or not MEGATRON_LM_ONLY.isdisjoint(self._flags)
        said = launchers if self.raw.get("framework") or own else frozenset[Launcher]()
        self.warnings += idle_words(knobs, stack)
        form: Canonical = canonical(knobs, said, launchers)
        self.effective |= form.changed
        self.warnings += form.notes
        return Case(form.resolved(knobs), model, cluster, training_of(knobs), env, stack, launchers)

    def told(self) -> list[CaseFault]:
        """The faults, each under the word that stands in the file."""
        return [fault._replace(key=self._origin.get(fault.key, fault.key)) for fault in self.faults]

    def _mapping(self, name: str) -> dict[str, Any]:
        """A part of the configuration; {} where it is absent, or no mapping, which is a fault told once."""
        if name not in self._parts:
            value = self.raw.get(name)
            if value is not None and not isinstance(value, Mapping):
                self.faults.append(CaseFault(name, f"{name} must be a mapping, not {shown(value)}"))
            given = value if isinstance(value, Mapping) else {}
            self._parts[name] = {str(key): inner for key, inner in given.items()}
        return dict(self._parts[name])

    def _words(self, name: str) -> dict[str, Any]:
        """Knobs or facts with Megatron-LM's flags told as fields; knobs alone say that they are its flags."""
        spelt = plain_words(self._mapping(name))
        self._origin |= spelt.origin
        if name == "knobs":
            self._flags = spelt.flags
        return spelt.words

    def _misspelt(self) -> None:
        """A part under a wrong name would be passed over; keys that are nothing like one are the user's notes."""
        for name in (str(key) for key in self.raw):
            if name not in PARTS and (close := _part_meant(name)):
                self.faults.append(CaseFault(name, f"no key {name!r} in a configuration", f"did you mean {close}?"))

    def _knobs(self, found: Mapping[str, object], env: dict[str, str]) -> dict[str, KnobValue]:
        knobs: dict[str, KnobValue] = {}
        for name, value in found.items():
            if name == "env":
                env |= texts(value) if isinstance(value, Mapping) else {}
            elif name.isupper():
                env |= texts({name: value})
            elif fault := knob_fault(name, value, hint=len(self.faults) < HINTED):
                self.faults.append(fault)
            else:
                knobs[name] = "none" if value is None and name in SAID_NONE else knob_value(name, value)
        return knobs

    def _stack(self) -> StackVersions | None:
        found = read_stack(self._mapping("stack"))
        self.faults += found.faults
        self.warnings += found.warnings
        return found.stack

    def _launchers(self, bridge_paths: bool) -> frozenset[Launcher]:
        framework = self.raw.get("framework")
        if framework is not None and framework not in [*FRAMEWORKS]:
            hint = nearest(str(framework), list(FRAMEWORKS))
            self.faults.append(CaseFault("framework", f"no framework {shown(framework)}", hint))
            return frozenset()
        stack = [name for name, value in self._mapping("stack").items() if value]
        return launchers_of(framework, stack, self._flags, bridge_paths)

    def _model(self, knobs: dict[str, KnobValue]) -> PartialModel | None:
        given = self.raw.get("model")
        if not isinstance(given, str):
            facts = self._words("model")
            if not facts:
                self.warnings.append("model is not given: rules about its sizes were not asked")
            return PartialModel.of(self._facts(knobs, facts))
        try:
            facts = load_model(given.replace("_", "-")).model_dump()
        except InputError as error:
            self.faults += [CaseFault("model", fault.message, fault.hint) for fault in error.faults]
            return None
        return PartialModel.of(self._facts(knobs, facts))

    def _facts(self, knobs: dict[str, KnobValue], given: dict[str, Any]) -> dict[str, Any]:
        """Facts out of the model and, overriding it, out of knobs that are facts; other fields become knobs."""
        facts: dict[str, Any] = {}
        for name, value in [*given.items(), *((n, knobs.pop(n)) for n in [*knobs] if n in ModelShape.model_fields)]:
            if name in ModelShape.model_fields:
                self._fact(name, value, facts, knobs)
            elif name == "moe_layer_freq":
                layers = knobs.get("num_layers") or given.get("num_layers")
                if wrong := frequency_fault(value, layers):
                    self.faults.append(wrong)
                elif (dense := dense_layers(value, layers)) is not None:
                    facts["first_dense_layers"] = dense
            elif fault := None if name in MODEL_NOTES else knob_fault(name, value):
                self.faults.append(fault)
            elif name not in MODEL_NOTES:
                knobs.setdefault(name, knob_value(name, value))
        if wrong := frequency_fault(knobs.get("moe_layer_freq"), facts.get("num_layers")):
            self.faults.append(wrong)
        facts["dense"] = bool(given) and "num_moe_experts" not in facts
        if facts.get("moe_router_topk", 0) > facts.get("num_moe_experts", LARGEST):
            what = f"moe_router_topk {facts['moe_router_topk']} exceeds num_moe_experts {facts['num_moe_experts']}"
            self.faults.append(CaseFault("moe_router_topk", what))
        if "num_attention_heads" in facts:
            facts.setdefault("num_query_groups", facts["num_attention_heads"])
        return facts

    def _fact(self, name: str, value: Any, facts: dict[str, Any], knobs: dict[str, KnobValue]) -> None:
        if value is None:
            return  # not said
        if name == SHARED and value == 0 and not isinstance(value, bool):
            knobs[name] = 0  # rule DSP-23 knows it
            return
        if fault := fact_fault(name, value):
            self.faults.append(fault)
            return
        facts[name] = value
        if name in ALSO_KNOBS:
            knobs[name] = value

    def _cluster(self) -> ClusterShape | None:
        world, arch = self.raw.get("world_size"), self.raw.get("gpu_arch")
        if not isinstance(world, int) or isinstance(world, bool) or not 1 <= world <= LARGEST:
            message = "world_size is missing" if world is None else f"world_size {shown(world)} is no number of ranks"
            self.faults.append(CaseFault("world_size", message, "give the number of GPUs of the job"))
            return None
        try:
            gpu = gpu_named(str(arch)) if arch is not None else None
        except InputError as error:
            self.faults += [CaseFault("gpu_arch", fault.message, fault.hint) for fault in error.faults]
            return None
        if gpu is None:
            self.warnings.append("gpu_arch is not given: rules about the GPU were not asked")
        return ClusterShape(
            device="cuda", workers=world, workers_per_trial=world, gpu_arch=gpu.gpu_arch if gpu else None,
            workers_per_node=min(world, gpu.gpus_per_node if gpu else 8),
        )  # fmt: skip

    @staticmethod
    def _assumed(model: PartialModel, knobs: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        assumed = ASSUMED_DENSE if model.dense else ASSUMED
        return {**assumed, "bf16": not knobs.get("fp16")}

    def _split(self, model: PartialModel, knobs: dict[str, KnobValue]) -> dict[str, KnobValue]:
        """The pipeline split that the public recipes of some models bring along and configurations leave out."""
        given = self.raw.get("model")
        name = given if isinstance(given, str) else str(self._mapping("model").get("name") or "")
        filled = filled_split(name, model, knobs)
        self.effective |= filled
        if filled:
            self.warnings.append(f"the layer split is not said; taken as recipes of {name} have it")
        return filled


@lru_cache(maxsize=1000)  # the configurations of a file have the same keys
def _part_meant(name: str) -> str | None:
    close = difflib.get_close_matches(name, PARTS, n=1, cutoff=0.8)
    return close[0] if close else None
