"""Rules of pipeline stages: which layers each one holds, and the interleaved schedule over them.

A layout is Megatron's own notation: "Et*3|(tt|)*29m|L" (one letter a layer, "|" between stages) or a nested list as
JSON text. Short names in messages as in `parallelism`.
"""

import json
import re
from functools import lru_cache

from search_spaces.rules.rule import WORLD, Case, Launcher, Rule

PP, VPP, MBS = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "micro_batch_size"
LAYOUT, MTP = "pipeline_model_parallel_layout", "mtp_num_layers"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
P2P, BATCHED, FLUSH = "overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush"
GROUP_SIZE = "microbatch_group_size_per_vp_stage"
# Megatron-LM's own flags.
CHUNK_LAYERS, CHUNKS = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
FLAG_FIRST, FLAG_LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
HYBRID = ("hybrid_layer_pattern", "is_hybrid_model")  # layers are split by the pattern, not evenly
EVEN = frozenset({PP, LAYOUT, FIRST, LAST, EMBEDDING, LOSS, *HYBRID})
MLM: frozenset[Launcher] = frozenset({"megatron-lm"})

_LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_MOST_LAYERS = 100_000
Stages = tuple[tuple[str, ...], ...]


@lru_cache(maxsize=512)
def layout_stages(text: str) -> Stages:
    """The kinds of layer of each stage, in pipeline order. Raises ValueError: what is wrong with the text."""
    return _nested(text) if text.lstrip().startswith("[") else _compact(text)


def _compact(text: str) -> Stages:
    text = text.replace(",", "")
    for pattern in _REPEATS:
        if any(len(unit) * int(count) > _MOST_LAYERS for unit, count in pattern.findall(text)):
            raise ValueError(f"it repeats a layer more than {_MOST_LAYERS} times")
        text = pattern.sub(lambda found: found[1] * int(found[2]), text)
    unknown = sorted(set(text) - set(_LETTERS) - {"|"})
    if unknown:
        raise ValueError(f"unknown letter {unknown[0]!r}; known are E, t, m, L and |")
    return tuple(tuple(_LETTERS[letter] for letter in stage) for stage in text.split("|"))


def _nested(text: str) -> Stages:
    stages = json.loads(text)  # its JSONDecodeError is a ValueError
    if not all(isinstance(stage, list) for stage in stages):
        raise ValueError("it must be a list of lists, one a stage")
    kinds = tuple(tuple(str(kind).strip().lower() for kind in stage) for stage in stages)
    unknown = sorted({kind for stage in kinds for kind in stage} - set(_LETTERS.values()))
    if unknown:
        raise ValueError(f"unknown kind of layer {unknown[0]!r}; known are {', '.join(_LETTERS.values())}")
    return kinds


def virtual_stages(case: Case) -> int | None:
    """VPP as Megatron will have it: where it is not set, a layout with several stages a rank sets it."""
    given, stages = case.layout.virtual_pipeline, case.layout.pipeline
    if given is not None or not case.text(LAYOUT):
        return given
    try:
        count = len(layout_stages(case.text(LAYOUT)))
    except ValueError:
        return None
    return count // stages if count > stages and not count % stages else None


def p2p_overlap(case: Case) -> bool:
    """overlap_p2p_comm; not said, Megatron-LM and Megatron Bridge switch it on with the interleaved schedule."""
    if case.knobs.get(P2P) is None and case.launchers & {"megatron-lm", "megatron-bridge"}:
        return virtual_stages(case) is not None
    return case.on(P2P)


def _batched_p2p(case: Case) -> bool:
    """batch_p2p_comm; not said, what every launcher (and this project's worker) takes: the opposite of the overlap. Who
    calls bare Megatron-Core, where it is on, must say so."""
    return not p2p_overlap(case) if case.knobs.get(BATCHED) is None else case.on(BATCHED)


def _virtual_without_stages(case: Case) -> str | None:
    found = virtual_stages(case)
    return f"VPP {found} with a single pipeline stage" if found is not None and case.layout.pipeline == 1 else None


def _no_dtype(case: Case) -> str | None:
    # Not said it follows the model's type; said to be nothing ("none", or an explicit null) it stays so.
    said = "pipeline_dtype" in case.knobs and case.text("pipeline_dtype", "none").lower() in ("none", "null")
    return "pipeline stages without a pipeline_dtype" if case.layout.pipeline > 1 and said else None


def _split_evenly(case: Case) -> int | None:
    """Layers to split evenly over the stages, with those that stand for embedding and loss; None: split otherwise."""
    uneven = case.text(LAYOUT) or case.knobs.get(FIRST) is not None or case.knobs.get(LAST) is not None
    if uneven or any(case.knobs.get(name) for name in HYBRID) or case.layout.pipeline == 1:
        return None
    return case.model.num_layers + case.on(EMBEDDING) + case.on(LOSS)


def _stages(case: Case) -> str | None:
    layers, stages = _split_evenly(case), case.layout.pipeline
    if layers is None or not layers % stages:
        return None
    counted = " (embedding or loss counted as a layer)" if case.on(EMBEDDING) or case.on(LOSS) else ""
    return f"{layers} layers{counted} are not divisible by PP {stages}"


