"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from dataclasses import replace

from search_spaces.candidate import KnobValue
from search_spaces.partial import PartialModel
from search_spaces.rules import Case
from tests.search_spaces import oracle_parallelism as real
from tests.search_spaces.cases import TINY, case, cpus, gpus
from tests.search_spaces.examples.clusters import H2, H8
from tests.search_spaces.oracle import Oracle

MLA = {"multi_latent_attention": True, "num_query_groups": TINY.num_attention_heads}
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
SHARDED: dict[str, KnobValue] = {"use_distributed_optimizer": True}
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
LINEAR: dict[str, KnobValue] = {
    "experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 4, "linear_attention_freq": 2,
}  # fmt: skip
# Two stages of three chunks for the four layers of the tiny model, and one MTP layer.
LAYOUT = "Et|t|t|t|m|L"


def dense(**knobs: KnobValue) -> Case:
    """The tiny model without its experts."""
    facts = {name: getattr(TINY, name) for name in ("name", "num_layers", "hidden_size", "num_attention_heads")}
    facts |= {"num_query_groups": 2, "ffn_hidden_size": TINY.ffn_hidden_size, "vocab_size": TINY.vocab_size}
    return replace(case(H8, **knobs), model=PartialModel.of({**facts, "dense": True}))


def waves(count: int, **knobs: KnobValue) -> Case:
    """`count` micro-batches a step on two stages."""
    return case(
        pp=2, training={"global_batch_size": count}, **{"vpp": 2, "p2p": True, "batch_p2p_comm": False, **knobs}
    )


def sparse(**knobs: KnobValue) -> Case:
    """DSA attention, which is latent."""
    return case(H2, model=MLA, experimental_attention_variant="dsa", **knobs)


def layout(text: str, **knobs: KnobValue) -> Case:
    return case(H8, pp=2, p2p=True, pipeline_model_parallel_layout=text, **knobs)


