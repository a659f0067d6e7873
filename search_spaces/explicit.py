"""An explicit configuration, as a user writes it, told as a `Case` that the rules can judge.

The form is that of `moetune check`: stack, gpu_arch, world_size, model (facts, or a preset's name), knobs under their
Megatron-Core names (or Bridge's paths), env, framework. Facts may be missing; the rules that want them keep silent.
Pure: nothing of the stack is imported, so a configuration can be judged on any machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from search_spaces.bridge_paths import flatten
from search_spaces.candidate import KnobValue
from search_spaces.canonical import Canonical, canonical
from search_spaces.errors import InputError
from search_spaces.explicit_knobs import CaseFault, knob_fault, knob_value, shown, texts
from search_spaces.partial import PartialModel, PartialTraining
from search_spaces.pipeline_split import filled_split
from search_spaces.presets import gpu_named, load_model
from search_spaces.rules import Case, Launcher
from search_spaces.rules.versions import NEWEST, version_faults
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions
from search_spaces.space import nearest

# What MoE recipes of every launcher set and configurations therefore leave out.
ASSUMED: Mapping[str, KnobValue] = {
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "moe_router_dtype": "fp32", "bf16": True,
}  # fmt: skip
ASSUMED_DENSE: Mapping[str, KnobValue] = {"bf16": True}
FRAMEWORKS: Mapping[str, Launcher] = {
    "megatron-lm": "megatron-lm", "megatron-bridge": "megatron-bridge", "megatron-core": "megatron-core",
}  # fmt: skip
VERSIONS = {
    "mcore": "megatron_core", "megatron-core": "megatron_core", "te": "transformer_engine", "bridge": "megatron_bridge",
    "transformer-engine": "transformer_engine", "megatron-bridge": "megatron_bridge", "megatron-lm": "megatron_lm",
}  # fmt: skip
PACKAGES = ("deep_ep", "hybrid_ep")
TRAINING = {"seq_length": "sequence_length", "global_batch_size": "global_batch_size"}
# Flags of Megatron-LM whose field has another name.
FLAGS = {
    "num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "num_virtual_stages_per_pipeline_rank",
}  # fmt: skip
# Facts whose words the rules know more of than `ModelShape`: told as knobs too.
ALSO_KNOBS = ("moe_router_topk", "moe_router_score_function", "moe_router_enable_expert_bias", "num_moe_experts")
SAID_NONE = ("moe_flex_dispatcher_backend", "pipeline_dtype")  # null here is not the default
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
    name = str(raw.get("id", number))
    case = reader.case()
    if reader.faults or case is None:
        return Explicit(name, None, {}, tuple(reader.warnings), tuple(reader.faults))
    return Explicit(name, case, reader.effective, tuple(reader.warnings), ())


class _Reader:
    """Collects faults and warnings of one case on the way."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.faults: list[CaseFault] = []
        self.warnings: list[str] = []
        self.effective: dict[str, KnobValue] = {}

    def case(self) -> Case | None:
        flat = flatten(self._mapping("knobs"))
        env = {**flat.env, **texts(self._mapping("env"))}
        knobs = self._knobs(flat.knobs, env)
        stack, launchers = self._stack(), self._launchers(flat.is_bridge)
        model = self._model(knobs)
        cluster = self._cluster()
        if cluster is None or model is None or self.faults:
            return None
        knobs = {**(ASSUMED_DENSE if model.dense else ASSUMED), **knobs}
        knobs |= self._split(model, knobs)
        said = launchers if self.raw.get("framework") or flat.is_bridge else frozenset[Launcher]()
        form: Canonical = canonical(knobs, said)
        self.effective |= form.changed
        self.warnings += form.notes
        training = _training(knobs)
        return Case(form.resolved(knobs), model, cluster, training, env, self._packages(stack), launchers)

    def _mapping(self, name: str) -> dict[str, Any]:
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.faults.append(CaseFault(name, f"{name} must be a mapping, not {shown(value)}"))
            return {}
        return {str(key): inner for key, inner in value.items()}

    def _knobs(self, found: Mapping[str, object], env: dict[str, str]) -> dict[str, KnobValue]:
        knobs: dict[str, KnobValue] = {}
        for name, value in found.items():
            name = FLAGS.get(name, name)
            if name == "env":
                env |= texts(value) if isinstance(value, Mapping) else {}
            elif name.isupper():
                env |= texts({name: value})
            elif fault := knob_fault(name, value):
                self.faults.append(fault)
            else:
                knobs[name] = "none" if value is None and name in SAID_NONE else knob_value(name, value)
        return knobs

    def _stack(self) -> StackVersions | None:
        given = {
            VERSIONS.get(name.lower(), name.lower().replace("-", "_")): v for name, v in self._mapping("stack").items()
        }
        unknown = [name for name in given if name not in StackVersions.model_fields]
        for name in unknown:
            hint = nearest(name, list(StackVersions.model_fields))
            self.faults.append(CaseFault(name, f"no package {name!r} in stack", hint))
        versions = {name: None if v is None else str(v) for name, v in given.items() if name not in unknown}
        wrong, doubts = version_faults(versions)
        self.faults += [CaseFault(name, message, hint) for name, message, hint in wrong]
        self.warnings += doubts
        if not versions or unknown or wrong:
            return None
        return StackVersions(**{"megatron_core": NEWEST, "torch": "2.11.0", **versions})

    def _launchers(self, bridge_paths: bool) -> frozenset[Launcher]:
        framework = self.raw.get("framework")
        if framework is not None:
            if framework not in FRAMEWORKS:
                hint = nearest(str(framework), list(FRAMEWORKS))
                self.faults.append(CaseFault("framework", f"no framework {framework!r}", hint))
                return frozenset()
            return frozenset({FRAMEWORKS[framework]})
        stack = {str(name).lower().replace("-", "_") for name, value in self._mapping("stack").items() if value}
        found: set[Launcher] = {"megatron-bridge"} if bridge_paths or stack & {"bridge", "megatron_bridge"} else set()
        return frozenset(found | ({"megatron-lm"} if "megatron_lm" in stack else set()))

    def _packages(self, stack: StackVersions | None) -> StackVersions | None:
        """The DeepEP builds: assumed to be there unless the case says otherwise; no public configuration lists them."""
        if stack is None:
            return None
        given = {name: "assumed" for name in PACKAGES if name not in self._mapping("stack")}
        return stack.model_copy(update=given)

    def _model(self, knobs: dict[str, KnobValue]) -> PartialModel | None:
        given = self.raw.get("model", {})
        if isinstance(given, str):
            try:
                return PartialModel.of({**load_model(given.replace("_", "-")).model_dump(), **self._facts(knobs, {})})
            except InputError as error:
                self.faults += [CaseFault("model", fault.message, fault.hint) for fault in error.faults]
                return None
        return PartialModel.of(self._facts(knobs, self._mapping("model")))

    def _facts(self, knobs: dict[str, KnobValue], given: dict[str, Any]) -> dict[str, Any]:
        """Facts out of the model and, overriding it, out of knobs that are facts; other fields become knobs."""
        facts: dict[str, Any] = {}
        for name, value in [*given.items(), *((n, knobs.pop(n)) for n in [*knobs] if n in ModelShape.model_fields)]:
            name = FLAGS.get(name, name)
            if name in ModelShape.model_fields:
                self._fact(name, value, facts, knobs)
            elif name == "moe_layer_freq":
                _layer_frequency(value, facts, given)
            elif fault := None if name in MODEL_NOTES else knob_fault(name, value):
                self.faults.append(fault)
            elif name not in MODEL_NOTES:
                knobs.setdefault(name, knob_value(name, value))
        facts["dense"] = not facts.get("num_moe_experts") if isinstance(self.raw.get("model", {}), Mapping) else False
        if facts["dense"]:
            facts.pop("num_moe_experts", None)
        return (
            {"num_query_groups": facts.get("num_attention_heads"), **facts} if "num_attention_heads" in facts else facts
        )

    def _fact(self, name: str, value: Any, facts: dict[str, Any], knobs: dict[str, KnobValue]) -> None:
        if name in ALSO_KNOBS and value is not None:
            knobs[name] = value
        if name == "num_moe_experts" and value is None:
            return
        try:
            facts[name] = _fact_type(name).validate_python(value, strict=True)
        except ValidationError as error:
            if name == "moe_router_score_function":
                return  # a word the rules judge
            what = error.errors()[0]["msg"]
            self.faults.append(CaseFault(name, f"model.{name} {shown(value)}: {what}"))

    def _cluster(self) -> ClusterShape | None:
        world, arch = self.raw.get("world_size"), self.raw.get("gpu_arch")
        if not isinstance(world, int) or isinstance(world, bool) or world < 1:
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

    def _split(self, model: PartialModel, knobs: dict[str, KnobValue]) -> dict[str, KnobValue]:
        """The pipeline split that the public recipes of some models bring along and configurations leave out."""
        given = self.raw.get("model", {})
        name = given if isinstance(given, str) else str(self._mapping("model").get("name") or "")
        filled = filled_split(name, model, knobs)
        self.effective |= filled
        if filled:
            self.warnings.append(f"the layer split is not said; taken as recipes of {name} have it")
        return filled


def _training(knobs: Mapping[str, KnobValue]) -> PartialTraining:
    """bf16 unless the knobs say fp32; sequence length and global batch where they are said."""
    half = bool(knobs.get("bf16", True)) or bool(knobs.get("fp16"))
    dtype = str(knobs.get("params_dtype") or "").removeprefix("torch.")
    facts: dict[str, Any] = {"params_dtype": "fp32" if dtype in ("float32", "fp32") or not half else "bf16"}
    facts |= {fact: knobs[knob] for knob, fact in TRAINING.items() if knobs.get(knob) is not None}
    return PartialTraining.of(facts)


def _layer_frequency(value: Any, facts: dict[str, Any], model: Mapping[str, Any]) -> None:
    """`moe_layer_freq`: a list with 0 for each dense layer, or n for one MoE layer in n."""
    layers = model.get("num_layers")
    if isinstance(value, list):
        facts["first_dense_layers"] = sum(1 for each in value if not each)
    elif isinstance(value, int) and value > 1 and isinstance(layers, int):
        facts["first_dense_layers"] = layers - len(range(0, layers, value))


@cache
def _fact_type(name: str) -> TypeAdapter[Any]:
    field = ModelShape.model_fields[name]
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(kind)
