"""Rules of an older release of megatron-core refuse what that release refuses, and nothing that it accepts.

The releases' verdicts were recorded by scripts/probe_megatron_releases.py on their real configuration classes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.partial import PartialModel
from search_spaces.presets import load_model
from search_spaces.rules import Case, Rule, rules_for
from search_spaces.shapes import ModelShape, StackVersions
from tests.search_spaces.cases import GPU_TRAINING, STACK, gpus
from tests.search_spaces.oracle import CONFIG_FILES, LISTS

FIXTURES = Path(__file__).parent / "fixtures"
PROBES = {row["id"]: row for row in map(json.loads, (FIXTURES / "megatron_probes.jsonl").read_text().splitlines())}
VERDICTS = [json.loads(line) for line in (FIXTURES / "megatron_releases.jsonl").read_text().splitlines()]
RELEASES = sorted({row["release"] for row in VERDICTS})
# Enough ranks for every layout among the probes, on a GPU that has every format but those of Hopper.
CLUSTER = gpus(960, "B200 sm_100")
TRAINING = GPU_TRAINING.model_copy(update={"global_batch_size": 960 * 960})
DENSE = PartialModel.of({
    "name": "dense-80l", "num_layers": 80, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 16,
    "kv_channels": 64, "ffn_hidden_size": 4096, "dense": True,
})  # fmt: skip

# Probe -> why its verdict cannot be asked of our rules.
UNASKED = {
    "DSP-23": "ModelShape has no shared expert of width 0",
}
# Rules about words that a release does not have yet. The script asks it under its own words, and 0.15 looks at none.
YOUNG_WORDS = frozenset({"CGR-01b", "CGR-01c"})


def model_of(probe: dict[str, Any]) -> ModelShape:
    if probe["model"] == "dense-80l":
        return DENSE
    shape = load_model(probe["model"])
    return shape.model_copy(update={name: value for name, value in probe["knobs"].items() if name in model_fields()})


def model_fields() -> frozenset[str]:
    return frozenset(ModelShape.model_fields) - {"name"}


def knob(name: str, value: Any) -> KnobValue:
    if isinstance(value, list):
        return "+".join(value) if name in LISTS else json.dumps(value)
    return value  # type: ignore[no-any-return]


def case_of(probe: dict[str, Any], release: str) -> Case:
    knobs = {name: knob(name, value) for name, value in probe["knobs"].items() if name not in model_fields()}
    stack: StackVersions = STACK.model_copy(
        update={"megatron_core": release, "transformer_engine": probe.get("engine", "2.20.2")}
    )
    unsaid = {"moe_grouped_gemm": True, "moe_router_pre_softmax": False}
    return Case({**unsaid, **knobs}, model_of(probe), CLUSTER, TRAINING, stack=stack)


def of_the_configuration(rule: Rule) -> bool:
    """Rules that quote the classes whose verdicts were recorded; others may refuse what these accept."""
    return any(Path(file).name in rule.source for file in CONFIG_FILES) and rule.level == "config"


def spoken(row: dict[str, Any]) -> dict[str, str]:
    """What the rules of that configuration class say for that release."""
    case = case_of(PROBES[row["id"]], row["release"])
    rules = filter(of_the_configuration, rules_for(frozenset(), row["release"], worker=False))
    return {rule.id: why for rule in rules if (why := rule.refusal(case))}


def test_every_probe_has_a_verdict_of_every_release() -> None:
    assert {(row["id"], row["release"]) for row in VERDICTS} == {(name, r) for name in PROBES for r in RELEASES}
    assert PROBES.keys() >= UNASKED.keys()


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_refuses_is_refused_by_the_rules_for_it(release: str) -> None:
    missed = {
        row["id"]: row["message"]
        for row in VERDICTS
        if row["release"] == release and row["refused"] and row["id"] not in UNASKED and not spoken(row)
    }
    assert not missed


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_accepts_no_rule_of_its_configuration_refuses(release: str) -> None:
    """A knob that the release does not know is accepted by nobody: such a probe says nothing."""
    wrong = {
        row["id"]: refused
        for row in VERDICTS
        if row["release"] == release and not row["refused"] and not row["unknown"]
        if (refused := spoken(row)) and not refused.keys() & YOUNG_WORDS
    }
    assert not wrong


def test_the_newest_recorded_release_is_the_default() -> None:
    newest = max(RELEASES)
    assert rules_for(frozenset(), newest) == rules_for(frozenset(), None)
    assert replace(case_of(PROBES["PAR-04"], newest), stack=None).dense
