"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.common import ADA, AMPERE, BLACKWELL, H8

EXAMPLES: dict[str, tuple[Case, Case]] = {
    "UNK-01": (case(H8, fp8="hybrid", fp8_recipe="mxfp4"), case(H8, fp8="hybrid", fp8_recipe="mxfp8")),
    "PRC-07": (case(BLACKWELL, fp8="hybrid", fp4="e2m1"), case(BLACKWELL, fp4="e2m1")),
    "PRC-09": (
        case(H8, fp8="hybrid", moe_grouped_gemm=True, stack={"transformer_engine": "1.10.0"}),
        case(H8, fp8="hybrid", moe_grouped_gemm=True, stack={"transformer_engine": "1.11.0"}),
    ),
    "PRC-12": (
        case(BLACKWELL, fp8="hybrid", fp8_recipe="mxfp8", training={"sequence_length": 48}),
        case(BLACKWELL, fp8="hybrid", fp8_recipe="tensorwise", training={"sequence_length": 48}),
    ),
    "HW-01": (case(AMPERE, fp8="hybrid"), case(ADA, fp8="hybrid")),
    "HW-02": (case(ADA, fp8="hybrid", fp8_recipe="blockwise"), case(H8, fp8="hybrid", fp8_recipe="blockwise")),
    "HW-03": (case(H8, fp8="hybrid", fp8_recipe="mxfp8"), case(BLACKWELL, fp8="hybrid", fp8_recipe="mxfp8")),
    "HW-04": (case(H8, fp4="e2m1"), case(BLACKWELL, fp4="e2m1")),
    "DUP-09": (case(H8, fp8_recipe="delayed"), case(H8, fp8_recipe="delayed", fp8="hybrid")),
}
