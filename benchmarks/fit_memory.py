"""Fit the default memory calibration to the measured table, and say how large its errors are.

python benchmarks/fit_memory.py            # writes search_spaces/memory/h200.json
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from search_spaces.memory.calibration import DEFAULT_FILE, Calibration, Sample, fit
from search_spaces.memory.rows import load_samples
from tracking.journal import fold, read_events
from tuner.memory_errors import samples_of
from tuner.sweep import load_sweep

TABLES = Path(__file__).parent / "tables"
TABLE, SWEEP = TABLES / "h200_memory.jsonl", TABLES / "h200_graphs_sweep.jsonl"
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


def fitted() -> Calibration:
    """The calibration of the table as it stands."""
    return fit(load_samples(TABLE), FINGERPRINT, "benchmarks/tables/h200_memory.jsonl", COMMON, swept())


def main() -> None:
    found = fitted()
    DEFAULT_FILE.write_text(found.model_dump_json(indent=2) + "\n")
    for name in ("fitted", "held_out", "other_shapes", "other_runs"):
        part = getattr(found, name)
        print(f"{name}: {part.rows} rows, mean {part.mean:.2%}, worst {part.worst:.2%} ({part.worst_row})")
    print(f"margins: eager {found.eager}, graphs {found.graphs}; factors {found.factors}")


if __name__ == "__main__":
    main()
