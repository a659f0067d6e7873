"""Rules of the layout and of batch arithmetic; those of pipeline stages are in `pipeline`, of CP in `context`.

Short names in messages: W ranks a trial, TP tensor, CP context, PP pipeline, VPP virtual stages, EP expert, ETP
expert-tensor, DP data-parallel ranks. `core/` paths are megatron-core 0.19.2; MLM is Megatron-LM core_r0.19.0.
"""

from search_spaces.rules import context, pipeline
from search_spaces.rules.rule import EXPERT_GRID, WORLD, Case, Launcher, Rule

TP, SP, CP = "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"
PP, EP, ETP = "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
MBS, EP_OVERLAP = "micro_batch_size", "overlap_moe_expert_parallel_comm"
SHARDS, EXPERT_SHARDS = "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"
INSTANCES, FREQUENCY = "num_distributed_optimizer_instances", "linear_attention_freq"
VARIANT = "experimental_attention_variant"
EVAL_BATCH, EVAL_MBS = "eval_global_batch_size", "eval_micro_batch_size"
CONNECTIONS, FSDP, TORCH_FSDP = "CUDA_DEVICE_MAX_CONNECTIONS", "use_megatron_fsdp", "use_torch_fsdp2"
KEY_HEADS, VALUE_HEADS, STAGES_BEFORE_DATA = "linear_num_key_heads", "linear_num_value_heads", "use_tp_pp_dp_mapping"
CORE: frozenset[Launcher] = frozenset({"megatron-core"})
MLM: frozenset[Launcher] = frozenset({"megatron-lm"})
BOTH_LAUNCHERS: frozenset[Launcher] = frozenset({"megatron-lm", "megatron-bridge"})


def _copies(case: Case, shards: str, split: int) -> int:
    """Ranks that share one tensor-parallel shard's weights (GTP); 1 where the number of shards is not legal."""
    count = case.integer(shards, split)
    return count // split if count >= split and not count % split else 1


def _world(case: Case) -> str | None:
    layout = case.layout
    copies = _copies(case, SHARDS, layout.tensor)
    ranks = layout.tensor * layout.pipeline * layout.context * copies
    names = "TP x PP x CP" + (" x GTP" if copies > 1 else "")
    return f"{case.world} ranks are not divisible by {names} = {ranks}" if case.world % ranks else None


def _expert_grid(case: Case) -> str | None:
    layout = case.layout
    copies = _copies(case, EXPERT_SHARDS, layout.expert_tensor)
    ranks = layout.expert_tensor * layout.expert * layout.pipeline * copies
    names = "ETP x EP x PP" + (" x EGTP" if copies > 1 else "")
    return f"{case.world} ranks are not divisible by {names} = {ranks}" if case.world % ranks else None


def _experts(case: Case) -> str | None:
    if case.dense or case.layout.expert == 1:
        return None
    experts, spread = case.model.num_moe_experts, case.layout.expert
    return f"{experts} experts are not divisible by EP {spread}" if experts % spread else None


def _no_experts(case: Case) -> str | None:
    return f"EP {case.layout.expert} for a model without experts" if case.dense and case.layout.expert > 1 else None


def _heads(case: Case) -> str | None:
    heads, tensor = case.model.num_attention_heads, case.layout.tensor
    return f"{heads} attention heads are not divisible by TP {tensor}" if heads % tensor else None


def _groups(case: Case) -> str | None:
    groups, tensor = case.model.num_query_groups, case.layout.tensor
    wrong = groups % tensor and tensor % groups
    return f"{groups} query groups are neither a multiple nor a divisor of TP {tensor}" if wrong else None


def _fewer_groups(case: Case) -> str | None:
    groups, tensor = case.model.num_query_groups, case.layout.tensor
    return f"{groups} query groups are not a multiple of TP {tensor}" if groups % tensor else None


def _linear_heads(case: Case) -> str | None:
    if case.text(VARIANT) != "gated_delta_net":
        return None
    if not case.knobs.get(FREQUENCY):
        return f"gated_delta_net without {FREQUENCY}"
    keys, values = case.integer(KEY_HEADS, 16), case.integer(VALUE_HEADS, 32)
    split = case.layout.tensor * case.layout.context
    if values % keys:
        return f"{values} linear-attention value heads are not a multiple of {keys} key heads"
    wrong = keys % split or values % split
    return f"{keys} key and {values} value heads are not divisible by TP x CP = {split}" if wrong else None


def _sequence_parallel_alone(case: Case) -> str | None:
    wrong = case.layout.sequence_parallel and case.layout.tensor == 1
    return "sequence_parallel without tensor parallelism" if wrong else None


def _tensor_without_sequence(case: Case) -> str | None:
    wrong = case.layout.tensor > 1 and not case.layout.sequence_parallel and not case.dense
    return f"an MoE layer does not train with TP {case.layout.tensor} without sequence_parallel" if wrong else None