EXAMPLES: dict[str, tuple[Case, Case]] = {
    "PAR-01": (case(tp=4, sp=True, etp=1), case(cpus(4), tp=4, sp=True, etp=1)),
    "PAR-02": (case(tp=2, sp=True, ep=2), case(tp=2, sp=True, ep=2, etp=1)),
    "PAR-03": (case(cpus(3), ep=3, training={"global_batch_size": 12}), case(cpus(4), ep=4)),
    "PAR-04": (dense(ep=2), dense(ep=1)),
    "PAR-05": (case(cpus(8), tp=8, sp=True), case(cpus(4), tp=4, sp=True)),
    "PAR-06": (
        case(tp=2, sp=True, model={"num_attention_heads": 6, "num_query_groups": 3}),
        case(tp=2, sp=True, model={"num_attention_heads": 6, "num_query_groups": 2}),
    ),
    "PAR-06b": (case(cpus(4), tp=4), case(tp=2)),
    "PAR-07": (case(H8, cp=8, **LINEAR), case(H8, cp=4, **LINEAR)),
    "PAR-07b": (case(H8, cp=2, **LINEAR), case(H8, **LINEAR)),
    "PAR-08": (case(sp=True), case(sp=True, tp=2)),
    "PAR-09": (case(tp=2), case(tp=2, sp=True)),
    "PAR-10": (case(vpp=2), case(vpp=2, pp=2)),
    "PAR-11": (case(pp=2, pipeline_dtype=None), case(pp=2)),
    "PAR-12": (case(cpus(3), pp=3), case(cpus(3), pp=3, **COUNTED)),
    "PAR-13": (case(pp=2, vpp=4, p2p=True), case(pp=2, vpp=2, p2p=True)),
    "PAR-13b": (
        case(pp=2, num_layers_per_virtual_pipeline_stage=3), case(pp=2, num_layers_per_virtual_pipeline_stage=2),
    ),
    "PAR-14": (
        case(H8, pp=4, num_layers_in_first_pipeline_stage=2), case(H8, pp=4, num_layers_in_first_pipeline_stage=1),
    ),
    "PAR-15": (
        case(H8, pp=2, num_layers_in_first_pipeline_stage=2, account_for_loss_in_pipeline_split=True),
        case(H8, pp=2, num_layers_in_first_pipeline_stage=2),
    ),
    "PAR-16": (layout(LAYOUT, vpp=2, mtp_num_layers=1), layout(LAYOUT, vpp=3, mtp_num_layers=1)),
    "PAR-18": (case(H2, cp=2, training={"sequence_length": 126}), case(H2, cp=2, training={"sequence_length": 124})),
    "PAR-19": (
        case(gpus(4), cp=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes="[2, 4]"),
        case(gpus(4), cp=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes="[2, 2]"),
    ),
    "PAR-20": (
        case(H2, cp=2, cp_comm_type='["p2p", "p2p", "p2p"]'),
        case(H2, cp=2, cp_comm_type='["p2p", "a2a", "p2p", "a2a"]'),
    ),
    "PAR-20b": (case(H2, cp=2, cp_comm_type="ring"), case(H2, cp=2, cp_comm_type="p2p")),
    "PAR-20c": (
        case(gpus(4), cp=4, cp_comm_type="a2a", model={"num_query_groups": 2}),
        case(gpus(4), cp=4, cp_comm_type="a2a", model={"num_query_groups": 4}),
    ),
    "PAR-21": (
        case(tp=2, sp=True, etp=2, add_bias_linear=True, bias_dropout_fusion=False),
        case(tp=2, sp=True, etp=1, add_bias_linear=True, bias_dropout_fusion=False),
    ),
    "PAR-22": (
        case(tp=2, sp=True, tensor_parallel_num_weight_shards=3),
        case(tp=2, sp=True, tensor_parallel_num_weight_shards=4),
    ),
    "PAR-22b": (
        case(cpus(8), **SHARDED, tensor_parallel_num_weight_shards=2, num_distributed_optimizer_instances=2),
        case(cpus(8), **SHARDED, tensor_parallel_num_weight_shards=2),
    ),
    "PAR-23": (case(mbs=16), case(mbs=8)),
    "PAR-24": (waves(3), waves(4)),
    "PAR-25": (
        case(cpus(8), **SHARDED, pp=2, ep=4, num_distributed_optimizer_instances=2),
        case(cpus(8), **SHARDED, pp=2, ep=2, num_distributed_optimizer_instances=2),
    ),
    "PAR-26": (
        case(num_virtual_stages_per_pipeline_rank=2, pipeline_model_parallel_layout=LAYOUT),
        case(num_virtual_stages_per_pipeline_rank=2),
    ),
    "PAR-27": (case(pp=2, vpp=2), case(pp=2, vpp=2, p2p=True)),
    "PAR-28": (
        case(H8, tp=2, sp=True, env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}), case(H8, tp=2, sp=True, env=CONNECTIONS),
    ),
    "PAR-28b": (case(H8, tp=2, sp=True), case(H8, tp=2, sp=True, env=CONNECTIONS)),
    "PAR-29": (case(mbs=2, eval_global_batch_size=6), case(mbs=2, eval_global_batch_size=8)),
    "PAR-30": (
        case(overlap_p2p_comm_warmup_flush=True),
        case(overlap_p2p_comm_warmup_flush=True, p2p=True, batch_p2p_comm=False),
    ),
    "PAR-30b": (case(pp=2, p2p=True, batch_p2p_comm=False), case(pp=2, vpp=2, p2p=True, batch_p2p_comm=False)),
    "PAR-31": (case(model=MLA, group_query_attention=True), case(model=MLA)),
    "PAR-32": (
        case(cpus(8), pp=2, tp=2, sp=True, etp=1, use_tp_pp_dp_mapping=True),
        case(cpus(8), pp=2, tp=2, sp=True, etp=2, use_tp_pp_dp_mapping=True),
    ),
    "PAR-33": (
        sparse(cp=2, cp_comm_type="p2p"), sparse(cp=2, cp_comm_type="all_gather"),
    ),
    "PAR-33b": (sparse(apply_rope_fusion=True), sparse(apply_rope_fusion=False)),
    "PAR-33c": (sparse(cp=2, cp_comm_type="all_gather"), sparse()),
    "PAR-33d": (sparse(add_bias_linear=True), sparse(add_bias_linear=False)),
    "TRAP-25": (case(pp=2, p2p=True), case(pp=2, vpp=2, p2p=True)),
    "TRAP-34": (case(H2, cp=2, cp_comm_type="a2a+p2p"), case(H2, cp=2, cp_comm_type="a2a")),
    "SHP-01": (
        case(tp=2, sp=True, model={"vocab_size": 511}, launchers=("megatron-core",)),
        case(tp=2, sp=True, model={"vocab_size": 510}, launchers=("megatron-core",)),
    ),
    "SHP-02": (
        case(tp=2, sp=True, training={"sequence_length": 127}),
        case(tp=2, sp=True, training={"sequence_length": 126}),
    ),
    "SHP-03": (
        case(tp=2, sp=True, etp=2, model={"moe_ffn_hidden_size": 127}),
        case(tp=2, sp=True, etp=1, model={"moe_ffn_hidden_size": 127}),
    ),
    "SHP-04": (
        case(tp=2, sp=True, model={"first_dense_layers": 1, "ffn_hidden_size": 255}),
        case(tp=2, sp=True, model={"first_dense_layers": 0, "ffn_hidden_size": 255}),
    ),
}  # fmt: skip
ORACLE: dict[str, Oracle] = {
    "PAR-01": real.groups_refusal,
    "PAR-02": real.groups_refusal,
    "PAR-03": real.layer_refusal,
    "PAR-04": real.dense_refusal,
    "PAR-09": real.forward_refusal,
    "PAR-10": real.groups_refusal,
    "PAR-12": real.stages_refusal,
    "PAR-13": real.stages_refusal,
    "PAR-19": real.groups_refusal,
    "PAR-22b": real.groups_refusal,
    "PAR-23": real.batch_refusal,
    "PAR-24": real.schedule_refusal,
    "PAR-25": real.groups_refusal,
    "PAR-30b": real.schedule_refusal,
    "PAR-32": real.groups_refusal,
    "SHP-01": real.vocabulary_refusal,
    "SHP-02": real.scatter_refusal,
    "SHP-03": real.layer_refusal,
    "SHP-04": real.dense_mlp_refusal,
}
