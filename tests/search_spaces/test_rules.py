"""Every rule has a case that breaks it and one that just satisfies it; a rule without either fails here."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.named_spaces import LAPTOP, MOE_CORE
from search_spaces.rules import ALL_RULES, compute_capability
from search_spaces.rules.rule import Rule
from search_spaces.rules.versions import older
from search_spaces.shapes import ClusterShape
from search_spaces.space import Knob
from tests.search_spaces.cases import SHORT, case, cpus
from tests.search_spaces.examples import EXAMPLES
from tests.search_spaces.examples.clusters import BLACKWELL, H2, H8

BY_ID = {rule.id: rule for rule in ALL_RULES}


def test_every_rule_has_a_breaking_and_a_satisfying_case() -> None:
    assert set(EXAMPLES) == set(BY_ID)
    assert len(BY_ID) == len(ALL_RULES), "an id is used twice"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rule_refuses_what_breaks_it(name: str) -> None:
    reason = BY_ID[name].refusal(EXAMPLES[name][0])
    assert reason is not None
    assert reason.endswith(f"; {BY_ID[name].fix}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rule_accepts_what_just_satisfies_it(name: str) -> None:
    assert BY_ID[name].refusal(EXAMPLES[name][1]) is None


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.id)
def test_a_rule_names_its_source_its_cure_and_what_it_reads(rule: Rule) -> None:
    assert rule.source
    assert rule.fix
    assert rule.reads


def _values(knob: Knob) -> tuple[KnobValue, ...]:
    return (*knob.choices, None)


KNOBS = {knob.name: knob for knob in (*LAPTOP.knobs, *MOE_CORE.knobs) if not knob.is_env}
OTHERS: Mapping[str, tuple[KnobValue, ...]] = {
    "context_parallel_size": (1, 2),
    "fp4": (None, "e2m1"),
    "moe_expert_capacity_factor": (None, 1.0),
    "moe_pad_expert_input_to_capacity": (False, True),
    "moe_expert_rank_capacity_factor": (None, 1.5),
    "moe_shared_expert_overlap": (False, True),
    "tp_comm_overlap": (False, True),
    "fine_grained_activation_offloading": (False, True),
}
ANY_KNOBS = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from(_values(knob)) for name, knob in KNOBS.items()}
    | {name: st.sampled_from(values) for name, values in OTHERS.items()},
)
ENVIRONMENT = st.fixed_dictionaries(
    {},
    optional={
        "NVTE_USE_CUTLASS_GROUPED_GEMM": st.sampled_from(("0", "1")),
        "PYTORCH_CUDA_ALLOC_CONF": st.just("expandable_segments:True"),
        "NCCL_GRAPH_REGISTER": st.sampled_from(("0", "1")),
    },
)


@settings(max_examples=300, deadline=None)
@given(ANY_KNOBS, ENVIRONMENT, st.sampled_from((cpus(2), H2, H8, BLACKWELL)), st.booleans())
def test_a_rule_reads_no_knob_but_those_it_names(
    knobs: dict[str, KnobValue], env: dict[str, str], cluster: ClusterShape, versions: bool
) -> None:
    """Screening asks a rule as soon as what it names is decided: a hidden read would make pruning wrong."""
    full = case(cluster, env=env, stack={} if versions else None, **knobs)
    for rule in ALL_RULES:
        named = {name: value for name, value in knobs.items() if name in rule.reads}
        less = {name: value for name, value in env.items() if name in rule.reads}
        part = case(cluster, env=less, stack={} if versions else None, **named)
        assert rule.refusal(full) == rule.refusal(part), rule.id


@settings(max_examples=300, deadline=None)
@given(ANY_KNOBS, st.sampled_from((cpus(2), H2, H8, BLACKWELL)))
def test_to_a_rule_an_absent_knob_and_none_are_one(knobs: dict[str, KnobValue], cluster: ClusterShape) -> None:
    """Screening remembers answers under that assumption."""
    set_only = {name: value for name, value in knobs.items() if value is not None}
    for rule in ALL_RULES:
        assert rule.refusal(case(cluster, **knobs)) == rule.refusal(case(cluster, **set_only)), rule.id


def test_transformer_engine_is_needed_for_fp8_and_old_ones_for_less() -> None:
    def engine(version: str | None) -> str | None:
        return BY_ID["PRC-09"].refusal(case(H8, fp8="hybrid", stack={"transformer_engine": version}))

    assert engine(None)
    assert engine("1.6.0")
    assert engine("1.10.0") is None, "experts one by one"


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("H100 sm_90", (9, 0)),
        ("A100 sm_80", (8, 0)),
        ("GB300 sm_103", (10, 3)),
        ("RTX PRO 6000 sm_120", (12, 0)),
        ("H100 sm_90a", (9, 0)),
        ("H100", None),
        ("sm_9", None),
        (None, None),
    ],
)
def test_compute_capability(text: str | None, capability: tuple[int, int] | None) -> None:
    assert compute_capability(text) == capability


@pytest.mark.parametrize(
    ("version", "than", "expected"),
    [
        ("2.11.0+cu130", "2.6", False),
        ("2.5.1", "2.6", True),
        ("2.6.0dev0", "2.6", False),
        ("12.8", "12.9", True),
        ("13.0", "12.9", False),
        ("2.20.2", "2.19", False),
        ("2", "2.0.0", False),
    ],
)
def test_versions_compare_by_number(version: str, than: str, expected: bool) -> None:
    assert older(version, than) is expected


def test_short_names_are_knobs() -> None:
    assert set(SHORT.values()) <= {*KNOBS, *OTHERS}
