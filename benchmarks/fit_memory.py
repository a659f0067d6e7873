"""Fit the default memory calibration to the measured table, and say how large its errors are.

python benchmarks/fit_memory.py            # writes search_spaces/memory/h200.json
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from search_spaces.memory.calibration import DEFAULT_FILE, Calibration, Sample, fit
from search_spaces.memory.plan import plan_of
from search_spaces.memory.rows import expandable, load_samples
from search_spaces.rules import Case
from tracking.journal import fold, read_events
from train_worker.recorded_table import RecordedTable
from tuner.memory_errors import samples_of
from tuner.sweep import load_sweep

TABLES = Path(__file__).parent / "tables"
TABLE, SWEEP = TABLES / "h200_memory.jsonl", TABLES / "h200_graphs_sweep.jsonl"
TWO_GPUS = (TABLES / "two_gpus_qwen3.jsonl", TABLES / "two_gpus_moonlight.jsonl")
# Two shapes have most rows; the others differ in layers, experts or widths and test whether factors carry over.
COMMON = frozenset({"shape-a", "qwen3-30b-a3b-4l"})
FINGERPRINT = "H200 sm_90, megatron-core 0.19.2, torch 2.11.0, transformer-engine 2.20.2, cuda 13.0"


def swept() -> list[Sample]:
    """Measured trials of a sweep on the same GPU, of which none is fitted."""
    state = fold(read_events(SWEEP))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "sweep.yaml"
        file.write_text(state.head.sweep_text)
        return samples_of(load_sweep(file), state.finished)


def exchanging() -> list[Sample]:
    """Measured trials in which ranks exchanged tokens, of which none is fitted."""
    found = []
    for row in (row for path in TWO_GPUS for row in RecordedTable.read(path).rows):
        stage = plan_of(Case(row.knobs, row.shape, row.cluster, row.training, row.env)).worst
        if row.measured is None or row.measured.memory is None or not stage.exchanged:
            continue
        memory = row.measured.memory
        found.append(
            Sample(
                f"{row.shape.name}-{row.order}", row.shape.name, stage, expandable(row.env), memory.reserved_bytes,
                memory.device_used_bytes,
            )
        )  # fmt: skip
    return found


def fitted() -> Calibration:
    """The calibration of the table as it stands."""
    return fit(load_samples(TABLE), FINGERPRINT, "benchmarks/tables/h200_memory.jsonl", COMMON, swept(), exchanging())


def main() -> None:
    found = fitted()
    DEFAULT_FILE.write_text(found.model_dump_json(indent=2) + "\n")
    for name in ("fitted", "held_out", "other_shapes", "other_runs", "exchanging"):
        part = getattr(found, name)
        print(f"{name}: {part.rows} rows, mean {part.mean:.2%}, worst {part.worst:.2%} ({part.worst_row})")
    print(f"margins: eager {found.eager}, graphs {found.graphs}, exchanged {found.exchanged}; factors {found.factors}")


if __name__ == "__main__":
    main()
