"""A conditional space: every point once, counted without listing, and words that do not exist refused."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import KnobValue
from search_spaces.errors import InputError
from search_spaces.named_spaces import LAPTOP, MOE_CORE, NAMED_SPACES
from search_spaces.space import Condition, Knob, SearchSpace


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Up to six knobs with conditions on earlier ones, one of them perhaps an environment variable."""
    knobs: list[Knob] = []
    for number in range(draw(st.integers(1, 6))):
        name = f"K{number}" if draw(st.integers(0, 5)) == 0 else f"k{number}"
        words = [None, "a", "b", "1"] if name.isupper() else [None, 1, 2, "a", "b"]
        choices = draw(st.lists(st.sampled_from(words), min_size=1, max_size=3, unique=True))
        conditions = []
        for earlier in knobs:
            if draw(st.integers(0, 3)) == 0:
                values = draw(st.lists(st.sampled_from(earlier.choices), min_size=1, unique=True))
                conditions.append(Condition(earlier.name, tuple(values), draw(st.booleans())))
        knobs.append(Knob(name, tuple(choices), draw(st.sampled_from(choices)), tuple(conditions)))
    return SearchSpace("drawn", tuple(knobs))


def brute_force(space: SearchSpace) -> Iterator[dict[str, KnobValue]]:
    """Every point, the slow way: all combinations, inactive knobs dropped, repetitions removed."""
    seen = set()
    for values in product(*(knob.choices for knob in space.knobs)):
        point: dict[str, KnobValue] = {}
        for knob, value in zip(space.knobs, values, strict=True):
            if all(c.knob in point and (point[c.knob] in c.values) != c.negated for c in knob.when):
                point[knob.name] = value
        if (key := tuple(point.items())) not in seen:
            seen.add(key)
            yield point


def listed(space: SearchSpace) -> Iterator[dict[str, KnobValue]]:
    """The same points, faster: only what is active branches."""

    def below(depth: int, point: dict[str, KnobValue]) -> Iterator[dict[str, KnobValue]]:
        if depth == len(space.knobs):
            yield point
            return
        knob = space.knobs[depth]
        if not all(c.knob in point and (point[c.knob] in c.values) != c.negated for c in knob.when):
            yield from below(depth + 1, point)
            return
        for value in knob.choices:
            yield from below(depth + 1, {**point, knob.name: value})

    return below(0, {})


@settings(max_examples=100, deadline=None)
@given(spaces())
def test_the_fast_listing_is_the_slow_one(space: SearchSpace) -> None:
    assert list(listed(space)) == list(brute_force(space))


@settings(max_examples=100, deadline=None)
@given(spaces())
def test_size_is_the_number_of_points(space: SearchSpace) -> None:
    assert space.size() == sum(1 for _ in brute_force(space))


@settings(max_examples=100, deadline=None)
@given(spaces())
def test_canonical_points_are_distinct_and_stable(space: SearchSpace) -> None:
    points = list(brute_force(space))
    candidates = [space.canonical(point) for point in points]
    assert [space.values(candidate) for candidate in candidates] == points
    assert len({candidate.id for candidate in candidates}) == len(points)
    assert space.default().id in {candidate.id for candidate in candidates}


def test_the_size_of_the_laptop_space_is_known() -> None:
    """By hand: 5 dispatchers x 8 recomputes x 4 micro-batches x 20 layouts x 2 EP x 4 DP x 5 FP8 x 7 graphs x 3."""
    assert LAPTOP.size() == 5 * 8 * 4 * 20 * 2 * 4 * 5 * 7 * 3 == 2_688_000


def test_inactive_knobs_are_dropped_and_absent_ones_filled() -> None:
    candidate = LAPTOP.canonical({"fp8_recipe": "mxfp8", "sequence_parallel": True, "pipeline_model_parallel_size": 2})
    assert "fp8_recipe" not in candidate.knobs
    assert "sequence_parallel" not in candidate.knobs
    assert candidate.knobs["virtual_pipeline_model_parallel_size"] is None
    assert "overlap_p2p_comm" not in candidate.knobs
    same = LAPTOP.canonical({"pipeline_model_parallel_size": 2})
    assert candidate.id == same.id


def test_the_default_is_megatrons_own() -> None:
    default = LAPTOP.default()
    assert default.knobs["moe_token_dispatcher_type"] == "allgather"
    assert default.knobs["recompute_granularity"] is None
    assert default.layout.data(2) == 2
    assert list(default.knobs) == [knob.name for knob in LAPTOP.knobs if knob.name in default.knobs]


def test_environment_knobs_go_to_the_environment() -> None:
    switched = MOE_CORE.canonical({"NVTE_USE_CUTLASS_GROUPED_GEMM": "1", "moe_grouped_gemm": True})
    assert switched.env == {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    assert "NVTE_USE_CUTLASS_GROUPED_GEMM" not in switched.knobs
    assert MOE_CORE.default().env == {}
    assert MOE_CORE.canonical(MOE_CORE.values(switched)).id == switched.id
    assert MOE_CORE.canonical({"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}).env == {}, "without the grouped GEMM it is inert"


def test_unknown_words_are_all_refused_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        LAPTOP.canonical({"micro_batch_sise": 2, "recompute_granularity": "selectiv", "micro_batch_size": True})
    hints = [fault.hint for fault in caught.value.faults]
    assert hints[:2] == ["did you mean micro_batch_size?", "did you mean selective?"]
    assert len(hints) == 3, "True is not 1"


def test_restrict_narrows_and_moves_the_default_only_where_it_must() -> None:
    narrow = LAPTOP.restrict({"micro_batch_size": [4, 1], "expert_model_parallel_size": [2]})
    assert narrow.by_name["micro_batch_size"].choices == (4, 1)
    assert narrow.default().knobs["micro_batch_size"] == 1
    assert narrow.default().knobs["expert_model_parallel_size"] == 2
    assert narrow.size() == LAPTOP.size() // 4
    assert narrow.digest != LAPTOP.digest
    assert LAPTOP.restrict({}).digest == LAPTOP.digest


def test_sizes_may_be_widened_and_words_may_not() -> None:
    assert LAPTOP.restrict({"micro_batch_size": [16]}).default().knobs["micro_batch_size"] == 16
    for wrong in ({"micro_batch_size": [0]}, {"micro_batch_size": []}, {"fp8": ["e4m3"]}, {"micro_batch": [1]}):
        with pytest.raises(InputError):
            LAPTOP.restrict(wrong)


def test_a_space_with_a_late_condition_or_a_foreign_default_cannot_be_built() -> None:
    late, one = Knob("a", (1,), 1, (Condition("b", (1,)),)), Knob("a", (1,), 1)
    for knobs in ((late, Knob("b", (1,), 1)), (Knob("a", (1,), 2),), (one, one), (Knob("ENV", (1,), 1),)):
        with pytest.raises(ValueError, match=r"^wrong: "):
            SearchSpace("wrong", knobs)


def test_names_and_documentation() -> None:
    assert set(NAMED_SPACES) == {"laptop", "moe-core", "moe-full"}
    for space in NAMED_SPACES.values():
        assert all(knob.doc for knob in space.knobs)
