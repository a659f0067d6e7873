"""Evidence on real Megatron-Core under gloo: each knob once at work, and once silently not (`silent_traps`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.shapes import ModelShape, TrainingShape
from tests.train_worker.gang_script import Case, run_gang
from tests.train_worker.megatron_trials import (
    ADAM,
    EXPERT,
    FULL,
    HALF,
    MLA,
    MODEL,
    RICH,
    SHORT,
    VIRTUAL,
    Answers,
    case,
)  # fmt: skip

TWO_STEPS = {"warmup_steps": 2, "measured_steps": 1}  # the first only learns the order of the buckets
SGD, MOMENTS, BF16 = (shape.model_copy(update=TWO_STEPS) for shape in (SHORT, ADAM, HALF))
SHARDED: dict[str, KnobValue] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 40_000}
PAIRED: dict[str, KnobValue] = EXPERT | {"overlap_moe_expert_parallel_comm": True}


def asking(training: TrainingShape, model: ModelShape, world: int = 2, /, **knobs: KnobValue) -> Case:
    """A trial without its profiled step: on a CPU that adds nothing to the evidence."""
    one = case(world, training, model, **knobs)
    return replace(one, job=one.job.model_copy(update={"profile": False}))


def selective(parts: str) -> dict[str, KnobValue]:
    return {"recompute_granularity": "selective", "recompute_modules": parts}


# knob -> the trial that asks for it, what is seen where it runs, the trap, and what is seen in the trap
KNOBS: dict[str, tuple[Case, str, str, str]] = {
    "moe_token_dispatcher_type": (
        asking(SHORT, MODEL, 1, moe_token_dispatcher_type="allgather"), "allgather: 16 dispatches by 4 MoE layers",
        "dispatcher left out", "no dispatches by 4 MoE layers",
    ),
    "recompute_granularity": (
        asking(SHORT, MODEL, **FULL), "8 of 8 layer passes recomputed",
        "nothing checkpointed", "0 of 8 layer passes recomputed",
    ),
    "recompute_modules": (
        asking(SHORT, RICH, **EXPERT, **selective("core_attn+moe+mlp")),
        "core_attn: recomputed in 8 of 8 passes; moe: recomputed in 6 of 6 passes; mlp: recomputed in 2 of 2 passes",
        "nothing checkpointed",
        "core_attn: recomputed in 0 of 8 passes; moe: recomputed in 0 of 6 passes; mlp: recomputed in 0 of 2 passes",
    ),
    "recompute_modules, shared experts": (
        asking(SHORT, RICH, **selective("shared_experts")), "shared_experts: recomputed in 6 of 6 passes",
        "nothing checkpointed", "shared_experts: recomputed in 0 of 6 passes",
    ),
    "recompute_modules, without output": (
        asking(SHORT, MLA, **selective("mla_up_proj+layernorm")),
        "mla_up_proj: recomputed in 8 of 8 passes; layernorm: recomputed in 16 of 16 passes",
        "nothing discarded",
        "mla_up_proj: recomputed in 0 of 8 passes; layernorm: recomputed in 0 of 16 passes",
    ),
    "overlap_grad_reduce": (
        asking(SGD, MODEL, overlap_grad_reduce=True, bucket_size=40_000),
        "4 of 4 reductions started by the backward pass",
        "reductions at the end", "0 of 4 reductions started by the backward pass",
    ),
    "overlap_param_gather": (
        asking(MOMENTS, MODEL, **SHARDED, overlap_param_gather=True), "4 of 4 gathers left open for the forward pass",
        "gathers waited for", "0 of 4 gathers left open for the forward pass",
    ),
    "overlap_moe_expert_parallel_comm": (
        asking(BF16, MODEL, **PAIRED), "4 of 12 layer runs interleaved two micro-batches; 2 micro-batches a step",
        "plans one by one", "0 of 16 layer runs interleaved two micro-batches; 2 micro-batches a step",
    ),
    "moe_shared_expert_overlap": (
        asking(SHORT, RICH, **EXPERT, moe_shared_expert_overlap=True),
        "6 shared-expert outputs computed by the dispatchers",
        "shared experts unknown", "0 shared-expert outputs computed by the dispatchers",
    ),
    "bias_activation_fusion": (
        asking(SHORT, MODEL, bias_activation_fusion=True), "32 calls of the fused functions",
        "activation unfused", "0 calls of the fused functions",
    ),
    "cross_entropy_loss_fusion": (
        asking(SHORT, MODEL, cross_entropy_loss_fusion=True), "2 calls of the fused functions",
        "loss unfused", "0 calls of the fused functions",
    ),
}  # fmt: skip
OTHERS = {
    "one micro-batch": asking(BF16, MODEL, **PAIRED | {"micro_batch_size": 4}),
    "first step": asking(SHORT, MODEL, overlap_grad_reduce=True, bucket_size=40_000),
    "one rank": asking(SGD, MODEL, 1, overlap_grad_reduce=True),
    "loss on the last stage": asking(
        SHORT, MODEL, **VIRTUAL, overlap_p2p_comm=True, cross_entropy_loss_fusion=True, overlap_grad_reduce=False
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    cases: dict[str, Case] = dict(OTHERS)
    for knob, (asked, _, trap, _) in KNOBS.items():
        cases |= {knob: asked, f"{knob}: trapped": replace(asked, trap=trap)}
    folder: Path = tmp_path_factory.mktemp("gang")
    return run_gang(cases, folder)


def row(answer: dict[str, Any], knob: str) -> tuple[str, bool | None]:
    """What the evidence of a trial says of a knob, and whether it was at work."""
    assert "error" not in answer, answer
    (found,) = [row for row in answer["evidence"] if row["knob"] == knob.split(",")[0]]
    return found["seen"], found["active"]


@pytest.mark.parametrize("knob", KNOBS)
def test_what_ran_is_seen_and_counted(answers: Answers, knob: str) -> None:
    for answer in answers[knob]:
        assert answer.get("kind") == "measured", answer
        assert row(answer, knob) == (KNOBS[knob][1], True)


@pytest.mark.parametrize("knob", KNOBS)
def test_what_silently_did_not_run_is_refused(answers: Answers, knob: str) -> None:
    for answer in answers[f"{knob}: trapped"]:
        assert (answer.get("kind"), answer.get("rule")) == ("rejected", "not-active"), answer
        assert row(answer, knob) == (KNOBS[knob][3], False)
        assert KNOBS[knob][3] in answer["reason"]


def test_one_micro_batch_hides_nothing(answers: Answers) -> None:
    """Megatron takes the request and runs the plans of the only micro-batch one by one."""
    for answer in answers["one micro-batch"]:
        assert (answer["kind"], answer["rule"]) == ("rejected", "not-active")
        assert "interleaved two micro-batches; 1 micro-batches a step" in answer["reason"]


@pytest.mark.parametrize("name", ["first step", "one rank"])
def test_what_cannot_be_told_is_said_and_refuses_nothing(answers: Answers, name: str) -> None:
    seen, active = row(answers[name][0], "overlap_grad_reduce")
    assert active is None
    assert seen


def test_the_rank_that_can_tell_speaks_for_the_gang(answers: Answers) -> None:
    first, second = answers["loss on the last stage"]
    assert first["evidence"] == second["evidence"]
    assert row(first, "cross_entropy_loss_fusion") == ("4 calls of the fused functions", True)


def test_a_switch_that_is_off_leaves_no_row(answers: Answers) -> None:
    knobs = [row["knob"] for row in answers["loss on the last stage"][0]["evidence"]]
    assert "overlap_grad_reduce" not in knobs
