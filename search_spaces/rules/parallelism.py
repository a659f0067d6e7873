"""Rules of the layout and of batch arithmetic.

Short names in messages: W ranks a trial, TP tensor, CP context, PP pipeline, VPP virtual stages, EP expert, ETP
expert-tensor, DP data-parallel ranks. `core/` paths are megatron-core 0.19.2; MLM is Megatron-LM core_r0.19.0.
"""

from search_spaces.rules.rule import EXPERT_GRID, WORLD, Case, Rule

TP, SP, CP = "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"
PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
P2P, MBS = "overlap_p2p_comm", "micro_batch_size"
# Knobs that split layers unevenly; where one is set, the rules of the even split have nothing to say.
UNEVEN = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _world(case: Case) -> str | None:
    layout = case.layout
    ranks = layout.tensor * layout.pipeline * layout.context
    return f"{case.world} ranks are not divisible by TP x PP x CP = {ranks}" if case.world % ranks else None


def _expert_grid(case: Case) -> str | None:
    layout = case.layout
    ranks = layout.expert_tensor * layout.expert * layout.pipeline
    return f"{case.world} ranks are not divisible by ETP x EP x PP = {ranks}" if case.world % ranks else None


def _experts(case: Case) -> str | None:
    experts, spread = case.model.num_moe_experts, case.layout.expert
    return f"{experts} experts are not divisible by EP {spread}" if experts % spread else None


def _heads(case: Case) -> str | None:
    heads, tensor = case.model.num_attention_heads, case.layout.tensor
    return f"{heads} attention heads are not divisible by TP {tensor}" if heads % tensor else None


def _groups(case: Case) -> str | None:
    groups, tensor = case.model.num_query_groups, case.layout.tensor
    wrong = groups % tensor and tensor % groups
    return f"{groups} query groups are neither a multiple nor a divisor of TP {tensor}" if wrong else None


def _sequence_parallel_alone(case: Case) -> str | None:
    wrong = case.layout.sequence_parallel and case.layout.tensor == 1
    return "sequence_parallel without tensor parallelism" if wrong else None


def _tensor_without_sequence(case: Case) -> str | None:
    wrong = case.layout.tensor > 1 and not case.layout.sequence_parallel
    return f"an MoE layer does not train with TP {case.layout.tensor} without sequence_parallel" if wrong else None


def _virtual_without_stages(case: Case) -> str | None:
    wrong = case.layout.virtual_pipeline is not None and case.layout.pipeline == 1
    return f"VPP {case.layout.virtual_pipeline} with a single pipeline stage" if wrong else None


def _uneven(case: Case) -> bool:
    return any(case.knobs.get(name) for name in UNEVEN)


def _stages(case: Case) -> str | None:
    layers, stages = case.model.num_layers, case.layout.pipeline
    if _uneven(case):
        return None
    return f"{layers} layers are not divisible by PP {stages}" if layers % stages else None


def _chunks(case: Case) -> str | None:
    layout, layers = case.layout, case.model.num_layers
    if layout.virtual_pipeline is None or layout.pipeline == 1 or layers % layout.pipeline or _uneven(case):
        return None
    a_stage = layers // layout.pipeline
    wrong = a_stage % layout.virtual_pipeline
    return f"{a_stage} layers a stage are not divisible by VPP {layout.virtual_pipeline}" if wrong else None


def _context_halves(case: Case) -> str | None:
    context, sequence = case.layout.context, case.training.sequence_length
    wrong = context > 1 and sequence % (2 * context)
    return f"a sequence of {sequence} is not divisible by 2 x CP = {2 * context}" if wrong else None


def _global_batch(case: Case) -> str | None:
    micro, data, batch = case.integer(MBS, 1), case.data_parallel, case.training.global_batch_size
    wrong = data and batch % (micro * data)
    return f"global batch {batch} is not divisible by micro-batch {micro} x DP {data}" if wrong else None


def _interleaved_microbatches(case: Case) -> str | None:
    stages, count = case.layout.pipeline, case.microbatches
    if case.layout.virtual_pipeline is None or stages == 1 or not count:
        return None
    wrong = count < stages or count % stages
    return f"the interleaved schedule cannot group {count} micro-batches by PP {stages}" if wrong else None


def _silent_swap(case: Case) -> str | None:
    interleaved = case.layout.virtual_pipeline is not None and case.layout.pipeline == 2
    wrong = interleaved and not case.on(P2P)
    return "VPP on 2 stages without overlap_p2p_comm runs and trains wrong (grad norm 51.9 for 0.74)" if wrong else None


def _overlap_without_chunks(case: Case) -> str | None:
    wrong = case.on(P2P) and (case.layout.virtual_pipeline is None or case.layout.pipeline == 1)
    return "overlap_p2p_comm without the interleaved schedule" if wrong else None