def _biased_experts(case: Case) -> str | None:
    wrong = case.on("add_bias_linear") and not case.dense and case.layout.expert_tensor > 1
    return f"biases in experts split over ETP {case.layout.expert_tensor}" if wrong else None


def _weight_shards(case: Case) -> str | None:
    layout = case.layout
    for name, split in ((SHARDS, layout.tensor), (EXPERT_SHARDS, layout.expert_tensor)):
        count = case.integer(name, split)
        if count < split or count % split:
            return f"{name} {count} is not a multiple of its tensor-parallel size {split}"
    return None


def _shards_and_instances(case: Case) -> str | None:
    layout = case.layout
    shared = _copies(case, SHARDS, layout.tensor) > 1 or _copies(case, EXPERT_SHARDS, layout.expert_tensor) > 1
    wrong = shared and case.integer(INSTANCES, 1) > 1
    return f"more weight shards than tensor-parallel ranks with {INSTANCES} above 1" if wrong else None


def _global_batch(case: Case) -> str | None:
    data = case.data_parallel
    if case.knobs.get("num_microbatches") is not None or not data or _copies(case, SHARDS, case.layout.tensor) > 1:
        return None
    micro, batch = case.integer(MBS, 1), case.training.global_batch_size
    wrong = batch % (micro * data)
    return f"global batch {batch} is not divisible by micro-batch {micro} x DP {data}" if wrong else None


def _optimizer_instances(case: Case) -> str | None:
    count = case.integer(INSTANCES, 1)
    whole, experts = case.data_parallel * case.layout.context, case.expert_data_parallel
    wrong = [f"{what} {ranks}" for what, ranks in (("DP x CP", whole), ("expert DP", experts)) if ranks % count]
    return f"{' and '.join(wrong)} not divisible by {INSTANCES} {count}" if wrong else None


def _wants_one_connection(case: Case) -> bool:
    capability = case.compute_capability
    split = case.layout.tensor > 1 or case.layout.context > 1
    excused = case.on(FSDP) or case.on(TORCH_FSDP) or case.on(EP_OVERLAP)
    return capability is not None and capability[0] < 10 and split and not excused


def _one_connection(case: Case) -> str | None:
    said = case.env.get(CONNECTIONS)
    wrong = said not in (None, "1") and _wants_one_connection(case)
    return f"TP or CP before Blackwell with {CONNECTIONS} {said}" if wrong else None


def _connections_not_said(case: Case) -> str | None:
    """No published configuration lists its variables: a warning, though the launcher refuses an unset one."""
    wrong = case.env.get(CONNECTIONS) is None and _wants_one_connection(case)
    return f"TP or CP before Blackwell, and {CONNECTIONS} is not said" if wrong else None


def _evaluation_batch(case: Case) -> str | None:
    given = case.knobs.get(EVAL_BATCH) is not None or case.knobs.get(EVAL_MBS) is not None
    if not given or not case.data_parallel:
        return None
    batch = case.knobs.get(EVAL_BATCH)
    whole = case.training.global_batch_size if batch is None else int(batch)
    micro = case.integer(EVAL_MBS, case.integer(MBS, 1))
    wrong = whole % (micro * case.data_parallel)
    return f"evaluation batch {whole} is not divisible by {micro} x DP {case.data_parallel}" if wrong else None


def _latent_groups(case: Case) -> str | None:
    wrong = case.model.multi_latent_attention and case.on("group_query_attention")
    return "group_query_attention with multi_latent_attention" if wrong else None


def _stages_before_data(case: Case) -> str | None:
    data, experts = case.data_parallel, case.expert_data_parallel
    wrong = case.on(STAGES_BEFORE_DATA) and case.layout.pipeline > 1 and data and experts and data != experts
    return f"{STAGES_BEFORE_DATA} with DP {data} and expert DP {experts}" if wrong else None


def _vocabulary(case: Case) -> str | None:
    words, tensor = case.model.vocab_size, case.layout.tensor
    return f"a vocabulary of {words} is not divisible by TP {tensor}" if words % tensor else None


def _expert_width(case: Case) -> str | None:
    if case.dense:
        return None
    width, split = case.model.moe_ffn_hidden_size, case.layout.expert_tensor
    return f"moe_ffn_hidden_size {width} is not divisible by ETP {split}" if width % split else None


