"""Each rule with a case that breaks it and one that just satisfies it, by area as in `search_spaces/rules`."""

from search_spaces.rules import Case
from tests.search_spaces.examples import (
    bridge,
    capacity,
    dispatcher,
    fsdp,
    fusions,
    graphs,
    hardware,
    model_fields,
    offload,
    overlap,
    parallelism,
    precision,
    recompute,
    releases,
    worker,
)
from tests.search_spaces.oracle import Oracle

AREAS = (
    parallelism, dispatcher, overlap, recompute, precision, graphs, offload, capacity, fusions, fsdp, bridge, hardware,
    releases, model_fields, worker,
)  # fmt: skip
EXAMPLES: dict[str, tuple[Case, Case]] = {}
ORACLE: dict[str, Oracle] = {}  # of the rules that another real object judges than the configuration
for _area in AREAS:
    assert not EXAMPLES.keys() & _area.EXAMPLES.keys(), "an id is used in two areas"
    EXAMPLES |= _area.EXAMPLES
    ORACLE |= getattr(_area, "ORACLE", {})
