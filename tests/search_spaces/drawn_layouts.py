"""Layouts drawn at random for small models: legal or not, on up to 64 ranks."""

import math
import random
from dataclasses import replace

from hypothesis import strategies as st

from search_spaces.candidate import KnobValue, layout_of
from search_spaces.presets import load_model
from search_spaces.rules import Case
from search_spaces.shapes import ModelShape, TrainingShape
from tests.search_spaces.cases import STACK, gpus

_TINY = load_model("tiny-moe")
_LATENT = {
    "multi_latent_attention": True, "num_query_groups": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16, "v_head_dim": 16, "moe_shared_expert_intermediate_size": 64, "first_dense_layers": 1,
}  # fmt: skip
MODELS: tuple[ModelShape, ...] = (
    _TINY.model_copy(update={"num_layers": 8}),
    _TINY.model_copy(update={"num_layers": 6, "num_attention_heads": 8, "num_query_groups": 8}),
    _TINY.model_copy(update=_LATENT),
    _TINY.model_copy(update={"num_attention_heads": 6, "num_query_groups": 3, "hidden_size": 192, "vocab_size": 513}),
    _TINY.model_copy(update={"num_moe_experts": 6, "moe_ffn_hidden_size": 100, "first_dense_layers": 1}),
    _TINY.model_copy(
        update={"ffn_hidden_size": 258, "first_dense_layers": 2, "moe_shared_expert_intermediate_size": 36}
    ),
)
# What every layout says; repetitions weigh.
SIZES: dict[str, tuple[KnobValue, ...]] = {
    "tensor_model_parallel_size": (1, 1, 2, 4),
    "expert_tensor_parallel_size": (1, 1, 2, None),
    "context_parallel_size": (1, 1, 1, 2),
    "pipeline_model_parallel_size": (1, 1, 2, 2, 4),
    "virtual_pipeline_model_parallel_size": (None, None, 2),
    "microbatch_group_size_per_vp_stage": (None, None, None, 16),
    "expert_model_parallel_size": (1, 2, 4),
    "micro_batch_size": (1, 1, 2),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
}
# What is odd in it, or wrong.
ODD: tuple[tuple[str, KnobValue], ...] = (
    ("tensor_model_parallel_size", 3), ("tensor_model_parallel_size", 8), ("expert_tensor_parallel_size", 3),
    ("context_parallel_size", 3), ("pipeline_model_parallel_size", 3), ("expert_model_parallel_size", 3),
    ("expert_model_parallel_size", 8), ("virtual_pipeline_model_parallel_size", 1),
    ("virtual_pipeline_model_parallel_size", 3), ("virtual_pipeline_model_parallel_size", 4),
    ("num_layers_in_first_pipeline_stage", 0), ("num_layers_in_first_pipeline_stage", 1),
    ("num_layers_in_first_pipeline_stage", 2), ("num_layers_in_last_pipeline_stage", 2),
    ("num_layers_in_last_pipeline_stage", 3), ("account_for_embedding_in_pipeline_split", True),
    ("account_for_loss_in_pipeline_split", True), ("pipeline_model_parallel_layout", "Ettt|tL"),
    ("pipeline_model_parallel_layout", "Ett|tt|t|t|t|tL"), ("pipeline_model_parallel_layout", "Et*4|t*4L"),
    ("pipeline_model_parallel_layout", "Et|t|t|tL"), ("microbatch_group_size_per_vp_stage", 1),
    ("microbatch_group_size_per_vp_stage", 3), ("microbatch_group_size_per_vp_stage", 64),
    ("overlap_p2p_comm", True), ("overlap_p2p_comm", False), ("sequence_parallel", False),
    ("sequence_parallel", True), ("micro_batch_size", 3), ("micro_batch_size", 16),
    ("moe_token_dispatcher_type", "alltoall_seq"),
)  # fmt: skip
COPIES = (1, 1, 2, 2, 3)  # of the smallest world that a layout divides
WORLDS = (1, 2, 4, 8, 12, 16, 32, 64)


def _target(source: random.Random) -> Case:
    """Without ranks: they follow the layout."""
    training = TrainingShape(
        sequence_length=source.choice((128, 128, 128, 126)), global_batch_size=source.choice((64, 64, 8, 24)),
        params_dtype=source.choice(("bf16", "fp32")), moe_router_load_balancing_type="aux_loss",
    )  # fmt: skip
    return Case({}, source.choice(MODELS), gpus(1), training, {}, STACK)


_SOURCE = random.Random(5)
_TARGETS = st.sampled_from([_target(_SOURCE) for _ in range(400)])
_VALUES = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SIZES.items()})
_ODDITIES = st.lists(st.sampled_from(ODD), max_size=2)


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """A layout that means something, with up to two oddities, on ranks that it divides in four cases of five."""
    values, target = dict(draw(_VALUES)), draw(_TARGETS)
    if values["pipeline_model_parallel_size"] == 1:
        values["virtual_pipeline_model_parallel_size"] = None
    if values["virtual_pipeline_model_parallel_size"] is not None:
        values["overlap_p2p_comm"] = True
    if values["tensor_model_parallel_size"] == 1:
        values["expert_tensor_parallel_size"] = None
    else:
        values["sequence_parallel"] = True
    values |= dict(draw(_ODDITIES))
    knobs = {name: value for name, value in values.items() if value is not None}
    layout = layout_of(knobs)
    dense, experts = layout.tensor * layout.context, layout.expert_tensor * layout.expert
    fit = layout.pipeline * math.lcm(dense, experts) * draw(st.sampled_from(COPIES))
    world = fit if draw(st.integers(0, 4)) else draw(st.sampled_from(WORLDS))
    return replace(target, knobs=knobs, cluster=gpus(min(world, 64)))
