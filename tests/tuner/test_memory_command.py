"""`moetune memory`: what it answers, what it refuses to answer, and the exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.memory.shape import decoder_of
from search_spaces.presets import load_model
from tuner.cli import main

KNOBS = {"expert_model_parallel_size": 8, "seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 512,
         "use_distributed_optimizer": True}  # fmt: skip
GOOD = {"id": "good", "world_size": 64, "gpu_arch": "H200 sm_90", "model": "qwen3-30b-a3b", "knobs": KNOBS}
NUMBERS = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "workspace_bytes", "graph_bytes")


def asked(capfd: pytest.CaptureFixture[str], tmp_path: Path, *cases: object) -> tuple[int, list[dict[str, Any]], str]:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"cases": cases}))
    code = main(["memory", str(file), "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


def changed(**knobs: object) -> dict[str, object]:
    return {**GOOD, "knobs": {**KNOBS, **knobs}}


def test_bytes_of_the_most_loaded_gpu_by_part(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, (found,), _ = asked(capfd, tmp_path, GOOD)
    assert code == 0
    assert found["id"] == "good"
    assert found["weights_bytes"] == 2 * sum(found["per_stage"][0]["parameters"].values())
    assert sum(found[name] for name in NUMBERS) == found["total_bytes"]
    assert found["total_bytes"] < found["device_bytes"]
    assert found["fit"] == "fits"
    assert found["error"] is None


def test_every_stage_is_there_and_the_worst_decides(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, (found,), _ = asked(capfd, tmp_path, changed(pipeline_model_parallel_size=4))
    assert [stage["stage"] for stage in found["per_stage"]] == [0, 1, 2, 3]
    assert max(stage["total_bytes"] for stage in found["per_stage"]) == found["total_bytes"]


def test_natural_routing_is_assumed_unbalanced_and_says_so(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    forced = changed(moe_router_force_load_balancing=True)
    _, (natural, even), _ = asked(capfd, tmp_path, GOOD, forced)
    assert natural["assumed_load"] > even["assumed_load"] == 1.0
    assert natural["balanced_total_bytes"] == even["total_bytes"] < natural["total_bytes"]
    assert any("times the mean" in warning for warning in natural["warnings"])


def test_what_cannot_fit_is_refused_with_a_cure_and_exit_3(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, (found,), _ = asked(capfd, tmp_path, changed(micro_batch_size=8))
    assert (code, found["fit"]) == (3, "refused")
    assert "most of it activations" in found["reason"]
    assert "; set " in found["reason"]


def test_a_missing_fact_is_an_error_that_names_it(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = {**GOOD, "id": "bare", "model": {"num_layers": 4, "num_moe_experts": 8}, "knobs": {}}
    code, (good, found), err = asked(capfd, tmp_path, GOOD, bare)
    assert code == 2
    assert good["total_bytes"]  # the others are answered
    assert found["total_bytes"] is None
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "moe_router_topk", "kv_channels", "seq_length"):
        assert f"{name} is missing" in found["error"]
        assert f"bare: {'' if name == 'seq_length' else 'model.'}{name} is missing" in err


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"num_attention_heads": 30}, "num_attention_heads"),
        ({"num_moe_experts": 0}, "num_moe_experts"),
        ({"hidden_size": -2048}, "hidden_size"),
        ({"moe_router_topk": 200}, "moe_router_topk"),
        ({"num_moe_experts": 100}, "num_moe_experts"),
        ({"num_layers": "many"}, "num_layers"),
    ],
    ids=str,
)
def test_a_nonsense_shape_is_an_error_that_names_the_field(
    facts: dict[str, object], field: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = {**load_model("qwen3-30b-a3b").model_dump(exclude_none=True), **facts}
    code, (found,), err = asked(capfd, tmp_path, {**GOOD, "model": model})
    assert code == 2
    assert field in found["error"]
    assert "cases.json" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"seq_length": 0}, "seq_length"),
        ({"tensor_model_parallel_size": 3}, "world_size"),
        ({"pipeline_model_parallel_size": 4, "global_batch_size": 7}, "global_batch_size"),
        ({"pipeline_model_parallel_size": 5}, "world_size"),
        ({"no_such_knob": 1}, "no_such_knob"),
    ],
    ids=str,
)
def test_nonsense_knobs_too(
    knobs: dict[str, object], field: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, (found,), err = asked(capfd, tmp_path, changed(**knobs))
    assert (code, found["total_bytes"]) == (2, None)
    assert field in found["error"]
    assert "Traceback" not in err


def test_one_configuration_that_is_no_mapping(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found, err = asked(capfd, tmp_path, GOOD, 3)
    assert (code, found[1]["error"]) == (2, "a configuration must be a mapping, not 3")
    assert "cases.json:1: 2: a configuration must be a mapping" in err


def test_a_dense_model_and_fp8_and_a_file_in_yaml(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(
        "world_size: 8\ngpu_arch: H100 sm_90\nmodel: {num_layers: 8, hidden_size: 1024, num_attention_heads: 16, "
        "kv_channels: 64, ffn_hidden_size: 4096, vocab_size: 32000}\nknobs: {seq_length: 2048, fp8: hybrid}\n"
    )
    assert main(["memory", str(file), "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)
    assert found["id"] == "1"
    assert found["per_stage"][0]["parameters"]["experts"] == 0
    assert "micro_batch_size is not said: 1" in found["warnings"]


def test_a_table_for_people_and_a_file_that_is_not_there(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([GOOD]))
    assert main(["memory", str(file)]) == 0
    assert "good" in capfd.readouterr().out
    assert main(["memory", str(tmp_path / "none.json")]) == 2
    assert "cannot read it" in capfd.readouterr().err


def test_presets_all_have_what_a_plan_needs() -> None:
    assert decoder_of(load_model("deepseek-v3"), {}).q_rank == 1536


def test_what_is_refused_anyway_is_said_and_still_advised(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Advice must break no new rule; what the configuration breaks already does not silence it."""
    broken = changed(micro_batch_size=8, seq_length=32768, fp8="e4m3", fp8_recipe="mxfp8")
    _, (found,), _ = asked(capfd, tmp_path, broken)
    assert found["fit"] == "refused"
    assert any("it cannot run: HW-03" in warning for warning in found["warnings"])
    assert "; set " in found["reason"]
