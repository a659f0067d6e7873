"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import H8, MLA

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "RUN-02": (case(H8, graphs="transformer_engine"), case(H8, graphs="none")),
    "RUN-05": (
        case(H8, pp=2, pipeline_model_parallel_layout="Et|t|t|tL"),
        case(H8, pp=2, pipeline_model_parallel_layout="Et|t|t|tL", vpp=2),
    ),
    "RUN-04": (
        case(H8, model=MLA, apply_rope_fusion=True),
        case(H8, model=MLA, apply_rope_fusion=False),
    ),
}
