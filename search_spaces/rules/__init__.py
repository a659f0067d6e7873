"""Every rule, by area. To add one: write a pure function in its area's file, put a `Rule` in that file's table.

Ids are those of the rule catalogue where it has one (PAR, DSP, OVL, RCP, PRC, CGR, OFF, CAP, STA, FUS, FSD, BRG, HW,
TRAP); own ids are CPU (the device lacks it), SHP (a size does not split), OPT (the optimizer), STK (a package is
missing), UNK (an unknown word), RUN (seen to fail at run time, or not done by this worker) and DUP (the same effect as
another candidate).
"""

from functools import cache

from search_spaces.rules import (
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
from search_spaces.rules.rule import Case, Launcher, Rule, Verdict, case_of, compute_capability

# Hardware first: "needs a GPU" says more than a clash between two knobs that both need one.
STACK_RULES: tuple[Rule, ...] = (
    *hardware.RULES,
    *parallelism.RULES,
    *model_fields.RULES,
    *dispatcher.RULES,
    *overlap.RULES,
    *recompute.RULES,
    *precision.RULES,
    *graphs.RULES,
    *offload.RULES,
    *capacity.RULES,
    *fusions.RULES,
    *fsdp.RULES,
    *bridge.RULES,
    *releases.RULES,  # last: a rule that knows the field says more
)
ALL_RULES: tuple[Rule, ...] = (*STACK_RULES, *worker.RULES)


@cache
def rules_for(launchers: frozenset[Launcher], megatron_core: str | None, worker: bool = True) -> tuple[Rule, ...]:
    """The rules a search obeys on a target: its launchers and its release of megatron-core (None: the newest known).

    What is only a risk at run time may be tried, except where it would be another candidate's double. `worker`: with
    the rules of this project's own worker.
    """
    rules = ALL_RULES if worker else STACK_RULES
    held = (rule for rule in rules if rule.concerns(launchers, megatron_core))
    return tuple(rule for rule in held if rule.level != "runtime risk" or rule.id.startswith("DUP"))


__all__ = [
    "ALL_RULES", "STACK_RULES", "Case", "Launcher", "Rule", "Verdict", "case_of", "compute_capability", "rules_for",
]  # fmt: skip
