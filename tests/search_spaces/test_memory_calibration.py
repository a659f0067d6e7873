"""Reserved memory: the stored factors against the measured table, the split, and the fit itself."""

from pathlib import Path

import pytest

from benchmarks.fit_memory import COMMON, exchanging, fitted
from search_spaces.errors import InputError
from search_spaces.memory.calibration import Calibration, errors, fit, held_out, predicted, stored
from search_spaces.memory.reserved import rests
from search_spaces.memory.rows import expandable, load_samples
from tests.search_spaces.memory_rows import TABLE

SAMPLES = load_samples(TABLE)


def test_the_stored_factors_are_those_of_the_table() -> None:
    """After new rows: python benchmarks/fit_memory.py."""
    assert stored() == fitted()


def test_the_error_on_rows_that_were_not_fitted_is_small() -> None:
    found = stored()
    assert found.held_out.rows >= 20
    assert found.held_out.mean < 0.03
    assert found.held_out.worst < 0.08
    assert found.other_shapes.rows >= 10
    assert found.other_shapes.worst < 0.05
    assert found.other_runs.rows >= 10
    assert found.other_runs.mean < 0.03
    assert found.other_runs.worst < 0.08


def test_plans_with_graphs_have_a_margin_of_their_own() -> None:
    found = stored()
    assert 0.01 <= found.eager.low < found.graphs.low < 0.08
    graphs = [sample for sample in SAMPLES if sample.stage.active.captured]
    assert graphs
    assert all(found.margin(sample.stage) == found.graphs for sample in graphs)


def test_plans_with_expert_parallelism_have_a_margin_of_their_own() -> None:
    found, rows = stored(), exchanging()
    assert len(rows) >= 60
    assert found.exchanging is not None
    assert found.exchanged is not None
    assert found.exchanging.mean < 0.05
    for sample in rows:
        margin = found.margin(sample.stage)
        assert margin == found.exchanged
        low, high = 1 - margin.high - 1e-4, 1 + margin.low + 1e-4
        assert low < sample.reserved_bytes / found.reserved(sample.stage) < high, sample.id
        assert sample.device_used_bytes is not None
        assert low < sample.device_used_bytes / found.device(sample.stage) < high, sample.id
    assert found.margin(SAMPLES[0].stage) in (found.eager, found.graphs)


def test_a_calibration_from_before_has_no_margin_for_expert_parallelism() -> None:
    old = stored().model_dump(exclude={"exchanged", "exchanging"})
    read = Calibration.model_validate(old)
    assert read.margin(exchanging()[0].stage) in (read.eager, read.graphs)


def test_what_is_exchanged_takes_room_outside_of_the_allocator() -> None:
    """Communicators, by dispatcher: the rest of what the device has in use, context and libraries."""
    left: dict[str, list[float]] = {}
    for sample in exchanging():
        assert sample.device_used_bytes is not None
        rest = sample.device_used_bytes - sample.reserved_bytes - sample.stage.communication
        left.setdefault(sample.shape, []).append(rest / 2**30)
    for shape, found in left.items():
        assert max(found) - min(found) < 0.2, (shape, found)
        assert 2.2 < min(found) < 3.2, (shape, found)


def test_the_split_depends_on_the_row_alone() -> None:
    kept = [sample for sample in SAMPLES if held_out(sample.id)]
    assert 0.2 < len(kept) / len(SAMPLES) < 0.45
    assert [held_out(sample.id) for sample in reversed(SAMPLES)] == [held_out(s.id) for s in SAMPLES][::-1]


def test_the_fit_finds_factors_that_made_the_rows() -> None:
    made = {"constant": 0.5, "activations": 0.05, "recomputed": 0.5, "segments": 1.0, "carved": 1.0, "narrowed": 0.25,
            "graphs": 1.0}  # fmt: skip
    rows = [sample._replace(reserved_bytes=round(predicted(made, sample))) for sample in SAMPLES]
    found = fit(rows, "made", "made", COMMON)
    assert found.factors == pytest.approx(made, abs=0.1)
    assert found.held_out.worst < 0.003
    assert found.eager.low == found.graphs.low == 0.01  # the least


def test_factors_are_never_negative_and_no_rows_give_none() -> None:
    low = [sample._replace(reserved_bytes=sample.stage.total // 2) for sample in SAMPLES]
    assert set(fit(low, "low", "made", COMMON).factors.values()) == {0.0}
    assert errors({}, []).rows == 0


def test_a_calibration_can_be_stored_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(stored().model_dump_json())
    assert stored(path) == stored()
    assert isinstance(stored(path), Calibration)


def test_device_use_is_predicted_too() -> None:
    off = [
        stored().device(sample.stage) / sample.device_used_bytes - 1
        for sample in SAMPLES
        if held_out(sample.id) and sample.device_used_bytes
    ]
    assert max(map(abs, off)) < 0.05


@pytest.mark.parametrize(
    ("cut", "filling", "emptied", "rest"),
    [
        (0, 0, False, 0),  # both tensors get their block back
        (100, 0, False, 0),  # all is the optimizer's
        (6, 0, False, 2),  # 4 and 2 of 8: the logits fit in the 6 that are left
        (6, 3, False, 3),  # of which activations break 3: no logits fit
        (2, 0, False, 2 + 4),  # the logits break the softmax's block, which comes anew
        (2, 0, True, 2),  # whole blocks were given back at the capture
        (2, 2, True, 0),  # and activations fill the rest
    ],
)
def test_rests_of_blocks_of_the_logits(cut: int, filling: int, emptied: bool, rest: int) -> None:
    assert rests(4, cut, filling, emptied) == rest


def test_expandable_segments_leave_no_rests() -> None:
    assert expandable({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    assert not expandable({})
    found = stored()
    assert all(found.reserved(sample.stage, True) <= found.reserved(sample.stage) for sample in SAMPLES)


def test_a_bad_row_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(TABLE.read_text().splitlines()[0] + '\n{"outcome": "measured"}\nnot json\n')
    with pytest.raises(InputError) as caught:
        load_samples(path)
    assert [fault.line for fault in caught.value.faults] == [2, 3]
