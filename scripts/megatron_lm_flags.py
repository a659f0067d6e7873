"""Writes search_spaces/megatron_lm_flags.json: the flags of Megatron-LM that name no field of Megatron-Core's.

    python scripts/megatron_lm_flags.py [--check]

They exist, so `moetune check` takes them; no rule reads them. --check exits 1 where the file is out of date.
"""

import argparse
import json
import sys
from pathlib import Path

from megatron.training.arguments import add_megatron_arguments

HOME = Path(__file__).parents[1] / "search_spaces"
FILE, FIELDS = HOME / "megatron_lm_flags.json", HOME / "megatron_fields.json"


def text() -> str:
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    words = {action.dest for action in parser._actions}
    words |= {each[2:].replace("-", "_") for action in parser._actions for each in action.option_strings}
    fields = json.loads(FIELDS.read_text())
    return json.dumps(sorted(word for word in words - set(fields) if len(word) > 1 and word != "help"), indent=1) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(FILE.read_text() != text())
    FILE.write_text(text())
