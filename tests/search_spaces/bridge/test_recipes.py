"""Bridge's own verdict on its shipped recipes, as published; and our rules' verdict on the same configurations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.candidate import KnobValue
from search_spaces.partial import PartialModel
from search_spaces.rules import Case, Launcher, rules_for
from search_spaces.shapes import ModelShape, TrainingShape
from tests.search_spaces.cases import STACK, gpus

FIXTURE = Path(__file__).parent.parent / "fixtures" / "bridge_recipes.jsonl"
ROWS = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
pytestmark = pytest.mark.bridge


@pytest.fixture(params=ROWS, ids=lambda row: row["recipe"])
def row(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def built(real: Any, row: dict[str, Any]) -> Any:
    try:
        return real.build(row["family"], row["recipe"])
    except real.Unknown as card:
        pytest.skip(f"the card of {card} is not here")


def effective(config: Any) -> dict[str, Any]:
    """What the published list says of a recipe after the chain."""
    model = config.model
    return {
        "dispatcher": model.moe_token_dispatcher_type,
        "backend": model.moe_flex_dispatcher_backend,
        "overlap": model.overlap_moe_expert_parallel_comm,
        "delay_wgrad": model.delay_wgrad_compute,
        "graph": model.cuda_graph_impl,
        "modules": [getattr(module, "name", module) for module in model.cuda_graph_modules or []],
        "recompute": model.recompute_granularity,
        "rmods": model.recompute_modules,
        "tp_overlap": model.tp_comm_overlap,
        "og": config.ddp.overlap_grad_reduce,
        "op": config.ddp.overlap_param_gather,
    }


def test_the_chain_says_what_was_published(real: Any, row: dict[str, Any]) -> None:
    config = built(real, row)
    why = real.refusal(config, row["gpu"], row["ranks"])
    if row["refused"]:
        assert why is not None
        assert why.startswith(row["refused"][:60])
        return
    assert why is None
    if "final" in row:
        assert effective(config) == row["final"]


# What a recipe's configuration holds that is no knob: functions, derived values, places of the run.
# Of an old name beside its new one only the new one: the class has migrated it.
SKIPPED = frozenset({
    "moe_layer_freq", "external_cuda_graph", "enable_cuda_graph", "cuda_graph_scope", "pipeline_model_parallel_layout",
})  # fmt: skip
SCALARS = (bool, int, float, str)


def plain(value: Any) -> KnobValue:
    """A field as `check` reads it: lists of modules joined, other lists as JSON, dtypes and enums by name."""
    value = getattr(value, "name", value)
    if isinstance(value, (list, tuple)):
        parts = [plain(part) for part in value]
        words = all(isinstance(part, str) for part in parts)
        return "+".join(map(str, parts)) if words else json.dumps(parts)
    if value is None or isinstance(value, SCALARS):
        return value
    if callable(value):
        return str(getattr(value, "__name__", None))
    return {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float16": "fp16"}.get(str(value))


def case_of(real: Any, config: Any, layout: Any, row: dict[str, Any]) -> Case:
    """The finalised configuration as an explicit case: every field of the model, ddp and optimizer is a knob."""
    model = config.model
    knobs: dict[str, KnobValue] = {}
    for part in (config.optimizer, config.ddp, model):
        for field in dataclasses.fields(part):
            value = plain(getattr(part, field.name))
            if field.name not in SKIPPED and not field.name.startswith("_") and value is not None:
                knobs[field.name] = value
    facts = {
        name: getattr(model, name)
        for name in ModelShape.model_fields
        if name != "name" and getattr(model, name, None) is not None
    }
    dense = next((i for i, moe in enumerate(moe_layers(model)) if moe), 0)
    facts |= {"name": row["recipe"], "first_dense_layers": dense}
    knobs = {name: value for name, value in knobs.items() if name not in facts}
    knobs["pipeline_model_parallel_layout"] = json.dumps(layout) if isinstance(layout, list) else layout
    knobs |= {
        "micro_batch_size": config.train.micro_batch_size, "global_batch_size": config.train.global_batch_size,
        "seq_length": model.seq_length, "dataset.seq_length": config.dataset.seq_length,
        "check_for_nan_in_loss": config.rerun_state_machine.check_for_nan_in_loss,
    }  # fmt: skip
    training = TrainingShape(
        sequence_length=model.seq_length, global_batch_size=config.train.global_batch_size, params_dtype="bf16"
    )
    _, major, minor = real.stand_ins.DEVICES[row["gpu"]]
    cluster = gpus(row["ranks"], f"{row['gpu']} sm_{major}{minor}")
    env = {name: str(value) for name, value in config.env_vars.items()}
    launchers: frozenset[Launcher] = frozenset({"megatron-bridge"})
    stack = STACK.model_copy(update={"deep_ep": "1.2.1", "hybrid_ep": "1.2.1", "megatron_bridge": "0.6.2"})
    return Case(knobs, PartialModel.of(facts), cluster, training, env, stack, launchers)


def moe_layers(model: Any) -> list[int]:
    freq = model.moe_layer_freq
    if isinstance(freq, int):
        return [int(i % freq == 0) for i in range(model.num_layers)]
    return list(freq)


OLD_COUNTS = ("moe_deepep_num_sms", "moe_hybridep_num_sms")
BY_MESSAGE = {
    "sequence length configuration": {"BRG-03"},
    "Conflicting deprecated SM-count": {"DSP-06"},
    "conflicts with pipeline_model_parallel_layout": {"PAR-16"},
}
# Shipped, accepted by the chain, and refused when its layers are built.
DEFECT = {"gpt_oss_120b_pretrain_64gpu_gb200_bf16_ncclep_config": {"DSP-11", "DSP-15"}}


def refused(real: Any, config: Any, layout: Any, row: dict[str, Any]) -> dict[str, str]:
    case = case_of(real, config, layout, row)
    rules = rules_for(frozenset({"megatron-bridge"}), None, worker=False)
    return {rule.id: why for rule in rules if rule.level != "runtime risk" and (why := rule.refusal(case))}


def test_our_rules_refuse_what_the_chain_refuses_and_no_more(real: Any, row: dict[str, Any]) -> None:
    """But for the grids of experts, which Bridge does not look at: they fail when the groups are made."""
    config = built(real, row)
    layout = config.model.pipeline_model_parallel_layout  # the chain makes an object of it
    sms = {name: value for name in OLD_COUNTS if (value := getattr(config.model, name)) is not None}
    why = real.refusal(config, row["gpu"], row["ranks"])
    if why is not None:
        for name, value in sms.items():
            setattr(config.model, name, value)
    ours = refused(real, config, layout, row)
    if not row["expert_grid"]:
        assert ours.pop("PAR-02")
    if why is None:
        assert {*ours} == DEFECT.get(row["recipe"], set()), ours
        return
    # One of those refused has a second fault (DSP-07), which the chain would meet later.
    assert next(rules for text, rules in BY_MESSAGE.items() if text in why) <= {*ours}, f"{why}: {ours}"