def _vocabulary(case: Case) -> str | None:
    words, tensor = case.model.vocab_size, case.layout.tensor
    return f"a vocabulary of {words} is not divisible by TP {tensor}" if words % tensor else None


def _sequence_split(case: Case) -> str | None:
    layout, sequence = case.layout, case.training.sequence_length
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    return f"a sequence of {sequence} does not split into CP x TP = {parts} parts" if sequence % parts else None


def _expert_width(case: Case) -> str | None:
    width, split = case.model.moe_ffn_hidden_size, case.layout.expert_tensor
    return f"moe_ffn_hidden_size {width} is not divisible by ETP {split}" if width % split else None


def _dense_width(case: Case) -> str | None:
    model, tensor = case.model, case.layout.tensor
    widths = {"moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or 0}
    if model.first_dense_layers:
        widths["ffn_hidden_size"] = model.ffn_hidden_size
    wrong = [f"{name} {width}" for name, width in widths.items() if width % tensor]
    return f"{' and '.join(wrong)} not divisible by TP {tensor}" if wrong else None


def _one_chunk(case: Case) -> str | None:
    return "VPP 1 is the schedule without virtual stages" if case.layout.virtual_pipeline == 1 else None


RULES = (
    Rule("PAR-01", WORLD, _world, "core/parallel_state.py:822", "choose sizes whose product divides the ranks"),
    Rule("PAR-02", EXPERT_GRID, _expert_grid, "core/parallel_state.py:881", "lower EP or ETP (absent ETP means TP)"),
    Rule("PAR-03", frozenset({EP}), _experts, "core/transformer/moe/moe_layer.py:185", "choose an EP that does"),
    Rule("PAR-05", frozenset({TP}), _heads, "core/transformer/transformer_config.py:1324", "choose a TP that does"),
    Rule("PAR-06", frozenset({TP}), _groups, "core/transformer/transformer_config.py:1342", "choose another TP"),
    Rule(
        "PAR-08", frozenset({TP, SP}), _sequence_parallel_alone, "core/model_parallel_config.py:504",
        "set sequence_parallel to false or TP above 1",
    ),
    Rule(
        "PAR-09", frozenset({TP, SP}), _tensor_without_sequence, "core/transformer/moe/moe_layer.py:629",
        "set sequence_parallel to true",
    ),
    Rule(
        "PAR-10", frozenset({PP, VPP}), _virtual_without_stages, "core/parallel_state.py:829",
        "leave virtual_pipeline_model_parallel_size out or set PP above 1",
    ),
    Rule("PAR-12", frozenset({PP, *UNEVEN}), _stages, "core/transformer/transformer_block.py:150", "choose another PP"),
    Rule(
        "PAR-13", frozenset({PP, VPP, *UNEVEN}), _chunks, "core/transformer/transformer_block.py:169",
        "choose a VPP that divides the layers of a stage",
    ),
    Rule("PAR-18", frozenset({CP}), _context_halves, "MLM arguments.py:1296", "lower CP or lengthen the sequence"),
    Rule(
        "PAR-23", WORLD | {MBS}, _global_batch, "core/num_microbatches_calculator.py:381",
        "choose a micro-batch that divides, or change training.global_batch_size",
    ),
    Rule(
        "PAR-24", WORLD | {MBS, VPP}, _interleaved_microbatches, "core/pipeline_parallel/schedules.py:1133",
        "lower the micro-batch, or make their number a multiple of PP",
    ),
    Rule(
        "PAR-27", frozenset({PP, VPP, P2P}), _silent_swap, "MLM arguments.py:972; Megatron-LM#750; seen on gloo",
        "set overlap_p2p_comm to true",
    ),
    Rule(
        "PAR-30", frozenset({PP, VPP, P2P}), _overlap_without_chunks, "core/pipeline_parallel/schedules.py:2155",
        "set overlap_p2p_comm to false or VPP above 1",
    ),
    Rule(
        "SHP-01", frozenset({TP}), _vocabulary, "core/tensor_parallel/layers.py, VocabParallelEmbedding",
        "pad the vocabulary or choose another TP",
    ),
    Rule(
        "SHP-02", frozenset({TP, SP, CP}), _sequence_split, "core/tensor_parallel/mappings.py, scatter",
        "lower TP or CP, or change training.sequence_length",
    ),
    Rule("SHP-03", frozenset({TP, ETP}), _expert_width, "core/transformer/moe/experts.py", "choose another ETP"),
    Rule("SHP-04", frozenset({TP}), _dense_width, "core/transformer/mlp.py, divide()", "choose another TP"),
    Rule("DUP-01", frozenset({VPP}), _one_chunk, "the same candidate under another name", "leave it out"),
)  # fmt: skip