def _chunks(case: Case) -> str | None:
    layers, virtual, stages = _split_evenly(case), case.layout.virtual_pipeline, case.layout.pipeline
    if layers is None or virtual is None or layers % stages:
        return None
    a_stage = layers // stages
    return f"{a_stage} layers a stage are not divisible by VPP {virtual}" if a_stage % virtual else None


def _chunk_layers(case: Case) -> str | None:
    layers, each = _split_evenly(case), case.integer(CHUNK_LAYERS, 0)
    if layers is None or not each or layers % case.layout.pipeline:
        return None
    a_stage = layers // case.layout.pipeline
    return f"{a_stage} layers a stage are not divisible by {CHUNK_LAYERS} {each}" if a_stage % each else None


def _uneven_ends(case: Case) -> str | None:
    ends = {name: int(count) for name in (FIRST, LAST) if (count := case.knobs.get(name)) is not None}
    if not ends or case.text(LAYOUT):
        return None
    virtual = case.layout.virtual_pipeline
    for name, count in ends.items():
        if count <= 0:
            return f"{name} {count} must be above 0"
        if virtual is not None and count % virtual:
            return f"{name} {count} is not divisible by VPP {virtual}"
    layers = case.model.num_layers - sum(ends.values())
    stages = case.layout.pipeline - len(ends)
    # Below 0 the configuration accepts, and builds another number of layers than the model has.
    if bool(layers) != bool(stages) or layers < 0 or stages < 0:
        return f"{layers} layers remain for {stages} middle stages"
    if stages and layers % stages:
        return f"the {layers} layers between do not divide by {stages} middle stages"
    wrong = stages and virtual is not None and (layers // stages) % virtual
    return f"{layers // stages} layers a middle stage are not divisible by VPP {virtual}" if wrong else None


def _two_splits(case: Case) -> str | None:
    counts = [name for name in (FIRST, LAST) if case.knobs.get(name) is not None]
    extras = [name for name in (EMBEDDING, LOSS) if case.on(name)]
    if case.text(LAYOUT) and (counts or extras):
        return f"{LAYOUT} together with {', '.join(counts + extras)}"
    return f"{', '.join(counts)} together with {', '.join(extras)}" if counts and extras else None


def _layout(case: Case) -> str | None:
    if not case.text(LAYOUT):
        return None
    try:
        stages = layout_stages(case.text(LAYOUT))
    except ValueError as error:
        return f"the pipeline layout cannot be read: {error}"
    ranks, virtual = case.layout.pipeline, case.layout.virtual_pipeline
    if len(stages) % ranks:
        return f"a layout of {len(stages)} stages is not divisible by PP {ranks}"
    if virtual is not None and virtual != len(stages) // ranks:
        return f"VPP {virtual} with a layout of {len(stages)} stages on PP {ranks}"
    return _misplaced(stages, ranks, case.integer(MTP, 0)) or _miscounted(stages, case)


def _misplaced(stages: Stages, ranks: int, wanted: int) -> str | None:
    """What stands where it must not; `wanted` is the number of MTP layers."""
    flat = [kind for stage in stages for kind in stage]
    if not flat or flat[0] != "embedding" or flat.count("embedding") != 1:
        return "the layout must have one embedding, and first"
    if flat[-1] != "loss" or flat.count("loss") != 1:
        return "the layout must have one loss, and last"
    if flat.count("mtp") != wanted:
        return f"the layout has {flat.count('mtp')} MTP layers, the model {wanted}"
    if wanted and "decoder" in flat[flat.index("mtp") :]:
        return "the layout has decoder layers after an MTP layer"
    holders = [index for index, stage in enumerate(stages) if "mtp" in stage]
    if len(holders) > 1:
        return "the layout spreads the MTP layers over several stages"
    early = [index for index in holders if index < len(stages) - ranks]
    return "the layout has MTP layers outside the last virtual stage of a rank" if early else None


def _miscounted(stages: Stages, case: Case) -> str | None:
    found, layers = sum(stage.count("decoder") for stage in stages), case.model.num_layers
    return f"the layout has {found} decoder layers, the model {layers}" if found != layers else None


def _interleaved_microbatches(case: Case) -> str | None:
    stages = case.layout.pipeline
    if virtual_stages(case) is None or stages == 1 or not (count := case.microbatches):
        return None
    group = case.integer(GROUP_SIZE, stages)
    if not stages <= group <= count:
        return f"the interleaved schedule groups {group} micro-batches; with PP {stages} and {count} a step it cannot"
    rest = count % group
    wrong = 0 < rest < stages
    return f"{count} micro-batches in groups of {group} leave {rest}, fewer than PP {stages}" if wrong else None


def _two_virtual_flags(case: Case) -> str | None:
    given = [name for name in (CHUNK_LAYERS, CHUNKS, LAYOUT) if case.knobs.get(name)]
    if len(given) > 1:
        return f"{' and '.join(given)} both say how a rank's layers are chunked"
    ends = [name for name in (FLAG_FIRST, FLAG_LAST, FIRST, LAST) if case.knobs.get(name) is not None]
    return f"{CHUNK_LAYERS} with {' and '.join(ends)}" if given == [CHUNK_LAYERS] and ends else None


def _silent_swap(case: Case) -> str | None:
    if "megatron-bridge" in case.launchers and not case.launchers & MLM:
        return None
    wrong = (virtual_stages(case) or 1) > 1 and case.layout.pipeline == 2 and not p2p_overlap(case)
    return "VPP on 2 stages without overlap_p2p_comm runs and trains wrong (grad norm 51.9 for 0.74)" if wrong else None


def _flush(case: Case) -> str | None:
    wrong = case.on(FLUSH) and (not p2p_overlap(case) or _batched_p2p(case))
    return f"{FLUSH} without overlap_p2p_comm, or with batch_p2p_comm" if wrong else None


def _p2p(case: Case) -> str | None:
    if not p2p_overlap(case) or case.layout.pipeline == 1:
        return None
    if virtual_stages(case) is None:
        return None if case.launchers and case.launchers <= MLM else "overlap_p2p_comm without the interleaved schedule"
    return "overlap_p2p_comm together with batch_p2p_comm" if _batched_p2p(case) else None


def _forced_off(case: Case) -> str | None:
    asked = [name for name in (P2P, "align_param_gather") if case.on(name)]
    wrong = asked and case.layout.pipeline > 1 and virtual_stages(case) is None
    return f"{' and '.join(asked)} without virtual stages: Megatron-LM switches it off" if wrong else None


_CONFIG = "core/transformer/transformer_config.py"
_BLOCK = "core/transformer/transformer_block.py"
RULES = (
    Rule(
        "PAR-10", frozenset({PP, VPP, LAYOUT}), _virtual_without_stages, "core/parallel_state.py:829",
        "leave virtual_pipeline_model_parallel_size out or set PP above 1", level="build",
    ),
    Rule(
        "PAR-11", frozenset({PP, "pipeline_dtype"}), _no_dtype, "core/model_parallel_config.py:529",
        "leave pipeline_dtype out or name the model's",
    ),
    Rule("PAR-12", EVEN, _stages, f"{_BLOCK}:150", "choose another PP, or give a layout or uneven ends", level="build"),
    Rule(
        "PAR-13", EVEN | {VPP}, _chunks, f"{_BLOCK}:169", "choose a VPP that divides the layers of a stage",
        level="build",
    ),
    Rule(
        "PAR-13b", EVEN | {CHUNK_LAYERS}, _chunk_layers, "MLM arguments.py:941",
        "choose a number that divides the layers of a stage", launchers=MLM,
    ),
    Rule(
        "PAR-14", frozenset({PP, VPP, FIRST, LAST, LAYOUT}), _uneven_ends, f"{_CONFIG}:1998",
        "change the layers of the first or last stage",
    ),
    Rule(
        "PAR-15", frozenset({FIRST, LAST, EMBEDDING, LOSS, LAYOUT}), _two_splits, f"{_CONFIG}:1929,1946",
        "keep one way to split the layers",
    ),
    Rule(
        "PAR-16", frozenset({PP, VPP, LAYOUT, MTP}), _layout,
        f"{_CONFIG}:1974; core/transformer/pipeline_parallel_layer_layout.py", "correct the layout",
    ),
    Rule(
        "PAR-24", WORLD | {MBS, VPP, LAYOUT, GROUP_SIZE, "num_microbatches"}, _interleaved_microbatches,
        "core/pipeline_parallel/schedules.py:1133", "lower the micro-batch, or make their number a multiple of PP",
        level="first step",
    ),
    Rule(
        "PAR-26", frozenset({CHUNK_LAYERS, CHUNKS, LAYOUT, FLAG_FIRST, FLAG_LAST, FIRST, LAST}), _two_virtual_flags,
        "MLM arguments.py:894,921", f"keep one; with uneven ends it is {CHUNKS}", launchers=MLM,
    ),
    Rule(
        "PAR-27", frozenset({PP, VPP, LAYOUT, P2P}), _silent_swap,
        "MLM arguments.py:972; Megatron-LM#750; seen on gloo with 2 chunks", "set overlap_p2p_comm to true",
    ),
    Rule(
        "PAR-30", frozenset({PP, VPP, LAYOUT, P2P, BATCHED, FLUSH}), _flush, "core/model_parallel_config.py:572",
        "set overlap_p2p_comm, and batch_p2p_comm off",
    ),
    Rule(
        "PAR-30b", frozenset({PP, VPP, LAYOUT, P2P, BATCHED}), _p2p, "core/pipeline_parallel/schedules.py:1060,2155",
        "overlap needs VPP above 1, and batch_p2p_comm off", level="first step",
    ),
    Rule(
        "TRAP-25", frozenset({PP, VPP, LAYOUT, P2P, "align_param_gather"}), _forced_off, "MLM arguments.py:976",
        "leave it out or set virtual stages", launchers=MLM,
    ),
)  # fmt: skip
