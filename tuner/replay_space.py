"""The search space of a recorded table: its knobs with the values it holds, and as legal points its rows, no others."""

from dataclasses import replace

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.errors import Fault, InputError
from search_spaces.full_space import MOE_FULL
from search_spaces.legal import LegalSpace
from search_spaces.rules import Case, Rule
from search_spaces.space import Knob, SearchSpace
from train_worker.recorded_table import RecordedTable

RULE = "TABLE"
# Megatron-Core's names and conditions in the order in which they are decided.
KNOWN = {knob.name: knob for knob in MOE_FULL.knobs}


def table_space(table: RecordedTable) -> LegalSpace:
    """Knobs exist under the conditions of `moe-full`; defaults are the baseline's values.

    Raises InputError for a knob that no space knows, and for a row that is no point of the space (it lacks a knob that
    exists there, or has one that does not).
    """
    held = _values(table)
    if unknown := sorted(set(held) - set(KNOWN)):
        raise InputError([Fault(f"unknown knobs: {', '.join(unknown)}", table.where)], "use Megatron-Core's names")
    base = table.baseline
    try:
        space = SearchSpace("table", tuple(_knob(knob, held, base) for knob in KNOWN.values() if knob.name in held))
    except ValueError as error:  # true beside 1
        raise InputError([Fault(str(error), table.where)], "write a value in one way in all rows") from error
    faults = [
        Fault(f"row {table.by_id[each.id][0].order}: its knobs are not those of a point with these values", table.where)
        for each in table.candidates
        if space.candidate(space.values(each)).id != each.id
    ]
    if faults:
        raise InputError(faults, "record every knob that exists, and no other")
    facts = Case({}, table.shape, table.cluster, table.training)
    return LegalSpace(space, (_only_rows(space, table),), facts)


def _values(table: RecordedTable) -> dict[str, list[KnobValue]]:
    """By knob: the values that rows hold, in the order of the file; of a variable also None, where a row lacks it."""
    held: dict[str, list[KnobValue]] = {}
    for candidate in table.candidates:
        for name, value in (*candidate.knobs.items(), *candidate.env.items()):
            if not any(_same(value, known) for known in held.setdefault(name, [])):
                held[name].append(value)
    for name, values in held.items():
        if name.isupper() and any(name not in candidate.env for candidate in table.candidates):
            values.append(None)
    return held


def _same(value: KnobValue, other: KnobValue) -> bool:
    """True is not 1."""
    return type(value) is type(other) and value == other


def _knob(knob: Knob, held: dict[str, list[KnobValue]], base: Candidate) -> Knob:
    """A knob as the table has it; a condition on a knob that no row names was never in question."""
    own = base.env if knob.is_env else base.knobs
    choices = held[knob.name]
    default = own.get(knob.name, None if None in choices else choices[0])
    when = tuple(condition for condition in knob.when if condition.knob in held)
    return replace(knob, choices=tuple(choices), default=default, when=when)


def _only_rows(space: SearchSpace, table: RecordedTable) -> Rule:
    """Refuses what the table does not hold. A knob that is absent and one that is null are the same to it."""
    varying = tuple(knob for knob in space.knobs if len(knob.choices) > 1)
    recorded = {tuple(space.values(each).get(knob.name) for knob in varying) for each in table.candidates}

    def check(case: Case) -> str | None:
        values = tuple((case.env if knob.is_env else case.knobs).get(knob.name) for knob in varying)
        return None if values in recorded else "the table does not hold it"

    reads = frozenset(knob.name for knob in varying)
    return Rule(RULE, reads, check, table.where, "try what was recorded")
