"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from dataclasses import replace

from search_spaces.partial import PartialModel
from search_spaces.rules import Case
from tests.search_spaces.cases import TINY, case
from tests.search_spaces.examples.clusters import H8
from tests.search_spaces.examples.parallelism import MLA, dense
from tests.search_spaces.oracle import REFUSALS, Oracle, target


def widths(**facts: int) -> Case:
    """A model without experts, of which more is said."""
    known = dense()
    return replace(known, model=PartialModel.of({**vars(known.model), **facts}))


def dense_refusal(case: Case) -> str | None:
    """The real configuration's answer; of the model only what it has is told."""
    with target(case):
        from megatron.core.transformer.transformer_config import TransformerConfig

        sizes = {name: getattr(TINY, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        try:
            TransformerConfig(**sizes, moe_ffn_hidden_size=vars(case.model).get("moe_ffn_hidden_size"))
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


EXAMPLES: dict[str, tuple[Case, Case]] = {
    "SHP-05": (widths(moe_ffn_hidden_size=64), widths()),
    "SHP-06": (case(no_rope_freq=3), case(no_rope_freq=2)),
    "SHP-07": (case(model=MLA, attention_output_gate=True), case(attention_output_gate=True)),
    "SHP-08": (
        case(H8, cuda_graph_impl="none", inference_cuda_graph_scope="block"),
        case(H8, cuda_graph_impl="none", inference_cuda_graph_scope="none"),
    ),
    "SHP-09": (widths(num_query_groups=3), widths(num_query_groups=2)),
}
ORACLE: dict[str, Oracle] = {"SHP-05": dense_refusal}
