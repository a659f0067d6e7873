"""Knobs of `moe-full` on real Megatron-Core under gloo: uneven stages, capacity, fusions, buckets, the rank's host."""

from pathlib import Path

import pytest

from search_spaces.candidate import KnobValue
from tests.train_worker.gang_script import Case, run_gang
from tests.train_worker.megatron_trials import (
    ADAM,
    EXPERT,
    FIVE,
    HALF,
    MLA,
    PIPE,
    SHORT,
    TENSOR,
    VIRTUAL,
    Answers,
    case,
    furthest,
    losses,
    norms,
)  # fmt: skip

NESTED = '[["embedding"], ["decoder", "decoder"], ["decoder"], ["decoder", "loss"]]'
UNEVEN = {
    "even": case(2, SHORT, **PIPE),
    "first stage short": case(2, SHORT, **PIPE, num_layers_in_first_pipeline_stage=1),
    "last stage short": case(2, SHORT, **PIPE, num_layers_in_last_pipeline_stage=1),
    "spelt out": case(2, SHORT, **PIPE, pipeline_model_parallel_layout="Et|ttt*1L"),
    "virtual stages, spelt out": case(
        2, SHORT, **PIPE, pipeline_model_parallel_layout="Et|t|tt|L", overlap_p2p_comm=True
    ),
    "virtual stages, as a list": case(
        2, SHORT, **VIRTUAL, pipeline_model_parallel_layout=NESTED, overlap_p2p_comm=True
    ),
}
COUNTED = {
    "the loss counts as a layer": case(2, SHORT, FIVE, **PIPE, account_for_loss_in_pipeline_split=True),
    "the embedding counts as a layer": case(2, SHORT, FIVE, **PIPE, account_for_embedding_in_pipeline_split=True),
}
SHARDED: dict[str, KnobValue] = {
    "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True
}  # fmt: skip
PADDED: dict[str, KnobValue] = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
OTHERS = {
    "one process": case(1, SHORT),
    "one process, five layers": case(1, SHORT, FIVE),
    "data": case(2, SHORT),
    "expert": case(2, SHORT, **EXPERT),
    "host": case(2, SHORT, manual_gc=True, manual_gc_interval=1, cpu_affinity="exclusive"),
    "host left alone": case(2, SHORT, manual_gc=False, cpu_affinity=None),
    "capacity": case(2, SHORT, **EXPERT, moe_expert_capacity_factor=1.0),
    "capacity, padded": case(2, SHORT, **EXPERT, **PADDED),
    "router in double precision": case(2, SHORT, moe_router_dtype="fp64"),
    "fused loss": case(2, SHORT, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"),
    "one bucket": case(2, ADAM, **SHARDED),
    "small buckets": case(2, ADAM, **SHARDED, bucket_size=40_000),
    "buckets of Megatron's size": case(2, SHORT, overlap_grad_reduce=True, bucket_size=None),
    "half gradients": case(2, HALF, overlap_grad_reduce=True, grad_reduce_in_fp32=False),
    "whole gradients": case(2, HALF, overlap_grad_reduce=True, grad_reduce_in_fp32=True),
    "two micro-batches interleaved": case(2, HALF, **EXPERT, overlap_moe_expert_parallel_comm=True),
    "two micro-batches one by one": case(2, HALF, **EXPERT),
    "backend of another dispatcher": case(2, SHORT, moe_flex_dispatcher_backend="hybridep"),
    "one chunk a stage": case(2, SHORT, **PIPE, virtual_pipeline_model_parallel_size=1),
    "negative capacity": case(2, SHORT, moe_expert_capacity_factor=-1.0),
    "user buffers": case(2, SHORT, **TENSOR, tp_comm_overlap=True),
    "a buffer that can overflow": case(2, SHORT, **EXPERT, moe_expert_rank_capacity_factor=1.5),
    "fused projections": case(2, SHORT, MLA, **EXPERT, mla_down_proj_fusion=True),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    cases: dict[str, Case] = UNEVEN | COUNTED | OTHERS
    folder: Path = tmp_path_factory.mktemp("gang")
    return run_gang(cases, folder)


@pytest.mark.parametrize("name", UNEVEN)
def test_stages_of_any_size_train_to_the_loss_of_one_process(answers: Answers, name: str) -> None:
    one, two = answers["one process"][0], answers[name][0]
    assert furthest(losses(one), losses(two)) < 1e-6
    assert norms(two) == pytest.approx(norms(one), rel=1e-5)
    assert two["parameter_count"] == one["parameter_count"]


@pytest.mark.parametrize("name", COUNTED)
def test_a_stage_with_less_layers_for_its_embedding_or_loss(answers: Answers, name: str) -> None:
    one, two = answers["one process, five layers"][0], answers[name][0]
    assert furthest(losses(one), losses(two)) < 1e-6
    assert two["parameter_count"] == one["parameter_count"]


EFFECTIVE: dict[str, dict[str, KnobValue]] = {
    "first stage short": {"num_layers_in_first_pipeline_stage": 1},
    "last stage short": {"num_layers_in_last_pipeline_stage": 1},
    "virtual stages, spelt out": {
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": '[["embedding", "decoder"], ["decoder"], ["decoder", "decoder"], ["loss"]]',
        "num_microbatches": 4,
    },
    "virtual stages, as a list": {"pipeline_model_parallel_layout": NESTED},
    "host": {"manual_gc": True, "manual_gc_interval": 1, "cpu_affinity": "exclusive"},
    "host left alone": {"manual_gc": False, "cpu_affinity": None},
    "capacity, padded": PADDED,
    "router in double precision": {"moe_router_dtype": "fp64"},
    "fused loss": {"cross_entropy_loss_fusion": True},
    "small buckets": {"bucket_size": 40_000, "overlap_param_gather": True},
    "buckets of Megatron's size": {"bucket_size": 40_000_000},
    "half gradients": {"grad_reduce_in_fp32": False},
    "two micro-batches interleaved": {"overlap_moe_expert_parallel_comm": True},
    # Another word for the same run: what is in force is recorded, and the trial goes on.
    "backend of another dispatcher": {"moe_flex_dispatcher_backend": None},
    "one chunk a stage": {"virtual_pipeline_model_parallel_size": None},
    "negative capacity": {"moe_expert_capacity_factor": None},
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_what_is_in_force_is_read_back(answers: Answers, name: str) -> None:
    for answer in answers[name]:
        assert answer.get("kind") == "measured", answer
        assert {knob: answer["effective"][knob] for knob in EFFECTIVE[name]} == EFFECTIVE[name]


def test_what_must_not_change_the_loss_does_not(answers: Answers) -> None:
    plain = losses(answers["data"][0])
    for name in ("host", "host left alone", "buckets of Megatron's size", "backend of another dispatcher"):
        assert losses(answers[name][0]) == plain, name
    for name in ("router in double precision", "one chunk a stage", "negative capacity"):
        assert furthest(losses(answers[name][0]), plain) < 1e-6, name
    assert 0 < furthest(losses(answers["fused loss"][0]), plain) < 1e-4
    assert losses(answers["small buckets"][0]) == pytest.approx(losses(answers["one bucket"][0]), abs=1e-6)
    assert losses(answers["half gradients"][0]) != losses(answers["whole gradients"][0])
    one_by_one = losses(answers["two micro-batches one by one"][0])
    assert furthest(losses(answers["two micro-batches interleaved"][0]), one_by_one) < 1e-3


def test_tokens_beyond_capacity_are_dropped_with_and_without_padding(answers: Answers) -> None:
    dropped = losses(answers["capacity"][0])
    assert furthest(dropped, losses(answers["expert"][0])) > 1e-4
    assert furthest(dropped, losses(answers["capacity, padded"][0])) < 1e-6


@pytest.mark.parametrize(
    ("name", "rule"),
    [("fused projections", "RUN-10"), ("user buffers", "RUN-04"), ("a buffer that can overflow", "RUN-05")],
)
def test_what_the_worker_cannot_do_is_refused_before_anything_is_built(answers: Answers, name: str, rule: str) -> None:
    for answer in answers[name]:
        assert (answer["kind"], answer["rule"]) == ("rejected", rule)
