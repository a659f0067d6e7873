"""Fit the default memory calibration to the measured table, and say how large its errors are.

python benchmarks/fit_memory.py            # writes search_spaces/memory/h200.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from search_spaces.memory.calibration import DEFAULT_FILE, Calibration, fit
from search_spaces.memory.rows import load_samples

TABLE = Path(__file__).parent / "tables" / "h200_memory.jsonl"
# Two shapes have most rows; the others differ in layers, experts or widths and test whether factors carry over.
COMMON = frozenset({"shape-a", "qwen3-30b-a3b-4l"})
FINGERPRINT = "H200 sm_90, megatron-core 0.19.2, torch 2.11.0, transformer-engine 2.20.2, cuda 13.0"


def fitted() -> Calibration:
    """The calibration of the table as it stands."""
    return fit(load_samples(TABLE), FINGERPRINT, "benchmarks/tables/h200_memory.jsonl", COMMON)


def main() -> None:
    found = fitted()
    DEFAULT_FILE.write_text(found.model_dump_json(indent=2) + "\n")
    for name in ("fitted", "held_out", "other_shapes"):
        part = getattr(found, name)
        print(f"{name}: {part.rows} rows, mean {part.mean:.2%}, worst {part.worst:.2%} ({part.worst_row})")
    print(f"margin: {found.low:.2%} up, {found.high:.2%} down; factors {found.factors}")


if __name__ == "__main__":
    main()
