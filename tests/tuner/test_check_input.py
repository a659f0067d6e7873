"""`moetune check` on wrong input: every fault with its line, the other verdicts stand, the right exit code."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.project import ROOT
from tests.tuner.check_cases import BAD, GOOD, STACK, case, facts, judged, knobs, written
from tuner.cli import main
from tuner.commands.check import answer


def refused(raw: Mapping[str, Any]) -> str:
    """The one fault of a configuration that cannot be read."""
    verdict, faults = answer(raw, 1)
    assert not verdict.valid
    assert verdict.rule == "UNK-00"
    assert len(faults) == 1, faults
    return f"{faults[0].message} ({faults[0].hint})"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (knobs(moe_token_dispatcher_typ="flex"), "did you mean moe_token_dispatcher_type?"),
        (knobs(zzzz=1), "known knobs"),
        (case(gpu_arch="H1000X"), "H100"),
        (case(gpu_arch="X1"), "B300, GB300"),
        (case(gpu_arch="X1 sm_95"), "known: sm_70"),
        (case(stack={**STACK, "mcore": "0.14.1"}), "0.15 to 0.19"),
        (case(stack={**STACK, "mcore": "1.0.0"}), "unknown version '1.0.0'"),
        (case(stack={**STACK, "mcore": "newest"}), "0.15 to 0.19"),
        (case(stack={**STACK, "mcore": None}), "nothing runs without megatron_core"),
        (case(stack={**STACK, "TE": ["2.20"]}), "the version of transformer_engine is a text"),
        (case(stack={**STACK, "TE": 2.20}), "quote it"),
        (case(stack={**STACK, "flash_attn": "2.8"}), "known: megatron_core"),
        (case(framework="megatron-lmm"), "did you mean megatron-lm?"),
        (case(framework=["megatron-lm"]), "no framework"),
        (case(model="qwen3-30b"), "did you mean qwen3-30b-a3b?"),
        (case(model=[1]), "model must be a mapping"),
        (case(knobs=["a"]), "knobs must be a mapping"),
        (case(stack="0.19.2"), "stack must be a mapping"),
        (case(env=3), "env must be a mapping"),
        (case(knob={"fp8": "hybrid"}), "did you mean knobs?"),
        (case(world_size=None), "world_size is missing"),
        (case(world_size="8"), 'world_size "8"'),
        (case(world_size=0), "no number of ranks"),
        (case(world_size=-8), "no number of ranks"),
        (case(world_size=True), "no number of ranks"),
        (case(world_size=10**30), "no number of ranks"),
        (facts(num_layers=-4), "greater than 0"),
        (facts(num_moe_experts=0), "greater than 0"),
        (facts(num_attention_heads="many"), "valid integer"),
        (facts(hidden_size=2048.5), "valid integer"),
        (facts(hidden_size=10**400), "out of range"),
        (facts(moe_router_topk=200), "exceeds num_moe_experts"),
        (facts(layers=4), "no knob"),
        (knobs(tensor_model_parallel_size="2"), "is a integer"),
        (knobs(tensor_model_parallel_size=0), "below 1"),
        (knobs(tensor_model_parallel_size=2.0), "is a integer"),
        (knobs(context_parallel_size=-1), "below 1"),
        (knobs(micro_batch_size=0), "below 1"),
        (knobs(micro_batch_size="one"), "is a integer"),
        (knobs(seq_length=[4096]), "is a integer"),
        (knobs(global_batch_size=10**400), "out of range"),
        (knobs(sequence_parallel="true"), "is a switch"),
        (knobs(fp8=1), "is a word"),
        (knobs(recompute_modules=[None]), "is a list"),
        (knobs(moe_aux_loss_coeff="[1, "), "is a list"),
        (knobs(moe_expert_capacity_factor=float("nan")), "out of range"),
        (knobs(moe_expert_capacity_factor=float("inf")), "out of range"),
        (knobs(hierarchical_context_parallel_sizes="two"), "rule PAR-19 can make nothing of"),
        ([], "must be a mapping"),
        (None, "must be a mapping"),
        ("text", "must be a mapping"),
    ],
)  # fmt: skip
def test_a_fault_says_what_is_wrong_and_what_is_known(raw: Mapping[str, Any], words: str) -> None:
    assert words in refused(raw)


def test_every_fault_of_a_configuration_at_once() -> None:
    _, faults = answer(case(world_size=0, gpu_arch="X1", knobs={"a": 1, "fp8": 2}, stack={"mcore": "9.9"}), 1)
    assert {fault.key for fault in faults} >= {"world_size", "a", "fp8", "megatron_core"}


def test_what_is_not_said_is_no_fault() -> None:
    verdict, faults = answer({"world_size": 8}, 1)
    assert verdict.valid
    assert verdict.id == "1"
    assert not faults
    said = " ".join(verdict.warnings)
    assert all(f"{name} is not given" in said for name in ("gpu_arch", "stack", "model"))


def test_null_is_not_said() -> None:
    nothing = {
        "id": None,
        "stack": None,
        "gpu_arch": None,
        "model": None,
        "knobs": None,
        "env": None,
        "framework": None,
    }
    assert answer({"world_size": 8, **nothing}, 1)[0] == answer({"world_size": 8}, 1)[0]
    inside = case(knobs=dict.fromkeys(("fp8", "seq_length", "recompute_modules", "tensor_model_parallel_size")))
    assert answer(inside, 1)[0].valid
    assert answer(facts(moe_shared_expert_intermediate_size=None, hidden_size=None), 1)[0].valid


def test_a_newer_minor_version_is_judged_by_the_nearest_rules_with_a_warning() -> None:
    verdict, faults = answer(case(stack={**STACK, "mcore": "0.20.0"}, knobs={"expert_model_parallel_size": 16}), 1)
    assert not faults
    assert (verdict.valid, verdict.rule) == (False, "PAR-02")
    assert "megatron_core 0.20.0 is newer than the rules, which are those of 0.19" in verdict.warnings


def test_a_package_that_is_not_installed() -> None:
    graphs = knobs(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"])
    for absent in (None, False, "none", "not installed"):
        assert answer(graphs | {"stack": {**STACK, "TE": absent}}, 1)[0].rule == "STK-01"
    deepep = knobs(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    for name in ("deep_ep", "deep-ep", "DeepEP"):
        assert answer(deepep | {"stack": {**STACK, name: None}}, 1)[0].rule == "DSP-08"
    assert answer(deepep, 1)[0].valid


def test_many_faults_are_told_in_time(tmp_path: Path) -> None:
    wrong = [case(id=f"c{n}", knobs={f"word{k}": k for k in range(20)}) for n in range(100)]
    began = time.monotonic()
    assert len(judged(tmp_path, wrong).faults) == 2000
    many = case(knobs={f"word{n}" * 30: n for n in range(3000)})
    assert len(judged(tmp_path, many).faults) == 3000
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("data", "code"),
    [([GOOD], 0), ([GOOD, BAD], 0), ([BAD], 3), ([BAD, case(knobs={"x": 1})], 2), ([GOOD, 3], 2), ([], 2)],
)
def test_exit_codes(data: object, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(written(tmp_path, data))]) == code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert bool(printed.err) == (code == 2)


@pytest.mark.parametrize(
    ("data", "code"), [([GOOD, BAD], 0), ([GOOD, case(id="typo", knobs={"x": 1})], 2), ("nothing", 2)]
)
def test_json_is_one_document_whatever_happens(data: object, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tuner.cli", "check", str(written(tmp_path, data)), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    answers = json.loads(done.stdout)
    if isinstance(data, list):
        assert [each["id"] for each in answers] == [each["id"] for each in data]
        keys = {"id", "valid", "rule", "reason", "effective", "level"}
        assert all(keys <= each.keys() for each in answers)
    else:
        assert answers["exit_code"] == 2
    assert ("cases.json:" in done.stderr) == (code == 2)
    assert "Traceback" not in done.stderr


def test_the_table_for_people_takes_any_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    risky = case(id="[/x]", knobs={"expert_model_parallel_size": 8, "fp8": "e4m3", "fp8_recipe": "blockwise"})
    data = [risky | {"gpu_arch": "B200"}, BAD | {"id": "[bold]b" * 100}, case(id="typo", knobs={"[/q]": "[/z]"})]
    assert main(["check", str(written(tmp_path, data))]) == 2
    printed = capsys.readouterr()
    assert "[/x]" in printed.out
    assert all(word in printed.out for word in ("risky", "TRAP-23", "invalid", "PAR-02", "1 of 3 can run"))
    assert 'no knob "[/q]"' in printed.err
