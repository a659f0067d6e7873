"""What the memory plan wants to know of a model, a layout and its pipeline stages: plain integers, hashable and fast.

A fact that is missing or makes no sense is an error that names its field (`FactError`), never a default.
"""

from collections.abc import Mapping
from typing import NamedTuple

from search_spaces.candidate import KnobValue, layout_of
from search_spaces.partial import UnknownFact
from search_spaces.rules.pipeline import layout_stages
from search_spaces.shapes import ModelShape

VOCABULARY_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by; without its factor TP: see padded_vocabulary
LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


class FactError(ValueError):
    """A fact or knob without which, or with which, no plan can be made. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Decoder(NamedTuple):
    """Facts of a model, as counts of elements. `experts` 0: a dense model. `shared` 0: no shared expert."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    dense_width: int
    vocabulary: int
    experts: int
    topk: int
    expert_width: int
    dense_first: int
    shared: int
    shared_gate: bool
    expert_bias: bool
    qk_norm: bool
    qkv_bias: bool
    tied: bool
    latent: bool
    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    @property
    def query_size(self) -> int:
        """Elements of one query or key head."""
        return self.nope_size + self.rope_size if self.latent else self.head_size

    @property
    def out_size(self) -> int:
        """Elements of one head of the attention's output."""
        return self.value_size if self.latent else self.head_size