def _dense_width(case: Case) -> str | None:
    model, tensor = case.model, case.layout.tensor
    widths = {"moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or 0}
    if model.first_dense_layers or case.dense:
        widths["ffn_hidden_size"] = model.ffn_hidden_size
    wrong = [f"{name} {width}" for name, width in widths.items() if width % tensor]
    return f"{' and '.join(wrong)} not divisible by TP {tensor}" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
RULES = (
    Rule(
        "PAR-01", WORLD | {SHARDS}, _world, "core/parallel_state.py:822",
        "choose sizes whose product divides the ranks", level="build",
    ),
    Rule(
        "PAR-02", EXPERT_GRID | {EXPERT_SHARDS}, _expert_grid, "core/parallel_state.py:881",
        "lower EP or ETP (absent ETP means TP)", level="build",
    ),
    Rule(
        "PAR-03", frozenset({EP}), _experts, "core/transformer/moe/moe_layer.py:185", "choose an EP that does",
        level="build",
    ),
    Rule("PAR-04", frozenset({EP}), _no_experts, f"{_CONFIG}:1469", "set EP to 1 or num_moe_experts"),
    Rule("PAR-05", frozenset({TP}), _heads, f"{_CONFIG}:1324", "choose a TP that does"),
    Rule("PAR-06", frozenset({TP}), _groups, f"{_CONFIG}:1342", "choose another TP", since="0.16"),
    Rule(
        "PAR-06b", frozenset({TP}), _fewer_groups, "megatron-core 0.15.0 core/transformer/transformer_config.py:758",
        "choose another TP, or megatron-core 0.16, which repeats groups", until="0.16",
    ),
    Rule(
        "PAR-07", frozenset({TP, CP, VARIANT, FREQUENCY, KEY_HEADS, VALUE_HEADS}), _linear_heads,
        f"{_CONFIG}:1348-1382", "lower TP or CP",
    ),
    Rule(
        "PAR-08", frozenset({TP, SP}), _sequence_parallel_alone, "core/model_parallel_config.py:504",
        "set sequence_parallel to false or TP above 1",
    ),
    Rule(
        "PAR-09", frozenset({TP, SP}), _tensor_without_sequence, "core/transformer/moe/moe_layer.py:629",
        "set sequence_parallel to true", level="first step",
    ),
    *pipeline.RULES,
    *context.RULES,
    Rule(
        "PAR-21", frozenset({TP, ETP, "add_bias_linear"}), _biased_experts, f"{_CONFIG}:2280",
        "set expert_tensor_parallel_size to 1 or add_bias_linear to false",
    ),
    Rule(
        "PAR-22", frozenset({TP, ETP, SHARDS, EXPERT_SHARDS}), _weight_shards, "core/model_parallel_config.py:32-37",
        "choose a multiple", since="0.19",
    ),
    Rule(
        "PAR-22b", frozenset({TP, ETP, SHARDS, EXPERT_SHARDS, INSTANCES}), _shards_and_instances,
        "core/parallel_state.py:808", f"set {INSTANCES} to 1", level="build", since="0.19",
    ),
    Rule(
        "PAR-23", WORLD | {MBS, SHARDS, "num_microbatches"}, _global_batch, "core/num_microbatches_calculator.py:381",
        "choose a micro-batch that divides, or change training.global_batch_size",
    ),
    Rule(
        "PAR-25", WORLD | EXPERT_GRID | {INSTANCES}, _optimizer_instances, "core/parallel_state.py:922,1447",
        "choose a divisor of both", level="build",
    ),
    Rule(
        "PAR-28", frozenset({TP, CP, FSDP, TORCH_FSDP, EP_OVERLAP, CONNECTIONS}), _one_connection,
        "MLM arguments.py:1413", f"export {CONNECTIONS}=1", launchers=MLM,
    ),
    Rule(
        "PAR-28b", frozenset({TP, CP, FSDP, TORCH_FSDP, EP_OVERLAP, CONNECTIONS}), _connections_not_said,
        "MLM arguments.py:1413", f"export {CONNECTIONS}=1", "runtime risk", launchers=MLM,
    ),
    Rule(
        "PAR-29", WORLD | {MBS, EVAL_BATCH, EVAL_MBS}, _evaluation_batch,
        "MLM arguments.py:694; Bridge training/config.py:1335", "choose sizes that divide", launchers=BOTH_LAUNCHERS,
    ),
    Rule(
        "PAR-31", frozenset({"group_query_attention"}), _latent_groups, "MLM arguments.py:1893", "leave it out",
        launchers=MLM,
    ),
    Rule(
        "PAR-32", WORLD | EXPERT_GRID | {STAGES_BEFORE_DATA}, _stages_before_data, "core/parallel_state.py:898",
        "leave it out, or set EP x ETP to TP x CP", level="build",
    ),
    Rule(
        "SHP-01", frozenset({TP}), _vocabulary,
        "core/tensor_parallel/layers.py, VocabParallelEmbedding; launchers and this project's worker pad it",
        "pad the vocabulary or choose another TP", level="build", launchers=CORE,
    ),
    Rule(
        "SHP-03", frozenset({TP, ETP}), _expert_width, "core/transformer/moe/experts.py", "choose another ETP",
        level="build",
    ),
    Rule(
        "SHP-04", frozenset({TP}), _dense_width, "core/transformer/mlp.py, divide()", "choose another TP",
        level="build",
    ),
)  # fmt: skip
