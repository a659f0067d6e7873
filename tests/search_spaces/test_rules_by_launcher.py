"""Rules whose answer depends on who launches: what a launcher derives, pads, drops or checks by itself."""

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.rules import ALL_RULES, Case, Launcher
from tests.search_spaces.cases import case, gpus
from tests.search_spaces.examples.clusters import H8, OVERLAP

BY_ID = {rule.id: rule for rule in ALL_RULES}
EVERY: tuple[Launcher | None, ...] = (None, "megatron-core", "megatron-lm", "megatron-bridge")


def refusing(rule: str, made: dict[Launcher | None, Case]) -> set[Launcher | None]:
    """The launchers (None: no launcher, this project's worker) for which the rule speaks."""
    found = BY_ID[rule]
    return {who for who, one in made.items() if found.concerns(one.launchers, "0.19.2") and found.refusal(one)}


def each(stack: dict[str, object] | None = None, **knobs: KnobValue) -> dict[Launcher | None, Case]:
    return {who: case(H8, stack=stack, launchers=(who,) if who else (), **knobs) for who in EVERY}


def test_two_stages_train_wrong_without_overlap_unless_the_launcher_switches_it_on() -> None:
    assert refusing("PAR-27", each(pp=2, vpp=2)) == {None, "megatron-core"}
    assert refusing("PAR-27", each(pp=2, vpp=2, p2p=False)) == {None, "megatron-core", "megatron-lm"}
    assert refusing("PAR-27", each(pp=4, vpp=2, p2p=False)) == set()


def test_overlap_of_stages_needs_virtual_stages_and_no_batching() -> None:
    assert refusing("PAR-30b", each(pp=2, p2p=True)) == {None, "megatron-core", "megatron-bridge"}
    assert refusing("TRAP-25", each(pp=2, p2p=True)) == {"megatron-lm"}
    assert refusing("PAR-30b", each(p2p=True)) == set(), "one stage has nothing to overlap"
    assert refusing("PAR-30b", each(pp=2, vpp=2, p2p=True)) == set(), "batch_p2p_comm not said is off then"
    assert refusing("PAR-30b", each(pp=2, vpp=2, p2p=True, batch_p2p_comm=True)) == set(EVERY)


def test_context_hierarchy_is_checked_by_launchers_and_ignored_by_megatron_core() -> None:
    unhierarchic = each(cp=4, cp_comm_type="a2a+p2p")
    assert refusing("PAR-19", unhierarchic) == {"megatron-lm", "megatron-bridge"}
    assert refusing("TRAP-34", unhierarchic) == {None, "megatron-core"}


def test_launchers_and_this_worker_pad_the_vocabulary() -> None:
    odd = {who: case(H8, tp=2, model={"vocab_size": 511}, launchers=(who,) if who else ()) for who in EVERY}
    assert refusing("SHP-01", odd) == {"megatron-core"}


@pytest.mark.parametrize(
    ("engine", "fused", "expected"),
    [("2.6.0", True, {"megatron-bridge"}), ("2.6.0", False, {"megatron-lm"}), ("2.7.0", True, set())],
)
def test_the_gates_of_late_gradients_disagree(engine: str, fused: bool, expected: set[Launcher]) -> None:
    made = each({"transformer_engine": engine}, **OVERLAP, delay=True, gradient_accumulation_fusion=fused)
    assert refusing("OVL-17", made) == expected


def test_megatron_lm_wants_apex_unless_it_is_told_otherwise() -> None:
    """Bridge looks whether it is there before it switches the fusion on."""
    absent = {"apex": None}
    assert refusing("FUS-12", each(absent)) == {"megatron-lm"}
    assert refusing("FUS-12", each(absent, gradient_accumulation_fusion=True)) == set(EVERY)
    assert refusing("FUS-12", each(absent, gradient_accumulation_fusion=False)) == set()
    assert refusing("FUS-12", each()) == set()


@pytest.mark.parametrize(
    ("core", "engine", "nccl", "starts"),
    [
        ("0.19.2", "2.20.2", "2.32.3", False), ("0.19.2", "2.18.0", "2.30.4", True),
        ("0.19.2+ncclep", "2.20.2", "2.32.3", True), ("0.19.2+ncclep", "2.20.2", "2.30.7", False),
        ("0.19.2+ncclep", "2.18.0", "2.32.3", False),
    ],
)  # fmt: skip
def test_ncclep_starts_on_the_stacks_it_was_seen_on(core: str, engine: str, nccl: str, starts: bool) -> None:
    stack = {"megatron_core": core, "transformer_engine": engine, "nccl": nccl}
    made = case(H8, dispatcher="flex", backend="ncclep", ep=8, moe_expert_rank_capacity_factor=2.0, stack=stack)
    assert (BY_ID["DSP-15"].refusal(made) is None) == starts


def test_reduced_late_gradients_need_a_newer_engine_with_megatron_lm() -> None:
    made = each({"transformer_engine": "2.7.0"}, **OVERLAP, delay=True, overlap_grad_reduce=True)
    assert refusing("OVL-15", made) == {"megatron-lm"}


def test_bridge_looks_at_captured_names_and_megatron_lm_only_with_reduction() -> None:
    late: dict[str, KnobValue] = {**OVERLAP, "delay": True, "captured": "attn"}
    assert refusing("OVL-16", each({"transformer_engine": "2.11.0"}, **late)) == {"megatron-bridge"}
    unfused: dict[str, KnobValue] = {**late, "gradient_accumulation_fusion": False, "overlap_grad_reduce": True}
    assert refusing("OVL-16", each({}, **unfused)) == {"megatron-lm", "megatron-bridge"}
    assert refusing("OVL-16", each({}, **late, overlap_grad_reduce=True)) == set()
    shared = {"moe_shared_expert_intermediate_size": 128}
    router = case(
        H8, model=shared, launchers=("megatron-bridge",), stack={"transformer_engine": "2.11.0"},
        **{**late, "captured": "moe_router"},
    )  # fmt: skip
    assert BY_ID["OVL-16"].refusal(router)


def test_one_connection_is_asked_of_gpus_before_blackwell_only() -> None:
    eight = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert refusing("PAR-28", each(tp=2, sp=True, env=eight)) == {"megatron-lm"}
    assert refusing("PAR-28", each(tp=2, sp=True)) == set()
    assert refusing("PAR-28b", each(tp=2, sp=True)) == {"megatron-lm"}
    assert refusing("PAR-28b", each(tp=2, sp=True, **OVERLAP)) == set()
    blackwell = case(gpus(8, "B200 sm_100"), tp=2, sp=True, launchers=("megatron-lm",))
    assert BY_ID["PAR-28b"].refusal(blackwell) is None


@pytest.mark.parametrize(
    ("rule", "speaks", "silent"),
    [
        ("PAR-06b", ["0.15.0"], ["0.16.0", None]),
        ("OVL-08", ["0.17.0", None], ["0.16.0"]),
        ("OVL-10c", ["0.16.0", "0.17.1"], ["0.15.0", "0.18.0", None]),
        ("DSP-05", ["0.19.2", None], ["0.18.0"]),
    ],
)
def test_some_rules_belong_to_some_releases(rule: str, speaks: list[str | None], silent: list[str | None]) -> None:
    assert all(BY_ID[rule].concerns(frozenset(), release) for release in speaks)
    assert not any(BY_ID[rule].concerns(frozenset(), release) for release in silent)