class Grid(NamedTuple):
    """How ranks are split; `world` in ranks. `local`: Megatron's local layers (CPU), which shard MLA's down projections
    where Transformer Engine's are whole on every rank."""

    tensor: int
    context: int
    pipeline: int
    virtual: int
    expert: int
    expert_tensor: int
    sequence: bool
    world: int
    local: bool

    @property
    def data(self) -> int:
        """Ranks that hold the same dense weights: DP x CP, over which the distributed optimizer splits them."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts: world / (ETP x EP x PP)."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)


ALWAYS = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")


def missing_facts(model: ModelShape) -> tuple[str, ...]:
    """Facts that a plan of this model needs and that are not given (only a partial model lacks any)."""

    def lacks(name: str) -> bool:
        try:
            return getattr(model, name) is None
        except UnknownFact:
            return True

    dense = bool(getattr(model, "dense", False))
    wanted = ALWAYS + (LATENT if model.multi_latent_attention else ("kv_channels",))
    wanted += () if dense else ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
    wanted += ("ffn_hidden_size",) if dense or model.first_dense_layers else ()
    return tuple(name for name in wanted if lacks(name))


def decoder_of(model: ModelShape, knobs: Mapping[str, KnobValue]) -> Decoder:
    """Raises FactError for the first fact that is missing or makes no sense."""
    try:
        found = _decoder(model, knobs)
    except UnknownFact as missing:
        name = str(missing.args[0])
        raise FactError(name, f"model.{name} is missing, and the plan needs it") from missing
    _check(found)
    return found


def _decoder(model: ModelShape, knobs: Mapping[str, KnobValue]) -> Decoder:
    dense = bool(getattr(model, "dense", False))
    latent = model.multi_latent_attention
    sizes = {name: getattr(model, name) for name in LATENT} if latent else dict.fromkeys(LATENT, 0)
    for name, value in sizes.items():
        if value is None:
            raise UnknownFact(name)
    return Decoder(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        groups=model.num_query_groups,
        head_size=0 if latent else model.kv_channels,
        dense_width=model.ffn_hidden_size if dense or model.first_dense_layers else 0,
        vocabulary=model.vocab_size,
        experts=0 if dense else model.num_moe_experts,
        topk=0 if dense else model.moe_router_topk,
        expert_width=0 if dense else model.moe_ffn_hidden_size,
        dense_first=model.num_layers if dense else model.first_dense_layers,
        shared=0 if dense else model.moe_shared_expert_intermediate_size or 0,
        shared_gate=bool(knobs.get("moe_shared_expert_gate")),
        expert_bias=model.moe_router_enable_expert_bias,
        qk_norm=model.qk_layernorm,
        qkv_bias=model.add_qkv_bias,
        tied=not model.untie_embeddings_and_output_weights,
        latent=latent,
        q_rank=(model.q_lora_rank or 0) if latent else 0,
        kv_rank=sizes["kv_lora_rank"],
        nope_size=sizes["qk_head_dim"],
        rope_size=sizes["qk_pos_emb_head_dim"],
        value_size=sizes["v_head_dim"],
    )


_NAMES = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "groups": "num_query_groups",
    "vocabulary": "vocab_size", "experts": "num_moe_experts", "topk": "moe_router_topk",
    "expert_width": "moe_ffn_hidden_size", "head_size": "kv_channels", "dense_width": "ffn_hidden_size",
    "kv_rank": "kv_lora_rank", "nope_size": "qk_head_dim", "rope_size": "qk_pos_emb_head_dim",
    "value_size": "v_head_dim",
}  # fmt: skip


def _check(found: Decoder) -> None:
    """A partial model is validated fact by fact only; here they must also agree with one another."""
    wanted = {"layers", "hidden", "heads", "groups", "vocabulary"}
    wanted |= {"kv_rank", "nope_size", "rope_size", "value_size"} if found.latent else {"head_size"}
    wanted |= {"experts", "topk", "expert_width"} if found.dense_first < found.layers else set()
    wanted |= {"dense_width"} if found.dense_first else set()
    for field, name in _NAMES.items():
        if field in wanted and getattr(found, field) < 1:
            raise FactError(name, f"model.{name} {getattr(found, field)} must be at least 1")
    if found.heads % found.groups:
        raise FactError("num_attention_heads", f"model.num_attention_heads {found.heads} is not divisible by "
                        f"num_query_groups {found.groups}")  # fmt: skip
    if found.topk > found.experts:
        raise FactError("moe_router_topk", f"model.moe_router_topk {found.topk} exceeds num_moe_experts "
                        f"{found.experts}")  # fmt: skip
    if found.dense_first >= found.layers and found.experts:
        raise FactError("first_dense_layers", "model.first_dense_layers leaves no MoE layer")


def grid_of(knobs: Mapping[str, KnobValue], world: int, local: bool = False) -> Grid:
    """The layout in ranks. Raises FactError where it does not divide `world`."""
    layout = layout_of(knobs)
    stages = layout.pipeline
    virtual = layout.virtual_pipeline or 1
    text = str(knobs.get("pipeline_model_parallel_layout") or "")
    if text and layout.virtual_pipeline is None:
        virtual = max(1, len(spelt(text)) // stages)
    grid = Grid(
        layout.tensor, layout.context, stages, virtual if stages > 1 else 1, layout.expert,
        layout.expert_tensor, layout.sequence_parallel and layout.tensor > 1, world, local,
    )  # fmt: skip
    for field, size in zip(Grid._fields[:6], grid[:6], strict=True):
        if size < 1:
            raise FactError(f"{field}_model_parallel_size", f"{field} parallel size {size} must be at least 1")
    ranks = grid.tensor * grid.context * stages
    if world % ranks:
        raise FactError("world_size", f"world_size {world} is not divisible by TP x CP x PP = {ranks}")
    experts = grid.expert_tensor * grid.expert * stages
    if world % experts:
        raise FactError("world_size", f"world_size {world} is not divisible by ETP x EP x PP = {experts}")
    return grid


def check_split(decoder: Decoder, grid: Grid) -> None:
    """Raises FactError where a size of the model does not divide as the layout wants."""
    split = [
        ("num_attention_heads", decoder.heads, "TP", grid.tensor),
        ("num_moe_experts", decoder.experts, "EP", grid.expert),
        ("moe_ffn_hidden_size", decoder.expert_width, "ETP", grid.expert_tensor),
        ("moe_shared_expert_intermediate_size", decoder.shared, "TP", grid.tensor),
        ("ffn_hidden_size", decoder.dense_width, "TP", grid.tensor),
    ]
    for name, size, word, ranks in split:
        if size % ranks:
            raise FactError(name, f"model.{name} {size} is not divisible by {word} {ranks}")
    few, many = sorted((decoder.groups, grid.tensor))
    if not decoder.latent and many % few:
        raise FactError("num_query_groups", f"model.num_query_groups {decoder.groups} and TP {grid.tensor} do not "
                        "divide")  # fmt: skip


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding: a multiple of 128 and of TP.

    Megatron-LM pads to 128 * TP; padding rows take part in the softmax, so layouts would differ in loss. A multiple of
    128 is divisible by each TP of 2 to 128, so these layouts share one model.
    """
    padded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    while padded % tensor_parallel:
        padded += VOCABULARY_MULTIPLE
    return padded


def spelt(text: str) -> tuple[tuple[str, ...], ...]:
    """The stages of a pipeline layout. Raises FactError where it cannot be read."""
    try:
        return layout_stages(text)
    except ValueError as error:
        raise FactError("pipeline_model_parallel_layout", f"the pipeline layout cannot be read: {error}") from error
