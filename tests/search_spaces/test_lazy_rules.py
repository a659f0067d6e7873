"""Rules asked early say what they say of whole points: read in any order, of any values, with facts missing."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.legal import LegalSpace
from search_spaces.named_spaces import MOE_FULL
from search_spaces.partial import PartialModel, UnknownFact
from search_spaces.rules import STACK_RULES, Case, Rule
from search_spaces.space import Condition, Knob, SearchSpace
from search_spaces.walk_order import walk_order
from tests.search_spaces.cases import LAPTOP_RANKS, TINY, TRAINING
from tests.search_spaces.drawn import KNOBS, cases
from tests.search_spaces.test_space import brute_force

FACTS = Case({}, TINY, LAPTOP_RANKS, TRAINING)
WORDS: tuple[tuple[KnobValue, ...], ...] = (
    (None, False, True),
    (None, 0, 1, 2),
    (1, 2, "1"),
    (None, "", "a"),
    (0.5, 1.0),
)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Up to six knobs, with values that Python takes for one another (None and False, 1 and "1") across knobs."""
    knobs: list[Knob] = []
    for number in range(draw(st.integers(1, 6))):
        is_env = draw(st.integers(0, 4)) == 0
        words = (None, "0", "1") if is_env else draw(st.sampled_from(WORDS))
        choices = tuple(draw(st.lists(st.sampled_from(words), min_size=1, max_size=3, unique=True)))
        when = []
        for earlier in knobs:
            if draw(st.integers(0, 2)) == 0:
                values = draw(st.lists(st.sampled_from(earlier.choices), min_size=1, unique=True))
                when.append(Condition(earlier.name, tuple(values), draw(st.booleans())))
        knobs.append(Knob(f"K{number}" if is_env else f"k{number}", choices, choices[0], tuple(when)))
    return SearchSpace("drawn", tuple(knobs))


def _read(case: Case, knob: Knob, how: int) -> object:
    """A knob's value by one of the ways in which rules read."""
    found = case.env if knob.is_env else case.knobs
    if how == 0:
        return found[knob.name] if knob.name in found else None  # noqa: SIM401  one of the ways
    if how == 1:
        return dict(found.items()).get(knob.name)
    return found.get(knob.name)


@st.composite
def rules_of(draw: st.DrawFn, space: SearchSpace) -> tuple[Rule, ...]:
    """Rules that read in any order and stop early, some of which miss a fact on the way."""
    made = []
    for number in range(draw(st.integers(0, 4))):
        steps = draw(st.lists(st.tuples(st.sampled_from(space.knobs), st.integers(0, 2)), min_size=1, max_size=3))
        last = steps[-1][0]
        if last.when and draw(st.booleans()):  # what decides whether a knob exists, and the knob
            steps.append((space.by_name[last.when[0].knob], draw(st.integers(0, 2))))
        wanted = [draw(st.sampled_from((*knob.choices, *((None,) if knob.when else ())))) for knob, _ in steps]
        fact_missing_at = draw(st.sampled_from((None, None, 0, 1)))

        def check(
            case: Case,
            steps: list[tuple[Knob, int]] = steps,
            wanted: list[KnobValue] = wanted,
            missing: int | None = fact_missing_at,
        ) -> str | None:
            seen = []
            for at, ((knob, how), value) in enumerate(zip(steps, wanted, strict=True)):
                if at == missing:
                    raise UnknownFact("hidden_size")
                seen.append(found := _read(case, knob, how))
                if type(found) is not type(value) or found != value:
                    return None
            return f"refused at {seen}"

        made.append(Rule(f"R-{number}", frozenset(knob.name for knob, _ in steps), check, "drawn", "change it"))
    return tuple(made)


def case_at(space: SearchSpace, point: dict[str, KnobValue]) -> Case:
    candidate = space.candidate(point)
    return replace(FACTS, knobs=candidate.knobs, env=candidate.env)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from((0, 4, 1024)))
def test_early_answers_are_those_of_whole_points(data: st.DataObject, table_limit: int) -> None:
    """With tables of all that is to come, of the last two knobs, and without any."""
    space = data.draw(spaces())
    rules = data.draw(rules_of(space))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search_spaces.lazy_rules.TABLE_LIMIT", table_limit)
        legal = LegalSpace(space, rules, FACTS)
    accepted, broken = set(), Counter[str]()
    for point in brute_force(space):
        case = case_at(space, point)
        found = [rule.id for rule in rules if rule.refusal(case)]
        broken.update(found)
        if not found:
            accepted.add(space.candidate(point).id)
    assert {candidate.id for candidate in legal} == accepted
    assert legal.count + sum(refusal.count for refusal in legal.refusals) == legal.total == space.size()
    for refusal in legal.refusals:
        rule = next(rule for rule in rules if rule.id == refusal.rule)
        assert 0 < refusal.count <= broken[rule.id]
        assert rule.refusal(case_at(space, space.values(refusal.example))) == refusal.reason, "words of the example"


def test_equal_choices_of_two_types_are_no_knob() -> None:
    with pytest.raises(ValueError, match="are equal"):
        SearchSpace("wrong", (Knob("k", (1, True), 1),))


@settings(max_examples=300, deadline=None)
@given(cases(), st.booleans())
def test_a_rule_reads_no_knob_of_the_full_space_but_those_it_names(drawn: Case, partial: bool) -> None:
    if partial:
        facts = {name: getattr(TINY, name) for name in ("name", "num_layers", "hidden_size", "num_attention_heads")}
        drawn = replace(drawn, model=PartialModel.of({**facts, "dense": False}))
    for rule in STACK_RULES:
        knobs = {name: value for name, value in drawn.knobs.items() if name in rule.reads or name not in KNOBS}
        env = {name: value for name, value in drawn.env.items() if name in rule.reads}
        assert rule.refusal(drawn) == rule.refusal(replace(drawn, knobs=knobs, env=env)), rule.id


def test_the_order_has_every_knob_once_and_after_what_its_conditions_read() -> None:
    order = walk_order(MOE_FULL, STACK_RULES)
    place = {knob.name: at for at, knob in enumerate(order)}
    assert sorted(place) == sorted(knob.name for knob in MOE_FULL.knobs)
    assert all(place[condition.knob] < place[knob.name] for knob in order for condition in knob.when)
