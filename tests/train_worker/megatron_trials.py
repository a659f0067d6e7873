"""Small models, layouts and trials that the tests of the worker on real Megatron-Core share."""

from collections.abc import Mapping
from typing import Any

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from tests.train_worker.gang_script import Case
from train_worker.job import TrialJob

MODEL = ModelShape(
    name="test",
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=96,
    vocab_size=250,
    max_position_embeddings=128,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
)
TIED = MODEL.model_copy(update={"untie_embeddings_and_output_weights": False})
FIVE = MODEL.model_copy(update={"num_layers": 5})
RICH = MODEL.model_copy(
    update={
        "first_dense_layers": 1,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    }
)
MLA = MODEL.model_copy(
    update={
        "multi_latent_attention": True,
        "num_query_groups": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 24,
        "qk_layernorm": True,
    }
)
SGD = TrainingShape(
    sequence_length=32,
    global_batch_size=8,
    warmup_steps=2,
    measured_steps=4,
    params_dtype="fp32",
    optimizer="sgd",
    learning_rate=0.3,
)
SHORT = SGD.model_copy(update={"warmup_steps": 1, "measured_steps": 2})
ADAM = SGD.model_copy(update={"optimizer": "adam", "learning_rate": 1e-3, "measured_steps": 1})
HALF = SHORT.model_copy(update={"params_dtype": "bf16"})
LONG = SHORT.model_copy(update={"sequence_length": 128, "global_batch_size": 16})

EXPERT: dict[str, KnobValue] = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
TENSOR: dict[str, KnobValue] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPE: dict[str, KnobValue] = {"pipeline_model_parallel_size": 2}
VIRTUAL: dict[str, KnobValue] = PIPE | {"virtual_pipeline_model_parallel_size": 2}
FULL: dict[str, KnobValue] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE: dict[str, KnobValue] = {
    "recompute_granularity": "selective",
    "recompute_modules": "core_attn+moe+layernorm",
}


def case(
    world: int,
    training: TrainingShape = SGD,
    model: ModelShape = MODEL,
    /,
    env: Mapping[str, str] | None = None,
    **knobs: KnobValue,
) -> Case:
    """`env` is only asked for here: the rank's environment is the launcher's work. Not profiled: test_gang.py does."""
    candidate = Candidate(knobs={"micro_batch_size": 2} | knobs, env=dict(env or {}))
    cluster = ClusterShape(device="cpu", workers=world, workers_per_trial=world, workers_per_node=world)
    job = TrialJob(
        trial_id="t",
        candidate=candidate,
        model=model,
        cluster=cluster,
        training=training,
        seed=7,
        profile=False,
        time_limit_s=100,
    )
    return Case(job)


def on_cuda(case: Case) -> Case:
    """The same trial for a GPU worker: here only to be refused before anything touches a GPU."""
    cluster = case.job.cluster.model_copy(update={"device": "cuda", "gpu_arch": "H200 sm_90"})
    return Case(case.job.model_copy(update={"cluster": cluster}))


Answers = dict[str, list[dict[str, Any]]]


def losses(answer: dict[str, Any]) -> list[float]:
    assert answer.get("kind") == "measured", answer
    return [step["loss"] for step in answer["warmup"] + answer["steps"]]


def norms(answer: dict[str, Any]) -> list[float]:
    return [step["grad_norm"] for step in answer["warmup"] + answer["steps"]]


def furthest(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
