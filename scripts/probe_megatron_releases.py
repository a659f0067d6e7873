"""Ask the real configuration of several megatron-core releases about one list of settings, and keep their answers.

    python scripts/probe_megatron_releases.py 0.15.0=FOLDER 0.16.0=FOLDER ... > tests/search_spaces/fixtures/\
megatron_releases.jsonl

A FOLDER holds an unpacked wheel (`unzip megatron_core-0.15.0-*.whl -d FOLDER`); `0.19.2=` without one takes the
installed release. Each release answers in a process of its own, with the Transformer Engine of the probe injected.
A line holds the probe, the release, whether it refused, the fields it does not know, and the start of the message.
"""

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PROBES = ROOT / "tests" / "search_spaces" / "fixtures" / "megatron_probes.jsonl"
ENGINE = "2.20.2"
MESSAGE = 100
DENSE: dict[str, Any] = {
    "num_layers": 80, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 16, "kv_channels": 64,
    "ffn_hidden_size": 4096,
}  # fmt: skip


def facts(model: str) -> dict[str, Any]:
    """A preset's facts; "dense-80l" is a model without experts."""
    from search_spaces.presets import load_model

    if model == "dense-80l":
        return DENSE
    shape = load_model(model)
    freq = [0] * shape.first_dense_layers + [1] * (shape.num_layers - shape.first_dense_layers)
    return shape.model_dump() | {"moe_layer_freq": freq, "moe_grouped_gemm": True}


def as_written_then(knobs: dict[str, Any], types: dict[str, Any]) -> dict[str, Any]:
    """Knobs under the names of a release whose fields have these types: some were renamed until 0.19."""
    then = dict(knobs)
    if "cuda_graph_modules" in then and not then.keys() & {"cuda_graph_scope"} and "cuda_graph_modules" not in types:
        parts = then.pop("cuda_graph_modules")
        if then.get("cuda_graph_impl") == "full_iteration":
            then["cuda_graph_impl"], parts = "local", [*parts, "full_iteration"]
        then["cuda_graph_scope"] = parts if types["cuda_graph_scope"] is not str else ",".join(parts) or "full"
    if then.get("moe_flex_dispatcher_backend") == "deepep" and "moe_flex_dispatcher_backend" not in types:
        then["moe_enable_deepep"] = bool(then.pop("moe_flex_dispatcher_backend"))
    if "moe_router_padding_for_quantization" in then and "moe_router_padding_for_quantization" not in types:
        then["moe_router_padding_for_fp8"] = then.pop("moe_router_padding_for_quantization")
    return then


def verdict(probe: dict[str, Any]) -> dict[str, Any]:
    """What the megatron-core of this process says."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from packaging.version import Version

    given = facts(probe["model"])
    owner: Any = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    known = {field.name: field.type for field in dataclasses.fields(owner)}
    knobs = as_written_then(probe["knobs"], known)
    own = {
        "add_bias_linear": False, "gated_linear_unit": True, "bf16": True, "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16, "activation_func": torch.nn.functional.silu, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }  # fmt: skip
    settings = {**{name: value for name, value in given.items() if name in known}, **own, **knobs}
    unknown = sorted(knobs.keys() - known.keys())
    message = ""
    try:
        with mock.patch("megatron.core.utils.get_te_version", return_value=Version(probe.get("engine", ENGINE))):
            owner(**{name: value for name, value in settings.items() if name in known})
    except Exception as error:  # noqa: BLE001  # whatever it raises is its verdict
        message = f"{type(error).__name__}: {error}"
    return {"refused": bool(message), "unknown": unknown, "message": message[:MESSAGE]}


def answer(release: str) -> None:
    """In the process of one release: a line a probe."""
    import torch
    from torch.utils import cpp_extension

    warnings.simplefilter("ignore")
    # Release 0.15 builds a CUDA library when it is imported, and goes on without where that fails by an OSError.
    cpp_extension.load_inline = mock.Mock(side_effect=OSError("no compiler"))
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    for probe in map(json.loads, PROBES.read_text().splitlines()):
        print(json.dumps({"id": probe["id"], "release": release, **verdict(probe)}))


def ask(release: str, folder: str) -> Iterator[str]:
    path = os.pathsep.join([*([folder] if folder else []), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--answer", release], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    yield from (line for line in done.stdout.splitlines() if line.startswith("{"))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--answer"]:
        answer(arguments[1])
        return
    for argument in arguments:
        release, _, folder = argument.partition("=")
        for line in ask(release, folder):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
