"""The worker on real Megatron-Core, through `trial.run`: two gloo ranks against one process, in fp32 with SGD."""

import importlib.util
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.flops import flops_per_token
from search_spaces.shapes import ModelShape
from tests.train_worker.gang_script import Case, run_gang
from tests.train_worker.megatron_trials import (
    ADAM,
    EXPERT,
    FULL,
    LONG,
    MLA,
    MODEL,
    PIPE,
    RICH,
    SELECTIVE,
    SGD,
    SHORT,
    TENSOR,
    TIED,
    VIRTUAL,
    Answers,
    case,
    furthest,
    losses,
    norms,
    on_cuda,
)  # fmt: skip
from train_worker.failures import classify
from train_worker.outcome import Rejected

WARM = SGD.model_copy(update={"warmup_steps": 3})
STOPS = SHORT.model_copy(update={"measured_steps": 5, "min_measured_steps": 3, "target_relative_error": 1e-9})


def profiled(trial: Case, trap: str = "") -> Case:
    return Case(trial.job.model_copy(update={"profile": True}), trap=trap)


def too_slow(slow: Case) -> Case:
    """The same trial, beside one that is a thousand times faster."""
    return Case(slow.job.model_copy(update={"slow_above_s": 1e-4, "profile": True}))


PARITY = {
    "data": case(2),
    "data, one sequence a micro-batch, overlapped": case(2, micro_batch_size=1, overlap_grad_reduce=True),
    "expert, allgather": case(2, **EXPERT | {"moe_token_dispatcher_type": "allgather"}),
    "expert, alltoall": case(2, **EXPERT),
    "tensor, experts split too": case(2, **TENSOR),
    "tensor, experts whole": case(2, **TENSOR | {"expert_tensor_parallel_size": 1}),
    "tensor, experts spread": case(2, **TENSOR | EXPERT | {"expert_tensor_parallel_size": 1}),
    "pipeline": case(2, **PIPE),
    "virtual pipeline": case(2, **VIRTUAL | {"overlap_p2p_comm": True}),
    "full recompute": case(2, **EXPERT | FULL),
    "selective recompute": case(2, **EXPERT | SELECTIVE),
}
# name -> (one process, two ranks): the other models and optimizers, three or fewer steps
PAIRS = {
    "tied embeddings over a pipeline": (case(1, SHORT, TIED), case(2, SHORT, TIED, **PIPE)),
    "rich model, virtual pipeline": (case(1, SHORT, RICH), case(2, SHORT, RICH, **VIRTUAL, overlap_p2p_comm=True)),
    "rich model, tensor": (case(1, SHORT, RICH), case(2, SHORT, RICH, **TENSOR)),
    "rich model, shared expert overlapped": (
        case(1, SHORT, RICH),
        case(2, SHORT, RICH, **EXPERT, moe_shared_expert_overlap=True),
    ),
    "latent attention, expert": (case(1, SHORT, MLA), case(2, SHORT, MLA, **EXPERT)),
}
# name -> (rule, part of the reason, a trial that the worker's own rules refuse)
REFUSED = {
    "graphs on a CPU": ("RUN-02", "need a GPU", case(2, cuda_graph_impl="transformer_engine")),
    "local graphs": ("RUN-02", "whole layers", on_cuda(case(1, cuda_graph_impl="local", cuda_graph_modules="attn"))),
    "graph of an iteration, short": ("RUN-02", "3 warm-up", on_cuda(case(1, cuda_graph_impl="full_iteration"))),
    "graph of an iteration, dropless": (
        "RUN-16",
        "alltoall without a padded capacity",
        on_cuda(case(1, WARM, cuda_graph_impl="full_iteration", moe_token_dispatcher_type="alltoall")),
    ),
    "optimizer on the host": ("RUN-17", "loses its parameters", on_cuda(case(1, optimizer_cpu_offload=True))),
}
SINGLE = {
    "adam": case(1, ADAM),
    "sharded optimizer": case(
        2, ADAM, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "adam, learning rate warmed up": case(1, ADAM.model_copy(update={"learning_rate_warmup_steps": 2})),
    "adam, learning rate at rest": case(1, ADAM.model_copy(update={"learning_rate_warmup_steps": 10**6})),
    "bf16": case(2, SHORT.model_copy(update={"params_dtype": "bf16"}), **EXPERT),
    "trap": case(2, **VIRTUAL),
    "nothing recomputed": case(2, LONG, micro_batch_size=4),
    "all recomputed": case(2, LONG, micro_batch_size=4, **FULL),
    "some recomputed": case(2, LONG, micro_batch_size=4, **SELECTIVE),
    "diverges": case(2, ADAM.model_copy(update={"learning_rate": 1e9}), **EXPERT),
    "ignored knob": case(2, SHORT, moe_grouped_gemm=True),
    "variable that is set": case(2, SHORT, env={"OMP_NUM_THREADS": "1"}),
    "variable that is lost": case(2, SHORT, env={"NVTE_DEBUG_LEVEL": "2"}),
    "cuda": on_cuda(case(1, SHORT)),
    "latent attention, tensor": case(2, SHORT, MLA, **TENSOR),
    "overlap without virtual stages": case(2, SHORT, **PIPE, overlap_p2p_comm=True),
    "refused knobs": case(2, SHORT, recompute_granularity="selective", recompute_modules="moe_act"),
    "misspelt knob": case(2, SHORT, micro_batchsize=1),
    "fact as a knob": case(2, SHORT, moe_router_topk=1),
    "unset lists": case(2, SHORT, recompute_granularity="none", recompute_modules=None, offload_modules=""),
    "uneven batch": case(2, SHORT, micro_batch_size=3),
    "stops early": case(2, STOPS.model_copy(update={"target_relative_error": 0.99}), **EXPERT),
    "runs to its cap": case(2, STOPS, **EXPERT),
    "too slow": too_slow(case(2, STOPS, **EXPERT)),
    "profiled whole": profiled(case(2, SHORT, **EXPERT, micro_batch_size=1)),
    "profiled in part": profiled(case(2, SHORT, **EXPERT, micro_batch_size=1), "all steps are slow"),
    "slow, overlapped": profiled(
        case(2, SHORT, **EXPERT, micro_batch_size=1, overlap_grad_reduce=True), "all steps are slow"
    ),
    "megatron's own draw": case(1, SHORT.model_copy(update={"layout_independent_init": False})),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every trial of this file, run once: the imports cost more than the trials."""
    refused = {name: trial for name, (_, _, trial) in REFUSED.items()}
    cases: dict[str, Case] = {"one process": case(1)} | PARITY | SINGLE | refused
    for name, (one, two) in PAIRS.items():
        cases |= {f"{name}: one": one, f"{name}: two": two}
    folder: Path = tmp_path_factory.mktemp("gang")
    return run_gang(cases, folder)


@pytest.mark.parametrize("name", PARITY)
def test_two_ranks_train_to_the_loss_of_one_process(answers: Answers, name: str) -> None:
    one, two = answers["one process"][0], answers[name][0]
    assert len(losses(two)) == 6
    assert furthest(losses(one), losses(two)) < 1e-6
    assert norms(two) == pytest.approx(norms(one), rel=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_other_models_train_to_the_loss_of_one_process(answers: Answers, name: str) -> None:
    one, two = answers[f"{name}: one"][0], answers[f"{name}: two"][0]
    assert furthest(losses(one), losses(two)) < 1e-6
    assert two["parameter_count"] == one["parameter_count"]


def test_sharded_optimizer_follows_plain_adam(answers: Answers) -> None:
    assert furthest(losses(answers["adam"][0]), losses(answers["sharded optimizer"][0])) < 1e-4


def test_the_learning_rate_rises_from_zero(answers: Answers) -> None:
    """Three losses: before any update, after one of rate 0, after one of half the rate."""
    constant, warmed, rest = (
        losses(answers[name][0]) for name in ("adam", "adam, learning rate warmed up", "adam, learning rate at rest")
    )
    assert constant[0] == warmed[0] == rest[0]
    assert warmed[1] == rest[1] != constant[1]
    assert constant[2] < warmed[2] < rest[2]


def test_bf16_stays_near_fp32(answers: Answers) -> None:
    fp32 = losses(answers["one process"][0])[:3]
    assert 0 < furthest(fp32, losses(answers["bf16"][0])) < 0.02


def test_silent_trap_trains_to_another_loss(answers: Answers) -> None:
    """Two stages in a ring without overlap_p2p_comm: runs, and is wrong. The reason for a rule in search_spaces."""
    assert furthest(losses(answers["one process"][0]), losses(answers["trap"][0])) > 1e-2


def test_the_data_has_something_to_learn(answers: Answers) -> None:
    found = losses(answers["one process"][0])
    assert found[0] == pytest.approx(5.54, abs=0.1)  # ln(256): nothing known yet
    assert found[-1] < found[0] - 0.5


def test_every_rank_gives_the_same_answer(answers: Answers) -> None:
    for name in [*PARITY, "diverges", "ignored knob"]:
        first, second = ({k: v for k, v in answer.items() if k != "phases"} for answer in answers[name])
        assert first == second, name


def test_warm_up_is_kept_apart(answers: Answers) -> None:
    answer = answers["one process"][0]
    assert (len(answer["warmup"]), len(answer["steps"])) == (2, 4)
    for step in answer["steps"]:
        assert step["tokens_per_s"] == pytest.approx(SGD.tokens_per_step / step["step_time_s"])
    phases = answer["phases"]
    assert min(phases["build_s"], phases["warmup_s"], phases["measure_s"]) > 0


def test_a_trial_stops_at_the_step_where_its_error_is_small_enough(answers: Answers) -> None:
    """Which both ranks find at the same step, for they decide on the same times."""
    for name, steps in (("stops early", 3), ("runs to its cap", 5)):
        first, second = ({k: v for k, v in answer.items() if k != "phases"} for answer in answers[name])
        assert first == second, name
        assert (len(first["warmup"]), len(first["steps"]), first["timing"]["count"]) == (1, steps, steps)
    slow = answers["too slow"]
    assert [len(answer["steps"]) for answer in slow] == [3, 3]
    assert all(answer["given_up"] and answer["profile"] is None for answer in slow)
    assert not answers["stops early"][0]["given_up"]
    early, late = losses(answers["stops early"][0]), losses(answers["runs to its cap"][0])
    assert early == late[:4]


def test_what_a_step_did_is_recorded(answers: Answers) -> None:
    answer = answers["data"][0]
    assert answer["work"]["ranks"] == 2
    assert answer["work"]["tokens_per_step"] == SGD.tokens_per_step
    assert answer["work"]["flops_per_token"] == flops_per_token(MODEL, SGD.sequence_length)
    assert answer["work"]["routing"] == "natural"
    assert answer["steps"][0]["gpu_time_s"] is None
    assert answer["timing"]["median_s"] == median(step["step_time_s"] for step in answer["steps"])


def test_a_slow_step_profiled_in_part_counts_as_the_whole(answers: Answers) -> None:
    """But not where something is done once amid its micro-batches."""
    profiles = {name: [each["profile"] for each in answers[name]] for name in SINGLE if "profiled" in name}
    whole, part = profiles["profiled whole"][0], profiles["profiled in part"][0]
    assert [each["repeated"] for each in profiles["profiled in part"]] == [4, 4]
    assert [each["profile"]["repeated"] for each in answers["slow, overlapped"]] == [1, 1]
    assert part["kernel_count"] == pytest.approx(whole["kernel_count"], rel=0.02)
    assert losses(answers["profiled in part"][0]) == losses(answers["profiled whole"][0])


def test_recompute_lowers_the_peak_and_keeps_the_loss(answers: Answers) -> None:
    nothing, some, everything = (answers[f"{what} recomputed"][0] for what in ("nothing", "some", "all"))
    assert furthest(losses(nothing), losses(everything)) < 1e-6
    assert furthest(losses(nothing), losses(some)) < 1e-6
    weights_and_gradients = 2 * 4 * nothing["parameter_count"]
    assert everything["peak_memory_bytes"] > weights_and_gradients
    assert everything["peak_memory_bytes"] < 0.6 * nothing["peak_memory_bytes"]
    assert everything["peak_memory_bytes"] < some["peak_memory_bytes"] < 0.8 * nothing["peak_memory_bytes"]


def test_divergence_is_an_answer_of_all_ranks(answers: Answers) -> None:
    for answer in answers["diverges"]:
        assert answer["kind"] == "diverged"
        assert answer["step"] == 1
        assert answer["losses"][0] is not None
        assert answer["losses"][-1] is None


def analytic_parameters(model: ModelShape, padded_vocabulary: int) -> int:
    """Parameters of a grouped-query-attention MoE decoder without biases, counted by hand."""
    hidden, head = model.hidden_size, model.kv_channels
    attention = hidden * head * (2 * model.num_attention_heads + 2 * model.num_query_groups)
    experts = model.num_moe_experts * 3 * hidden * model.moe_ffn_hidden_size
    router, norms_of_layer = hidden * model.num_moe_experts, 2 * hidden
    embeddings = padded_vocabulary * hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    return model.num_layers * (attention + experts + router + norms_of_layer) + embeddings + hidden


def test_parameters_are_counted_once_in_every_layout(answers: Answers) -> None:
    expected = analytic_parameters(MODEL, padded_vocabulary=256)
    assert {name: answers[name][0]["parameter_count"] for name in PARITY} == dict.fromkeys(PARITY, expected)
    tied = answers["tied embeddings over a pipeline: two"][0]
    assert tied["parameter_count"] == analytic_parameters(TIED, padded_vocabulary=256)


EFFECTIVE: dict[str, dict[str, KnobValue]] = {
    "data": {
        "data_parallel_size": 2,
        "num_microbatches": 2,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "fp8": None,
        "use_distributed_optimizer": False,
    },
    "data, one sequence a micro-batch, overlapped": {
        "micro_batch_size": 1,
        "num_microbatches": 4,
        "overlap_grad_reduce": True,
    },
    "expert, alltoall": {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
    "tensor, experts split too": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "tensor, experts whole": {"expert_tensor_parallel_size": 1, "sequence_parallel": True, "data_parallel_size": 1},
    "virtual pipeline": {
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "num_microbatches": 4,
    },
    "full recompute": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "selective recompute": {"recompute_modules": "core_attn+moe+layernorm"},
    "sharded optimizer": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_effective_configuration_is_read_back(answers: Answers, name: str) -> None:
    found = answers[name][0]["effective"]
    assert {knob: found[knob] for knob in EFFECTIVE[name]} == EFFECTIVE[name]


def test_a_knob_that_megatron_ignores_is_rejected(answers: Answers) -> None:
    """The local spec takes moe_grouped_gemm=True and builds SequentialMLP all the same."""
    answer = answers["ignored knob"][0]
    assert (answer["kind"], answer["rule"]) == ("rejected", "effective-differs")
    assert answer["reason"] == "would measure something else: moe_grouped_gemm: requested True, effective False"


def test_environment_is_read_back_from_the_process(answers: Answers) -> None:
    assert answers["variable that is set"][0]["effective"]["OMP_NUM_THREADS"] == "1"
    lost = answers["variable that is lost"][0]
    assert (lost["rule"], lost["reason"]) == (
        "effective-differs",
        "would measure something else: NVTE_DEBUG_LEVEL: requested '2', effective None",
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_worker_would_leave_undone_is_refused(answers: Answers, name: str) -> None:
    rule, reason, _ = REFUSED[name]
    for answer in answers[name]:
        assert (answer["kind"], answer["rule"]) == ("rejected", rule)
        assert reason in answer["reason"]


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
def test_a_gpu_worker_without_transformer_engine_refuses(answers: Answers) -> None:
    assert answers["cuda"][0]["error"].startswith("ImportError: transformer-engine is not installed on this worker")
    outcome = classify(ImportError(answers["cuda"][0]["error"]), "build")
    assert isinstance(outcome, Rejected)
    assert outcome.rule == "stack-refuses"


def test_latent_attention_under_tensor_parallelism_is_not_exact(answers: Answers) -> None:
    """The reason for rule CPU-11: without TP two ranks stay within 1e-6 of one process."""
    one, two = answers["latent attention, expert: one"][0], answers["latent attention, tensor"][0]
    assert 1e-6 < furthest(losses(one), losses(two)) < 1e-3


def test_overlapped_sends_need_the_interleaved_schedule(answers: Answers) -> None:
    """The reason for rule PAR-30."""
    assert "does not support overlapping p2p" in answers["overlap without virtual stages"][0]["error"]


def test_what_megatron_refuses_is_rejected_with_its_reason(answers: Answers) -> None:
    for answer in answers["refused knobs"]:
        assert (answer["kind"], answer["rule"]) == ("rejected", "megatron-config")
        assert "moe_act in recompute_modules is only supported with moe_grouped_gemm" in answer["reason"]


def test_unknown_knob_is_named(answers: Answers) -> None:
    assert answers["misspelt knob"][0]["error"] == (
        "ValueError: unknown knob 'micro_batchsize'; nearest: 'micro_batch_size'"
    )


def test_a_fact_of_the_model_is_no_knob(answers: Answers) -> None:
    assert "'moe_router_topk' is a fact of the model" in answers["fact as a knob"][0]["error"]


def test_unset_knobs_are_megatrons_defaults(answers: Answers) -> None:
    assert losses(answers["unset lists"][0]) == losses(answers["data"][0])[:3]
    assert answers["unset lists"][0]["effective"]["recompute_granularity"] is None


def test_batch_that_does_not_divide_is_refused(answers: Answers) -> None:
    assert "global_batch_size 8 is not divisible by micro_batch_size 3 x 2" in answers["uneven batch"][0]["error"]


def test_layout_independent_init_is_a_choice(answers: Answers) -> None:
    own, ours = losses(answers["megatron's own draw"][0]), losses(answers["one process"][0])
    assert own[0] != ours[0]
    assert own[0] == pytest.approx(ours[0], abs=0.1)  # another draw of the same distribution
