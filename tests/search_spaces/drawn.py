"""Candidates drawn at random over every knob of `moe-full`, on drawn targets: legal or not, active or not.

A uniform draw breaks a dozen rules at once and tells little of any of them. So most candidates start at the defaults or
at a rule's example, and what one rule reads is drawn anew: the neighbourhood where that rule decides.
"""

import random
from dataclasses import replace

from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.full_space import GRAPH_PARTS, MOE_FULL, OFFLOAD_PARTS, RECOMPUTE_PARTS
from search_spaces.partial import PartialModel
from search_spaces.presets import load_model
from search_spaces.rules import STACK_RULES, Case
from search_spaces.shapes import ModelShape, StackVersions, TrainingShape
from search_spaces.space import Knob
from tests.search_spaces.cases import gpus
from tests.search_spaces.examples import EXAMPLES

# Words and numbers that a space may be given though it does not list them, and some that nobody may give.
UNLISTED: dict[str, tuple[KnobValue, ...]] = {
    "tensor_model_parallel_size": (3, 16),
    "expert_tensor_parallel_size": (None, 3),
    "context_parallel_size": (3,),
    "pipeline_model_parallel_size": (3,),
    "expert_model_parallel_size": (3, 6, 48),
    "micro_batch_size": (3, 16),
    "virtual_pipeline_model_parallel_size": (1, 5),
    "num_layers_in_first_pipeline_stage": (0, 1, 2, 3, 4, 14),
    "num_layers_in_last_pipeline_stage": (0, 1, 2, 3, 4, 13),
    "pipeline_model_parallel_layout": (
        "Et|t|t|tL", "Ett|ttL", "E|t*4|L", "Ettt|tL", "Et*12|t*12L", "Et*24|t*24L", "Et*30|t*31L", "t|E", "Et|xL",
        "E|(t|)*4L", "Et*4L",
    ),
    "microbatch_group_size_per_vp_stage": (1, 2, 4, 8, 64),
    "recompute_granularity": ("layer",),
    "recompute_modules": ("", *RECOMPUTE_PARTS, "attn", "gdn_norm_out", "moe_act+moe+shared_experts"),
    "recompute_num_layers": (None, 0),
    "fp8_recipe": ("custom",),
    "cuda_graph_impl": ("te",),
    "cuda_graph_modules": ("", *GRAPH_PARTS, "mamba", "moe+moe_router", "moe_preprocess+attn", "attn+mlp", "attention"),
    "offload_modules": (
        "", *OFFLOAD_PARTS, "fused_group_mlp+moe_act", "core_attn+attn_proj+qkv_linear+expert_fc1", "moe",
    ),
    "activation_offload_fraction": (-0.1, 1.5),
    "moe_token_dispatcher_type": ("alltoall_seq",),
    "moe_flex_dispatcher_backend": ("nvshmem",),
    "moe_expert_capacity_factor": (-1.0, 0.0),
    "bucket_size": (1,),
}  # fmt: skip
KNOBS = {knob.name: knob for knob in MOE_FULL.knobs}
ASKED = [found for rule in STACK_RULES if (found := sorted(rule.reads & KNOBS.keys()))]

_TINY, _MIXED = load_model("tiny-moe"), load_model("deepseek-v3")
MODELS: tuple[ModelShape, ...] = (
    _TINY,
    load_model("qwen3-30b-a3b"),
    load_model("gpt-oss-20b"),
    _MIXED,
    _MIXED.model_copy(update={"num_layers": 64, "first_dense_layers": 0}),
    _TINY.model_copy(update={"num_layers": 8, "moe_shared_expert_intermediate_size": 64, "num_query_groups": 4}),
    _TINY.model_copy(update={"first_dense_layers": 1, "moe_router_topk": 1}),
)
GPUS = ("A100 sm_80", "H200 sm_90", "B200 sm_100", "RTX PRO 6000 sm_120")
WORLDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ENGINES = ("2.4.0", "2.5.0", "2.6.0", "2.7.0", "2.9.0", "2.10.0", "2.12.0", "2.14.0", "2.17.0", "2.18.0", "2.20.2")
TORCHES = ("2.4.1", "2.5.1", "2.6.0", "2.8.0+cu128", "2.11.0+cu130")


