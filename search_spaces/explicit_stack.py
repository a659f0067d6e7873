"""The stack of an explicit configuration: names and versions as users write them, told as `StackVersions`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from search_spaces.explicit_knobs import CaseFault, shown
from search_spaces.rules.versions import NEWEST, version_faults
from search_spaces.shapes import StackVersions
from search_spaces.space import nearest

NAMES = {
    "mcore": "megatron_core", "te": "transformer_engine", "bridge": "megatron_bridge", "deepep": "deep_ep",
    "hybridep": "hybrid_ep",
}  # fmt: skip
NOT_INSTALLED = ("", "none", "null", "not installed", "missing")
# No public configuration lists the DeepEP builds or Apex: there unless the case says otherwise.
ASSUMED = {"deep_ep": "assumed", "hybrid_ep": "assumed", "apex": "assumed"}
NEEDED = {"megatron_core": NEWEST, "torch": "2.11.0"}  # what a stack that does not say them has


class ReadStack(NamedTuple):
    """`stack` None: none is given, or `faults` say what is wrong with it."""

    stack: StackVersions | None
    faults: list[CaseFault]
    warnings: list[str]


def read_stack(given: Mapping[str, Any]) -> ReadStack:
    """The versions in `given`. A package that is not there is null, false or "none"."""
    if not given:
        return ReadStack(None, [], ["stack is not given: rules about versions were not asked"])
    faults, versions = [], dict[str, str | None]()
    for key, value in given.items():
        name = key.lower().replace("-", "_")
        name = NAMES.get(name, name)
        if name not in StackVersions.model_fields:
            hint = nearest(name, [*StackVersions.model_fields])
            faults.append(CaseFault(key, f"no package {shown(key)} in stack", hint))
        elif isinstance(value, list | dict):
            faults.append(CaseFault(key, f"the version of {name} is a text, not {shown(value)}"))
        elif isinstance(value, float):
            message = f"the version of {name} is a text, not the number {shown(value)}"
            faults.append(CaseFault(key, message, "quote it: as a number 2.20 is 2.2"))
        else:
            versions[name] = _version(value)
            if versions[name] is None and name in NEEDED:
                faults.append(CaseFault(key, f"nothing runs without {name}", "give its version"))
    wrong, doubts = version_faults(versions)
    faults += [CaseFault(name, message, hint) for name, message, hint in wrong]
    return ReadStack(None if faults else StackVersions(**{**NEEDED, **ASSUMED, **versions}), faults, doubts)


def _version(value: object) -> str | None:
    text = "none" if value in (None, False) else str(value).strip()
    return None if text.lower() in NOT_INSTALLED else text
