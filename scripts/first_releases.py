"""Writes search_spaces/first_releases.json: which fields of Megatron-Core 0.19.2 older releases do not have.

    python scripts/first_releases.py megatron_core-0.15.0-*.whl megatron_core-0.16.0-*.whl ...    oldest first

For each field that the oldest release lacks: the first release from which on all have it, and its default. Wheels are
read as text; nothing of them is imported.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

from megatron.core import package_info

HOME = Path(__file__).parents[1] / "search_spaces"
FIELDS, FILE = HOME / "megatron_fields.json", HOME / "first_releases.json"
SOURCES = (
    "transformer/transformer_config.py", "model_parallel_config.py", "optimizer/optimizer_config.py",
    "distributed/distributed_data_parallel_config.py",
)  # fmt: skip
# Other words for a field that the older releases have under its old name: known to all of them.
RENAMED = frozenset({
    "cuda_graph_modules", "moe_router_padding_for_quantization", "muon_nesterov", "moe_flex_dispatcher_num_sms",
    "moe_hybridep_num_sms",
})  # fmt: skip
COMPUTED = {"min_offloaded_tensor_size": 1024 * 1024}  # defaults that are no literals


def fields(text: str) -> dict[str, object]:
    """Field -> default, None where that is no literal, of every class in a source."""
    found: dict[str, object] = {}
    for owner in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        for line in owner.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                try:
                    found[line.target.id] = ast.literal_eval(line.value) if line.value else None
                except ValueError:
                    found[line.target.id] = COMPUTED.get(line.target.id)
    return found


def of_wheel(path: str) -> dict[str, object]:
    with zipfile.ZipFile(path) as wheel:
        return {
            name: value
            for source in SOURCES
            for name, value in fields(wheel.read(f"megatron/core/{source}").decode()).items()
        }


def of_installed() -> dict[str, object]:
    core = Path(package_info.__file__).parent
    return {name: value for source in SOURCES for name, value in fields((core / source).read_text()).items()}


def main(wheels: list[str]) -> None:
    older = [(".".join(Path(path).name.split("-")[1].split(".")[:2]), of_wheel(path)) for path in wheels]
    newest, rows = of_installed(), list[str]()
    for name in sorted(json.loads(FIELDS.read_text())):
        lacking = [at for at, (_, known) in enumerate(older) if name not in known]
        if lacking and name not in RENAMED:
            since = older[lacking[-1] + 1][0] if lacking[-1] + 1 < len(older) else "0.19"
            default = newest[name] if newest[name] != () else None
            rows.append(f"  {json.dumps(name)}: {json.dumps({'since': since, 'default': default})}")
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
