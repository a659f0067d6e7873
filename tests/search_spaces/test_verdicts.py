"""Configurations that were really run, on gloo and on an H200, are judged as they turned out."""

from collections.abc import Mapping

from search_spaces.candidate import KnobValue
from search_spaces.presets import load_model
from search_spaces.rules import rules_for
from search_spaces.screen import verdict
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import CUTLASS, H1, H8, KEPT_NORM

NO_WORKER = rules_for(frozenset(), "0.19.2", worker=False)


def test_layouts_seen_to_train_are_accepted() -> None:
    """The world-2 layouts that were run under gloo with equal losses, and the ones that were refused or wrong."""
    good: list[dict[str, KnobValue]] = [
        {"dispatcher": "alltoall"},
        {"ep": 2, "dispatcher": "alltoall"},
        {"ep": 2, "dispatcher": "allgather"},
        {"tp": 2, "sp": True, "etp": 2},
        {"tp": 2, "sp": True, "etp": 1, "ep": 2},
        {"pp": 2},
        {"pp": 2, "vpp": 2, "p2p": True},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
        {"ep": 2, "recompute": "full", "method": "uniform", "layers": 1},
        {"ep": 2, "recompute": "full", "method": "block", "layers": 1},
        {"recompute": "selective", "modules": "core_attn+layernorm+moe"},
    ]
    assert [verdict(case(**knobs)) for knobs in good] == [None] * len(good)
    bad: list[tuple[dict[str, KnobValue], str]] = [
        ({"tp": 2}, "PAR-09"),
        ({"pp": 2, "vpp": 2}, "PAR-27"),
        ({"cp": 2}, "CPU-05"),
        ({"dispatcher": "flex", "ep": 2}, "CPU-01"),
    ]
    assert [found.rule for knobs, _ in bad if (found := verdict(case(**knobs)))] == [rule for _, rule in bad]


def test_configurations_measured_on_one_h200_are_judged_right() -> None:
    """From the first trials on one H200: what ran, and what died (mxfp8, deepep at EP 1, EP overlap at EP 1)."""
    model = load_model("qwen3-30b-a3b-4l").model_dump()
    training = {"sequence_length": 4096, "global_batch_size": 8}
    graphs: dict[str, KnobValue] = {"graphs": "transformer_engine", "captured": "attn+moe_router+moe_preprocess"}

    def judged(env: Mapping[str, str] | None = None, **knobs: KnobValue) -> str | None:
        grouped = {"moe_grouped_gemm": True} | knobs
        found = verdict(case(H1, model=model, training=training, env=env, stack={}, **grouped), NO_WORKER)
        return found.rule if found else None

    assert judged(dispatcher="alltoall") is None
    assert judged(CUTLASS, dispatcher="alltoall", **graphs) is None
    assert judged(fp8="hybrid", fp8_recipe="blockwise", **graphs) is None
    assert judged(recompute="selective", modules="moe_act+layernorm") is None
    assert judged(recompute="full", method="uniform", layers=1) is None
    assert judged(recompute="selective", modules="layernorm", graphs="transformer_engine", captured="attn") is None
    assert judged(dispatcher="alltoall", **KEPT_NORM, captured="attn+moe_router") == "TRAP-13"
    assert judged(fp8="hybrid", fp8_recipe="mxfp8") == "HW-03"
    assert judged(dispatcher="flex", backend="deepep") == "DSP-07"
    assert judged(dispatcher="alltoall", overlap=True) == "OVL-03"
    assert judged(graphs="local", captured="attn") == "RUN-01"


def test_one_rank_may_shard_for_what_comes_with_it() -> None:
    def refusal(**knobs: KnobValue) -> str | None:
        found = verdict(case(H1, use_distributed_optimizer=True, **knobs))
        return found.rule if found else None

    assert refusal() == refusal(optimizer_cpu_offload=False) == "DUP-03"
    assert refusal(use_precision_aware_optimizer=True) is None
    assert refusal(optimizer_cpu_offload=True) is None
    assert refusal(fp8="hybrid", fp8_recipe="blockwise", fp8_param=True) is None


def test_what_this_worker_cannot_do_yet_is_judged_last() -> None:
    """So that a configuration the stack refuses says so, and another launcher can leave these rules out."""
    graphs = case(H8, graphs="local")
    assert verdict(graphs, NO_WORKER) is None
    found = verdict(graphs)
    assert found is not None
    assert found.rule == "RUN-02"
