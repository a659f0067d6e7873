"""What the plan said of a run's trials: on the journal of a sweep over one H200, of which no row was fitted."""

from pathlib import Path

from search_spaces.memory.calibration import stored
from tests.tracking.sample import candidate, finished, measured
from tracking.journal import fold, read_events
from tuner.memory_errors import memory_errors, said

JOURNAL = Path(__file__).parents[2] / "benchmarks" / "tables" / "h200_graphs_sweep.jsonl"


def test_trials_of_a_sweep_are_compared_with_their_plans(tmp_path: Path) -> None:
    state = fold(read_events(JOURNAL))
    (tmp_path / "sweep.yaml").write_text(state.head.sweep_text)
    found = memory_errors(tmp_path, state.finished)
    assert found is not None
    assert (found.rows, found.mean, found.worst) == (
        stored().other_runs.rows, stored().other_runs.mean, stored().other_runs.worst
    )  # fmt: skip
    text = said(found)
    assert f"over {found.rows} trials" in text
    assert f"held-out rows of the calibration: {stored().held_out.mean:.1%}" in text


def test_nothing_to_compare_is_no_error(tmp_path: Path) -> None:
    cpu = [finished(0, candidate(), measured(0.1), "baseline")]
    assert memory_errors(tmp_path, cpu) is None
    assert memory_errors(tmp_path, fold(read_events(JOURNAL)).finished) is None  # no sweep file beside the journal