def _target(source: random.Random) -> Case:
    """A model, a cluster, a training job and a stack; no knobs."""
    stack = StackVersions(
        megatron_core="0.19.2", torch=source.choice(TORCHES), transformer_engine=source.choice(ENGINES),
        nccl=source.choice(("2.27.3", "2.30.4")), cuda=source.choice(("12.8", "13.0")),
        deep_ep=source.choice((None, "1.2.1")), hybrid_ep=source.choice((None, "1.2.1")),
        apex=source.choice((None, "0.1")),
    )  # fmt: skip
    training = TrainingShape(
        sequence_length=source.choice((128, 4096, 4098)), global_batch_size=source.choice((16, 64, 96, 512)),
        params_dtype=source.choice(("bf16", "bf16", "fp32")), optimizer=source.choice(("adam", "adam", "sgd")),
        moe_router_load_balancing_type=source.choice(("aux_loss", "seq_aux_loss", "none")),
    )  # fmt: skip
    cluster = gpus(source.choice(WORLDS), source.choice(GPUS))
    return Case({}, source.choice(MODELS), cluster, training, {}, stack)


def _targets(count: int) -> list[Case]:
    """One draw each costs hypothesis 20 times less than a draw of every fact: 2,000 cases in 10 s, not 25."""
    source = random.Random(3)
    return [_target(source) for _ in range(count)]


TARGETS = _targets(3000)


def values_of(knob: Knob) -> tuple[KnobValue, ...]:
    """Its choices and what else may be asked of it."""
    return (*knob.choices, *(each for each in UNLISTED.get(knob.name, ()) if each not in knob.choices))


def _spoken(case: Case) -> dict[str, KnobValue]:
    return {**case.knobs, **case.env}


def _starts() -> list[dict[str, KnobValue]]:
    """The examples of all rules; those that a candidate cannot say (lists as text, partial models) left out."""
    found: list[dict[str, KnobValue]] = []
    for example in (each for pair in EXAMPLES.values() for each in pair):
        spoken = _spoken(example)
        plain = not any(isinstance(v, str) and (v[:1] == "[" or n not in KNOBS) for n, v in spoken.items())
        if plain and spoken and not isinstance(example.model, PartialModel):
            found.append(spoken)
    return found


STARTS = _starts()
VALUES = {name: st.sampled_from(values_of(knob)) for name, knob in KNOBS.items()}
_NAMES = st.sampled_from(sorted(KNOBS))
_UNIFORM = st.fixed_dictionaries(VALUES)
_SUBJECTS, _BASES, _TARGETS = st.sampled_from(ASKED), st.sampled_from(STARTS), st.sampled_from(TARGETS)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, KnobValue]:
    """Values of knobs: all of them at random (1 in 8), those one rule reads, or an example with two changes."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return draw(_UNIFORM)
    base: dict[str, KnobValue] = dict(draw(_BASES)) if kind > 2 else {}
    names = draw(_SUBJECTS) if kind < 5 else [draw(_NAMES), draw(_NAMES)]
    return base | {name: draw(VALUES[name]) for name in names}


def _activated(asked: dict[str, KnobValue]) -> dict[str, KnobValue]:
    """With what makes the knobs that are asked for exist."""
    found = dict(asked)
    for knob in reversed(MOE_FULL.knobs):
        for condition in knob.when if knob.name in found else ():
            if condition.knob not in found:
                parent = KNOBS[condition.knob]
                fit = [value for value in parent.choices if condition.holds({condition.knob: value})]
                found[parent.name] = fit[len(fit) // 2]
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case on a drawn target: as a space makes it, or also with what is not active there."""
    asked, target, form = draw(requests()), draw(_TARGETS), draw(st.integers(0, 2))
    if form:
        asked = _activated(asked)
    decided: dict[str, KnobValue] = {}
    for knob in MOE_FULL.knobs:
        if MOE_FULL.active(decided, knob):
            decided[knob.name] = asked.get(knob.name, knob.default)
    beyond = {name: value for name, value in asked.items() if name not in KNOBS}
    given = {**decided, **beyond} if form == 1 else {**decided, **asked}
    env = {name: str(value) for name, value in given.items() if name.isupper() and value is not None}
    return replace(target, knobs={name: value for name, value in given.items() if not name.isupper()}, env=env)


def changed(case: Case) -> str:
    """What differs from the defaults and where, for a message."""
    knobs = {n: v for n, v in case.knobs.items() if n not in KNOBS or v != KNOBS[n].default}
    engine = case.stack.transformer_engine if case.stack else None
    where = f"{case.model.name}, {case.world} x {case.cluster.gpu_arch}, TE {engine}, {case.training.params_dtype}"
    return f"{knobs} {dict(case.env)} on {where}"
