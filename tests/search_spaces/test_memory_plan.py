"""The plan against what one H200 allocated, and what must hold of any plan."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.memory.plan import MemoryPlan, plan_of
from search_spaces.memory.schedule import in_flight
from search_spaces.memory.shape import FactError
from search_spaces.presets import load_model
from search_spaces.rules import Case
from search_spaces.shapes import TrainingShape
from tests.search_spaces.cases import SHORT, gpus
from tests.search_spaces.memory_rows import MEASURED, case_of_row

# With graphs the rows count from after the capture, when the pool holds what eager steps would allocate.
EAGER = tuple(row for row in MEASURED if "cuda_graph_impl" not in row["knobs"])
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "deepseek-v3", "moonlight-16b-a3b")


def made(
    model: str = "qwen3-30b-a3b", world: int = 64, training: dict[str, object] | None = None, **knobs: KnobValue
) -> Case:
    named: dict[str, KnobValue] = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    named |= {SHORT.get(name, name): value for name, value in knobs.items()}
    if named.get("tensor_model_parallel_size", 1) != 1:
        named = {"sequence_parallel": True, "expert_tensor_parallel_size": 1, **named}
    facts = {"sequence_length": 4096, "global_batch_size": 1024, **(training or {})}
    return Case(named, load_model(model), gpus(world), TrainingShape.model_validate(facts))


def plan(*args: Any, **kwargs: Any) -> MemoryPlan:
    return plan_of(made(*args, **kwargs))


@pytest.mark.parametrize("row", EAGER, ids=lambda row: row["id"])
def test_allocated_memory_is_what_one_h200_allocated(row: dict[str, Any]) -> None:
    found = plan_of(case_of_row(row)).worst
    assert found.parameters.total == row["parameter_count"]
    assert found.total == pytest.approx(row["allocated_bytes"], rel=0.01)


def test_ten_thousand_plans_take_under_two_seconds() -> None:
    knobs = [
        {"tp": tp, "pp": pp, "ep": ep, "mbs": mbs, "fp8": fp8, "recompute": recompute, "modules": modules}
        for tp in (1, 2, 4) for pp in (1, 2, 4, 8) for ep in (1, 2, 4, 8) for mbs in (1, 2, 4)
        for fp8 in (None, "hybrid") for recompute in (None, "selective", "full") for modules in ("moe_act", "moe")
    ]  # fmt: skip
    several = [made(model, 256) for model in ("qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b-4l")]
    several = [replace(each, model=each.model.model_copy(update={"num_layers": 48})) for each in several]
    named = [{**several[0].knobs, "sequence_parallel": True, "expert_tensor_parallel_size": 1,
              **{SHORT.get(name, name): value for name, value in each.items()}} for each in knobs]  # fmt: skip
    cases = [replace(each, knobs=chosen) for each in several for chosen in named][:10_000]
    cases += cases[: 10_000 - len(cases)]
    started = time.process_time()
    for each in cases:
        plan_of(each)
    assert time.process_time() - started < 2


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2)))
def test_more_tensor_parallelism_never_costs_memory_of_a_dense_part(model: str, tp: int, ep: int, mbs: int) -> None:
    one = plan(model, tp=tp, ep=ep, mbs=mbs).worst
    two = plan(model, tp=2 * tp, ep=ep, mbs=mbs).worst
    assert two.states.dense_weights <= one.states.dense_weights
    assert two.active.saved.attention <= one.active.saved.attention
    assert two.active.saved.norms <= one.active.saved.norms
    assert two.total <= one.total


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))
def test_a_larger_micro_batch_never_costs_less(model: str, tp: int, ep: int, mbs: int) -> None:
    assert plan(model, tp=tp, ep=ep, mbs=mbs).worst.total < plan(model, tp=tp, ep=ep, mbs=2 * mbs).worst.total


@pytest.mark.parametrize("model", MODELS)
def test_every_recompute_of_experts_saves_and_whole_layers_save_most(model: str) -> None:
    none = plan(model, ep=8).worst.active.saved.total
    act = plan(model, ep=8, recompute="selective", modules="moe_act").worst.active.saved.total
    moe = plan(model, ep=8, recompute="selective", modules="moe").worst.active.saved.total
    full = plan(model, ep=8, recompute="full", method="uniform", layers=1).worst.active.saved.total
    assert full < moe < act < none


def test_block_recompute_lies_between_none_and_all() -> None:
    sizes = [plan(ep=8, recompute="full", method="block", layers=n).worst.active.saved.total for n in (48, 24, 12)]
    assert sizes == sorted(sizes)
    assert sizes[0] == plan(ep=8, recompute="full", method="uniform", layers=1).worst.active.saved.total


def test_the_distributed_optimizer_splits_over_the_right_ranks() -> None:
    whole = plan(ep=8).worst.states
    split = plan(ep=8, use_distributed_optimizer=True).worst
    counts = split.parameters
    assert whole.optimizer == pytest.approx(12 * counts.total, rel=0.01)
    assert split.states.optimizer == pytest.approx(12 * (counts.dense / 64 + counts.experts / 8), rel=0.01)
    assert split.states.weights == whole.weights == 2 * counts.total


@pytest.mark.parametrize(
    ("knobs", "per_parameter"),
    [
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "torch.bfloat16"}, 8),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, 10),
        ({"exp_avg_dtype": "bf16"}, 12),
        ({"optimizer_cpu_offload": True}, 0),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 6),
    ],
    ids=str,
)
def test_optimizer_state_follows_its_types(knobs: dict[str, KnobValue], per_parameter: int) -> None:
    found = plan(ep=8, **knobs).worst
    assert found.states.optimizer == pytest.approx(per_parameter * found.parameters.total, rel=0.01)


def test_bf16_gradients_halve_the_buffer_and_show_up_in_the_optimizer_step() -> None:
    whole, half = plan(ep=8).worst, plan(ep=8, grad_reduce_in_fp32=False).worst
    assert 2 * half.states.gradients == whole.states.gradients
    assert half.states.step == 4 * half.parameters.total
    tiny = plan_of(made(ep=8, grad_reduce_in_fp32=False, training={"sequence_length": 64})).worst
    assert (tiny.active.moment, tiny.active.transient) == ("optimizer", tiny.states.step)


def test_the_first_stage_holds_most_micro_batches_and_the_last_the_loss() -> None:
    found = plan(pp=4, ep=8)
    assert [stage.active.moment for stage in found.stages][-1] == "loss"
    saved = [stage.active.saved.total for stage in found.stages]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] == 4 * saved[-1]


@pytest.mark.parametrize(
    ("stages", "stage", "chunks", "microbatches", "overlapped", "alive"),
    [
        (1, 0, 1, 8, False, (1,)),
        (1, 0, 1, 8, True, (2,)),
        (4, 0, 1, 8, False, (4,)),
        (4, 3, 1, 8, False, (1,)),
        (4, 0, 1, 2, False, (2,)),
        (4, 0, 2, 8, False, (7, 4)),  # warm-up 6 + 4, and one: 4 of chunk 0, 4 of chunk 1, 3 of chunk 0
        (4, 3, 2, 8, False, (4, 1)),
        (4, 3, 2, 8, True, (4, 2)),
        (2, 0, 2, 2, False, (2, 2)),
    ],
)
def test_micro_batches_in_flight(
    stages: int, stage: int, chunks: int, microbatches: int, overlapped: bool, alive: tuple[int, ...]
) -> None:
    assert in_flight(stages, stage, chunks, microbatches, stages, overlapped) == alive


def test_imbalance_is_stated_and_loads_the_experts() -> None:
    natural = plan(ep=8)
    forced = plan(ep=8, training={"routing": "forced"})
    assert (forced.load, forced.forced) == (1.0, True)
    assert 1.1 < natural.load < 2
    assert plan(ep=1).load == 1.0  # one rank has every expert
    assert natural.worst.active.saved.dispatch == pytest.approx(
        natural.load * forced.worst.active.saved.dispatch, rel=1e-3
    )
    assert natural.worst.active.saved.attention == forced.worst.active.saved.attention
    assert plan_of(made(ep=8), load=3.0).worst.total > natural.worst.total
    padded = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
    assert plan(ep=8, **padded).load == 1.25


def test_captured_graphs_offload_and_fused_losses() -> None:
    plain = plan(ep=8).worst
    graphs = plan(ep=8, graphs="transformer_engine", captured="attn").worst
    more = plan(ep=8, graphs="transformer_engine", captured="attn+moe_router+moe_preprocess").worst
    assert 0 == plain.active.captured < graphs.active.captured < more.active.captured
    # Qwen3-30B-A3B's layers: hidden states of 2,048 and a mask each; the output's gradient and the first input's; one
    # attention's backward pass: 4,096 wide out and q (also in fp32), 512 wide k and v, and their projection.
    tokens = graphs.active.logits // (151936 * 2)
    one = 2 * 4096 + 4 * 4096 + 2 * 2 * (4096 + 2 * 512)
    assert graphs.active.captured == tokens * (48 * (2 * 2048 + 4096) + 2 * 2 * 2048 + one)
    assert graphs.active.pooled == plain.active.saved.norms * 3 // 4 + plain.active.saved.attention
    assert more.active.pooled == graphs.active.pooled + plain.active.saved.norms // 4 + plain.active.saved.router
    assert (more.total, graphs.total) == (plain.total, plain.total)  # what eager steps take, which come first
    offloaded = plan(ep=8, fine_grained_activation_offloading=True, offload_modules="expert_fc1").worst
    assert offloaded.active.saved.dispatch == pytest.approx(
        plain.active.saved.dispatch / 48, rel=1e-3
    )  # one layer stays
    fused = plan(ep=8, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te").worst
    assert fused.active.transient < plain.active.transient


def test_fp8_keeps_copies_of_weights_and_narrower_activations() -> None:
    plain, narrow = plan(ep=8).worst, plan(ep=8, fp8="hybrid", fp8_recipe="tensorwise").worst
    assert narrow.states.quantized_copies == 2 * (narrow.parameters.quantized_dense + narrow.parameters.experts)
    assert narrow.active.saved.dispatch < 0.55 * plain.active.saved.dispatch
    only = plan(ep=8, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True).worst
    assert only.states.weights < narrow.states.weights


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mbs": 0}, "micro_batch_size"),
        ({"pp": 4, "mbs": 3}, "global_batch_size"),
        ({"tp": 3}, "world_size"),
        ({"ep": 48}, "world_size"),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "int3"}, "exp_avg_dtype"),
        ({"ep": 8, "moe_expert_rank_capacity_factor": 0.0}, "moe_expert_rank_capacity_factor"),
        ({"ep": 8, "moe_expert_rank_capacity_factor": -2}, "moe_expert_rank_capacity_factor"),
    ],
    ids=str,
)
def test_what_makes_no_sense_names_its_field(change: dict[str, KnobValue], field: str) -> None:
    with pytest.raises(FactError) as caught:
        plan(**change)
    assert caught.value.field == field


def test_a_size_that_does_not_split_names_its_field() -> None:
    whole = made(ep=8)
    odd = replace(whole, model=whole.model.model_copy(update={"num_moe_experts": 129}))
    with pytest.raises(FactError, match="num_moe_experts 129 is not divisible by EP 8"):
        plan_of(odd)
