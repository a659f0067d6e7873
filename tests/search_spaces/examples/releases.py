"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case
from tests.search_spaces.cases import case
from tests.search_spaces.examples.clusters import H8

STASH = "moe_paged_stash"
EXAMPLES: dict[str, tuple[Case, Case]] = {
    "UNK-03": (
        case(H8, **{STASH: True}, stack={"megatron_core": "0.17.0"}),
        case(H8, **{STASH: False}, stack={"megatron_core": "0.17.0"}),
    ),
}
