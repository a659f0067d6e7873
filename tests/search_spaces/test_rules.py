"""Every rule has a case that breaks it and one that just satisfies it; a rule without either fails here."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.named_spaces import LAPTOP, MOE_CORE
from search_spaces.rules import ALL_RULES, Case, compute_capability
from search_spaces.rules.rule import Rule
from search_spaces.rules.versions import older
from search_spaces.shapes import ClusterShape
from search_spaces.space import Knob
from tests.search_spaces.cases import SHORT, case, cpus, gpus

H8, H2, H1, BLACKWELL = gpus(8), gpus(2), gpus(1), gpus(8, "B200 sm_100")
ADA, AMPERE = gpus(8, "L40S sm_89"), gpus(8, "A100 sm_80")
CUTLASS = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FLEX = {"dispatcher": "flex"}
OVERLAP = {"overlap": True, "dispatcher": "alltoall", "ep": 2}
MLA = {"multi_latent_attention": True}
KEPT_NORM: dict[str, KnobValue] = {
    "recompute": "selective", "modules": "layernorm", "graphs": "transformer_engine",
}  # fmt: skip

# Rule -> (breaks it, just satisfies it): the two differ in as little as possible.
EXAMPLES: dict[str, tuple[Case, Case]] = {
    "CPU-01": (case(dispatcher="flex"), case(H2, dispatcher="flex")),
    "CPU-02": (case(fp8="hybrid"), case(H2, fp8="hybrid")),
    "CPU-03": (case(graphs="local"), case(graphs="none")),
    "CPU-04": (case(overlap=True), case(overlap=False)),
    "CPU-05": (case(cp=2), case(cp=1)),
    "CPU-06": (case(modules="core_attn+moe_act"), case(modules="core_attn")),
    "CPU-07": (case(tp_comm_overlap=True), case(H2, tp_comm_overlap=True)),
    "CPU-08": (case(fine_grained_activation_offloading=True), case(fine_grained_activation_offloading=False)),
    "CPU-09": (case(env=CUTLASS), case(H2, env=CUTLASS)),
    "CPU-10": (case(moe_grouped_gemm=True), case(moe_grouped_gemm=False)),
    "CPU-11": (case(tp=2, model=MLA), case(H2, tp=2, model=MLA)),
    "DUP-15": (case(H2, env=CUTLASS), case(H2, env=CUTLASS, moe_grouped_gemm=True)),
    "DUP-14": (case(BLACKWELL, env=CUTLASS), case(H8, env=CUTLASS)),
    "DUP-13": (case(H8, env=CUTLASS, fp8="hybrid"), case(H8, env=CUTLASS)),
    "PAR-01": (case(tp=2, pp=2), case(cpus(4), tp=2, pp=2)),
    "PAR-02": (case(tp=2, ep=2), case(tp=2, ep=2, etp=1)),
    "PAR-03": (case(cpus(3), ep=3), case(cpus(4), ep=4)),
    "PAR-05": (case(cpus(8), tp=8), case(cpus(4), tp=4)),
    "PAR-06": (case(cpus(3), tp=3), case(cpus(4), tp=4)),
    "PAR-08": (case(sp=True), case(sp=True, tp=2)),
    "PAR-09": (case(tp=2), case(tp=2, sp=True)),
    "PAR-10": (case(vpp=2), case(vpp=2, pp=2)),
    "PAR-12": (case(cpus(3), pp=3), case(cpus(4), pp=4)),
    "PAR-13": (case(pp=2, vpp=4), case(pp=2, vpp=2)),
    "PAR-18": (case(H2, cp=2, training={"sequence_length": 126}), case(H2, cp=2, training={"sequence_length": 124})),
    "PAR-23": (case(mbs=16), case(mbs=8)),
    "PAR-24": (case(pp=2, vpp=2, mbs=16), case(pp=2, vpp=2, mbs=8)),
    "PAR-27": (case(pp=2, vpp=2), case(pp=2, vpp=2, p2p=True)),
    "PAR-30": (case(pp=2, p2p=True), case(pp=2, vpp=2, p2p=True)),
    "SHP-01": (case(tp=2, model={"vocab_size": 511}), case(tp=2, model={"vocab_size": 510})),
    "SHP-02": (
        case(tp=2, sp=True, training={"sequence_length": 127}),
        case(tp=2, sp=True, training={"sequence_length": 126}),
    ),
    "SHP-03": (case(tp=2, etp=2, model={"moe_ffn_hidden_size": 127}), case(tp=2, model={"moe_ffn_hidden_size": 126})),
    "SHP-04": (
        case(tp=2, model={"first_dense_layers": 1, "ffn_hidden_size": 255}),
        case(tp=2, model={"first_dense_layers": 0, "ffn_hidden_size": 255}),
    ),
    "DUP-01": (case(pp=2, vpp=1), case(pp=2, vpp=2)),
    "DSP-01": (case(dispatcher="alltoall_seq"), case(dispatcher="alltoall")),
    "DSP-02": (case(H8, **FLEX, backend="nvshmem"), case(H8, **FLEX, backend="hybridep")),
    "DSP-05": (case(dispatcher="alltoall", backend="deepep"), case(dispatcher="flex", backend="deepep")),
    "DSP-07": (case(H8, **FLEX, backend="deepep"), case(H8, **FLEX, backend="deepep", ep=2)),
    "DSP-08": (case(H8, **FLEX, stack={}), case(H8, **FLEX, stack={"deep_ep": "1.2.1"})),
    "DSP-11": (
        case(H8, **FLEX, backend="ncclep"),
        case(H8, **FLEX, backend="ncclep", moe_expert_rank_capacity_factor=1.5),
    ),
    "DSP-15": (
        case(H8, **FLEX, backend="ncclep", stack={"nccl": "2.30.4"}),
        case(H8, **FLEX, backend="ncclep", stack={"nccl": "2.30.4", "transformer_engine": "2.18.0"}),
    ),
    "DSP-17": (case(gpus(12), **FLEX, ep=12), case(gpus(16), **FLEX, ep=16)),
    "DSP-18": (
        case(H8, **FLEX, backend="hybridep", fp8="hybrid"),
        case(H8, **FLEX, backend="hybridep", fp8="hybrid", model={"hidden_size": 512}),
    ),
    "DSP-20": (case(gpus(4, "GB200 sm_100"), **FLEX, ep=4), case(BLACKWELL, **FLEX, ep=4)),
    "OVL-01": (case(H8, overlap=True, stack={"torch": "2.5.1"}), case(H8, overlap=True, stack={"torch": "2.6.0"})),
    "OVL-02": (case(H8, overlap=True, pp=2), case(H8, overlap=True, pp=2, vpp=2)),
    "OVL-03": (case(H8, overlap=True), case(H8, overlap=True, ep=2)),
    "OVL-04": (case(H8, overlap=True), case(H8, overlap=True, dispatcher="alltoall")),
    "OVL-05": (case(H8, overlap=True, recompute="full"), case(H8, overlap=True, recompute="selective")),
    "OVL-06": (case(H8, overlap=True, method="block"), case(H8, method="block")),
    "OVL-07": (case(H8, overlap=True, layers=1), case(H8, overlap=True, layers=None)),
    "OVL-08": (case(H8, overlap=True, modules="layernorm+moe"), case(H8, overlap=True, modules="layernorm+moe_act")),
    "OVL-09": (case(H8, overlap=True, training={"params_dtype": "fp32"}), case(H8, overlap=True)),
    "OVL-11": (
        case(H8, overlap=True, graphs="transformer_engine", captured="attn+moe"),
        case(H8, overlap=True, graphs="transformer_engine", captured="attn+moe_router"),
    ),
    "OVL-12": (
        case(H8, overlap=True, graphs="transformer_engine"),
        case(H8, overlap=True, graphs="transformer_engine", captured="attn"),
    ),
    "OVL-13": (case(H8, delay=True), case(H8, delay=True, overlap=True)),
    "OVL-14": (
        case(H8, delay=True, graphs="transformer_engine", stack={"transformer_engine": "2.9.0"}),
        case(H8, delay=True, graphs="transformer_engine", stack={"transformer_engine": "2.10.0"}),
    ),
    "TRAP-29": (case(H2, **OVERLAP, mbs=8), case(H2, **OVERLAP, mbs=4)),
    "DUP-02": (case(pp=2, overlap_grad_reduce=True), case(tp=2, etp=1, overlap_grad_reduce=True)),
    "DUP-03": (case(pp=2, use_distributed_optimizer=True), case(use_distributed_optimizer=True)),
    "OPT-01": (
        case(use_distributed_optimizer=True, training={"optimizer": "sgd"}),
        case(use_distributed_optimizer=False, training={"optimizer": "sgd"}),
    ),
    "RCP-01": (case(recompute="partial"), case(recompute="selective")),
    "RCP-02": (case(recompute="full", layers=1), case(recompute="full", method="block", layers=1)),
    "RCP-03": (case(recompute="full", layers=3, pp=2), case(recompute="full", layers=2, pp=2)),
    "RCP-04": (case(recompute="selective", method="block"), case(recompute="selective")),
    "RCP-07": (case(recompute="selective", modules="attn"), case(recompute="selective", modules="core_attn")),
    "RCP-08": (
        case(H2, recompute="selective", modules="layernorm+moe_act"),
        case(H2, recompute="selective", modules="layernorm+moe_act", moe_grouped_gemm=True),
    ),
    "RCP-09": (
        case(recompute="selective", modules="mla_up_proj"),
        case(recompute="selective", modules="mla_up_proj", model=MLA),
    ),
    "RCP-10": (case(recompute="selective", modules="gdn_norm_out"), case(modules="gdn_norm_out")),
    "RCP-13": (
        case(H8, recompute="selective", modules="layernorm", fp8="hybrid"),
        case(H8, recompute="selective", modules="layernorm", fp8="hybrid", fp8_recipe="blockwise"),
    ),
    "DUP-04": (
        case(recompute="selective", modules="shared_experts"),
        case(recompute="selective", modules="shared_experts", model={"moe_shared_expert_intermediate_size": 128}),
    ),
    "DUP-05": (
        case(recompute="selective", modules="mlp"),
        case(recompute="selective", modules="mlp", model={"first_dense_layers": 1}),
    ),
    "DUP-06": (case(modules="moe"), case(recompute="selective", modules="moe")),
    "DUP-07": (case(layers=1), case(layers=1, recompute="full")),
    "DUP-08": (
        case(recompute="full", method="block", layers=1, pp=2, vpp=2),
        case(recompute="full", method="block", layers=1, pp=2),
    ),
    "UNK-01": (case(H8, fp8="hybrid", fp8_recipe="mxfp4"), case(H8, fp8="hybrid", fp8_recipe="mxfp8")),
    "PRC-07": (case(BLACKWELL, fp8="hybrid", fp4="e2m1"), case(BLACKWELL, fp4="e2m1")),
    "PRC-09": (
        case(H8, fp8="hybrid", moe_grouped_gemm=True, stack={"transformer_engine": "1.10.0"}),
        case(H8, fp8="hybrid", moe_grouped_gemm=True, stack={"transformer_engine": "1.11.0"}),
    ),
    "PRC-12": (
        case(BLACKWELL, fp8="hybrid", fp8_recipe="mxfp8", training={"sequence_length": 48}),
        case(BLACKWELL, fp8="hybrid", fp8_recipe="tensorwise", training={"sequence_length": 48}),
    ),
    "HW-01": (case(AMPERE, fp8="hybrid"), case(ADA, fp8="hybrid")),
    "HW-02": (case(ADA, fp8="hybrid", fp8_recipe="blockwise"), case(H8, fp8="hybrid", fp8_recipe="blockwise")),
    "HW-03": (case(H8, fp8="hybrid", fp8_recipe="mxfp8"), case(BLACKWELL, fp8="hybrid", fp8_recipe="mxfp8")),
    "HW-04": (case(H8, fp4="e2m1"), case(BLACKWELL, fp4="e2m1")),
    "DUP-09": (case(H8, fp8_recipe="delayed"), case(H8, fp8_recipe="delayed", fp8="hybrid")),
    "CGR-01": (case(H8, graphs="cudagraph"), case(H8, graphs="full_iteration")),
    "CGR-02": (case(H8, graphs="full_iteration", captured="attn"), case(H8, graphs="local", captured="attn")),
    "CGR-06": (
        case(H8, graphs="transformer_engine", captured="moe+moe_router"),
        case(H8, graphs="transformer_engine", captured="moe"),
    ),
    "CGR-07": (
        case(H8, graphs="transformer_engine", captured="moe_preprocess"),
        case(H8, graphs="transformer_engine", captured="moe_router+moe_preprocess"),
    ),
    "CGR-09": (
        case(H8, graphs="local", captured="mlp"),
        case(H8, graphs="local", captured="mlp", model={"first_dense_layers": 1}),
    ),
    "CGR-10": (
        case(H8, graphs="local", captured="moe", moe_expert_capacity_factor=1.0),
        case(
            H8,
            graphs="local",
            captured="moe",
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=True,
        ),
    ),
    "CGR-13": (
        case(H8, recompute="full", graphs="transformer_engine"),
        case(H8, recompute="full", graphs="full_iteration"),
    ),
    "CGR-14": (
        case(H8, recompute="selective", modules="moe", graphs="transformer_engine", captured="attn+moe_router"),
        case(H8, recompute="selective", modules="moe", graphs="transformer_engine", captured="attn"),
    ),
    "CGR-20": (
        case(H8, graphs="transformer_engine", env=EXPANDABLE),
        case(H8, graphs="transformer_engine", env=EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}),
    ),
    "RUN-01": (
        case(H1, graphs="local", captured="attn"),
        case(H1, graphs="local", captured="attn+moe_router+moe_preprocess"),
    ),
    "STK-01": (
        case(H1, graphs="transformer_engine", stack={"transformer_engine": None}),
        case(H1, graphs="local", stack={"transformer_engine": None}),
    ),
    "DUP-16": (
        case(H8, **KEPT_NORM, captured="attn+moe_router+moe_preprocess", dispatcher="allgather"),
        case(H8, **KEPT_NORM, captured="attn+moe_router+moe_preprocess", dispatcher="alltoall"),
    ),
    "RUN-02": (case(H8, graphs="transformer_engine"), case(H8, graphs="none")),
    "DUP-10": (case(H8, captured="attn"), case(H8, captured="attn", graphs="local")),
    "DUP-11": (case(H8, graphs="local"), case(H8, graphs="full_iteration")),
    "DUP-12": (
        case(H8, graphs="local", captured="attn+moe_router"),
        case(H8, graphs="transformer_engine", captured="attn+moe_router"),
    ),
}
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


def test_latent_attention_keeps_a_norm_to_recompute() -> None:
    """Its input norm is a module of its own (gpt_layer_specs.py:296), whatever the router's graph holds."""
    kept = case(H8, **KEPT_NORM, captured="attn+moe_router")
    assert BY_ID["DUP-16"].refusal(kept)
    assert BY_ID["DUP-16"].refusal(case(H8, model=MLA, **KEPT_NORM, captured="attn+moe_router")) is None


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
