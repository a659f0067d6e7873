"""Variables that Transformer Engine reads once, when it is imported: that was in the parent of this process.

A variable set after the fork would change nothing there, without a word. Where the value is a global of a module it is
set anew; variables that decide more at import are refused in advance (rule RUN-07).
"""

import os
import sys

# transformer_engine/pytorch/cpu_offload.py: its functions look at the global of the same name at each call.
CPU_OFFLOAD, OWNER = "NVTE_CPU_OFFLOAD_V1", "transformer_engine.pytorch.cpu_offload"


def follow_environment() -> None:
    """Make Transformer Engine, where it is imported, see this process's environment."""
    module = sys.modules.get(OWNER)
    if module is not None and hasattr(module, CPU_OFFLOAD):
        setattr(module, CPU_OFFLOAD, os.environ.get(CPU_OFFLOAD, "0") == "1")


def in_force(name: str) -> str | None:
    """A variable as the process follows it: what the environment says, except where it was read before that."""
    value = os.environ.get(name)
    module = sys.modules.get(OWNER)
    if name == CPU_OFFLOAD and module is not None:
        latched = bool(getattr(module, CPU_OFFLOAD, False))
        return value if latched == (value == "1") else "1" if latched else None
    return value
