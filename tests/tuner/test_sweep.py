"""A sweep file: every fault at once, each at its line with the nearest word; never a traceback."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.errors import InputError
from search_spaces.presets import load_model
from tuner.sweep import LoadedSweep, load_sweep

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = """\
schema_version: 1
name: try
model: {preset: tiny-moe}
cluster: {device: cpu, workers: 2, workers_per_trial: 2, workers_per_node: 2}
training: {sequence_length: 128, global_batch_size: 16, params_dtype: fp32}
space:
  name: laptop
  choices:
    micro_batch_size: [1, 2]
budget: {trials: 4, trial_time_limit_s: 60}
seed: 1
"""


def load(folder: Path, text: str | bytes) -> LoadedSweep:
    file = folder / "sweep.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_sweep(file)


def faults(folder: Path, text: str | bytes) -> list[str]:
    """The faults of a bad file, without the folder: "3:17: message (hint)"."""
    with pytest.raises(InputError) as caught:
        load(folder, text)
    assert caught.value.exit_code == 2
    assert caught.value.next_step
    return [str(fault).removeprefix(f"{folder}/sweep.yaml:").strip() for fault in caught.value.faults]


def test_a_good_file_is_loaded(tmp_path: Path) -> None:
    sweep = load(tmp_path, GOOD)
    assert sweep.model == load_model("tiny-moe")
    assert sweep.space.by_name["micro_batch_size"].choices == (1, 2)
    assert sweep.text == GOOD
    assert sweep.spec.objective.direction == "minimize"
    assert sweep.spec.verify.rounds == 4
    assert sweep.spec.launch.isolation == "slot"


@pytest.mark.parametrize("name", ["laptop", "h200"])
def test_the_examples_are_good(name: str) -> None:
    sweep = load_sweep(EXAMPLES / f"{name}.yaml")
    assert sweep.spec.name == name


def test_the_laptop_example_is_the_one_promised() -> None:
    spec = load_sweep(EXAMPLES / "laptop.yaml").spec
    assert (spec.cluster.device, spec.cluster.workers, spec.cluster.workers_per_trial) == ("cpu", 2, 2)
    assert (spec.training.sequence_length, spec.training.global_batch_size) == (128, 8)
    assert (spec.training.warmup_steps, spec.training.measured_steps) == (2, 6)
    assert (spec.budget.trials, spec.verify.rounds, spec.seed) == (16, 4, 1)


def test_every_fault_is_listed_at_once_with_its_place_and_the_nearest_word(tmp_path: Path) -> None:
    text = """\
schema_version: 1
name: "../x"
model:
  preset: qwen3-30b-a3
cluser:
  device: cpu
cluster:
  device: cpu
  workers: 2
  workers_per_trial: 3
  workers_per_node: 2
training:
  sequence_length: 128
  global_batch_size: 16
  params_dtype: bf61
space:
  name: laptop
  choices:
    micro_batch_sise: [1]
    fp8_recipe: [delayed, tensorwize]
    micro_batch_size: []
    recompute_modules: [[core_attn]]
budget:
  trails: 3
  trial_time_limit_s: -1
seed: 1.5
objective: {metric: tokens_per_second}
"""
    found = faults(tmp_path, text)
    expected = [
        ("2:7", "name"),
        ("4:11", "did you mean qwen3-30b-a3b?"),
        ("5:1", "unknown key 'cluser' (did you mean cluster?)"),
        ("7:1", "workers_per_trial 3 exceeds workers 2"),
        ("15:17", "did you mean bf16?"),
        ("19:5", "did you mean micro_batch_size?"),
        ("20:27", "did you mean tensorwise?"),
        ("21:5", "micro_batch_size has no choices"),
        ("22:25", "is no choice of recompute_modules (did you mean core_attn?)"),
        ("24:3", "unknown key 'trails' (did you mean trials?)"),
        ("25:23", "greater than 0, not -1"),
        ("26:7", "valid integer, not 1.5"),
        ("27:21", "did you mean tokens_per_s?"),
    ]
    assert [fault.partition(": ")[0] for fault in found] == [place for place, _ in expected]
    for fault, (_, words) in zip(found, expected, strict=True):
        assert words in fault


def test_missing_facts_are_named(tmp_path: Path) -> None:
    found = faults(tmp_path, "schema_version: 1\ntraining: {sequence_length: 128}\n")
    text = "\n".join(found)
    for name in ("name", "model", "cluster", "space", "budget", "seed", "training.global_batch_size"):
        assert f"{name} is missing" in text
    assert any(fault.startswith("2:1: training.global_batch_size") for fault in found)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("workers: 2,", "workers: 3,", None),
        ("{preset: tiny-moe}", "{}", "3:1: model: give exactly one of preset, hf_config and facts"),
        ("{preset: tiny-moe}", "{preset: tiny-moe, hf_config: c.json}", "3:1: model: give exactly one"),
        ("{preset: tiny-moe}", "{facts: {name: x}}", "3:9: model.facts.num_layers is missing"),
        ("{preset: tiny-moe}", "{hf_config: none.json}", "none.json: cannot read it: no such file"),
        ("device: cpu", "device: cuda", '4:1: cluster.gpu_arch is missing, such as "H200 sm_90"'),
        ("device: cpu", "device: cuda, gpu_arch: H200", "names no compute capability"),
        ("device: cpu", "device: cpu, gpu_arch: H200 sm_90", "gpu_arch on a cpu cluster"),
        ("sequence_length: 128", "sequence_length: 2048", "tiny-moe has positions for 1024"),
        ("global_batch_size: 16", "global_batch_size: 3", "6:1: the default configuration cannot run here: global"),
        ("micro_batch_size: [1, 2]", "tensor_model_parallel_size: [4]", "2 ranks are not divisible by TP x PP x CP"),
        ("micro_batch_size: [1, 2]", "moe_token_dispatcher_type: [flex]", "[CPU-01]"),
        ("micro_batch_size: [1, 2]", "micro_batch_size: 1", "valid array, not 1"),
        ("micro_batch_size: [1, 2]", "micro_batch_size: [true]", "9:24: true is no choice of micro_batch_size"),
        ("name: laptop", "name: labtop", "7:9: no space 'labtop' (did you mean laptop?)"),
        ("name: laptop", "name: [laptop]", "space.name: input should be a valid string"),
        ("seed: 1", "seed: -1", "seed: input should be greater than or equal to 0, not -1"),
        ("seed: 1", "seed: 1\nseed: 2", "12:1: key 'seed' is given twice (first on line 11)"),
        ("seed: 1", "seed: one", "11:7: seed: input should be a valid integer, not 'one'"),
        ("seed: 1", "seed: '1'", "11:7: seed: input should be a valid integer, not '1'"),
        ("seed: 1", "seed: !!python/object/apply:os.getpid []", "tag python/object/apply:os.getpid is not allowed"),
        ("seed: 1", "seed: 1\nguard: {loss_relative_tolerance: .inf}", "'.inf' is not allowed here"),
        ("seed: 1", "seed: 1\nobjective: {metric: step_time_s, direction: maximize}", "is to minimize"),
        ("seed: 1", "seed: 1\nlaunch: {isolation: slots}", "(did you mean slot?)"),
        ("trials: 4", "trials: 0", "budget.trials: input should be greater than 0"),
        ("trials: 4", "trials: " + "9" * 5000, "is not allowed here"),
        ("budget: {", "bugdet: {", "unknown key 'bugdet' (did you mean budget?)"),
    ],
)
def test_one_fault(tmp_path: Path, old: str, new: str, expected: str | None) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if expected is None:
        assert load(tmp_path, text)
        return
    assert any(expected in fault for fault in faults(tmp_path, text))


def test_more_choices_than_a_search_can_judge(tmp_path: Path) -> None:
    text = GOOD.replace("[1, 2]", str(list(range(1, 66))))
    found = faults(tmp_path, text)
    assert found == ["9:5: micro_batch_size has 65 choices, more than 64 (narrow it to those worth a trial)"]


def test_the_first_choice_is_the_default_and_another_could_run(tmp_path: Path) -> None:
    found = faults(tmp_path, GOOD.replace("micro_batch_size: [1, 2]", "expert_model_parallel_size: [4, 2]"))
    assert len(found) == 1
    assert found[0].startswith("6:1: the default configuration cannot run here: ")
    assert "put 2 first under expert_model_parallel_size" in found[0]
    load(tmp_path, GOOD.replace("micro_batch_size: [1, 2]", "expert_model_parallel_size: [2, 4]"))
    alone = faults(tmp_path, GOOD.replace("micro_batch_size: [1, 2]", "expert_model_parallel_size: [4]"))
    assert "first under" not in alone[0]


def test_a_misspelt_key_is_not_also_missing(tmp_path: Path) -> None:
    assert len(faults(tmp_path, GOOD.replace("budget:", "bugdet:"))) == 1


def test_two_parts_are_checked_together_though_a_third_is_wrong(tmp_path: Path) -> None:
    text = GOOD.replace("seed: 1", "seed: x").replace("global_batch_size: 16", "global_batch_size: 3")
    assert ["PAR-23" in fault or "seed" in fault for fault in faults(tmp_path, text)] == [True, True]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"a: [", "1:5: not YAML"),
        (b"- 1\n- 2\n", "1:1: not a sweep file"),
        (b"just words", "1:1: not a sweep file"),
        (b"\x7fELF\x02\x01\x01\x00", "not YAML: a forbidden character"),
        (b"\xff\xfe\xfa", "1: not UTF-8 text"),
        (b"[" * 2_000, "nested too deeply"),
        (b"a: " + b"x" * 300_000, "larger than"),
        (b"a: &a [1]\nb: *c\n", "2:4: not YAML: found undefined alias"),
        (b"schema_version: 2\nnew_key: 1\n", "1:17: schema_version 2 is unknown; this version reads 1"),
        (b"schema_version: true\n", "schema_version True is unknown"),
        (b"schema_version: '1'\n", "schema_version '1' is unknown"),
        (b"a: 1\n---\nb: 2\n", "2:1: not YAML"),
    ],
)
def test_what_is_no_sweep_file_has_one_fault(tmp_path: Path, raw: bytes, expected: str) -> None:
    found = faults(tmp_path, raw)
    assert len(found) == 1
    assert expected in found[0]


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(InputError, match=words):
            load_sweep(path)


def test_aliases_cannot_blow_the_file_up(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert "more than 20000 values" in faults(tmp_path, f"l0: &l0 [x, x]\n{levels}")[0]
    assert any("contains itself" in fault for fault in faults(tmp_path, GOOD + "extra: &x [*x]\n"))


def test_aliases_and_numbers_of_yaml_are_read(tmp_path: Path) -> None:
    text = GOOD.replace("seed: 1", "seed: 0x10\nguard: {loss_relative_tolerance: 1e-2}")
    text = text.replace("workers: 2, workers_per_trial: 2", "workers: &n 2, workers_per_trial: *n")
    sweep = load(tmp_path, text)
    assert (sweep.spec.seed, sweep.spec.guard.loss_relative_tolerance) == (16, 0.01)
    assert sweep.spec.cluster.workers_per_trial == 2


def test_a_hugging_face_config_is_found_next_to_the_sweep_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    found = faults(tmp_path, GOOD.replace("{preset: tiny-moe}", "{hf_config: config.json}"))
    assert any(fault.startswith("3:20: config.json cannot be used") for fault in found)
    assert any("config.json: key 'num_hidden_layers' is missing" in fault for fault in found)


def test_the_digest_of_a_file_from_before_a_key_was_known_is_as_it_was(tmp_path: Path) -> None:
    """Else a run that was begun then could not be resumed."""
    assert load(tmp_path, GOOD).digest == "6277922cad93"
    assert load(tmp_path, GOOD.replace("tiny-moe", "gpt-oss-20b")).digest == "41a39b72391b"
    stops = GOOD.replace("params_dtype", "min_measured_steps: 3, target_relative_error: 0.01, params_dtype")
    assert load(tmp_path, stops).digest != "6277922cad93"
    warmed, constant = (
        GOOD.replace("params_dtype", f"learning_rate_warmup_steps: {steps}, params_dtype") for steps in (8, 0)
    )
    assert load(tmp_path, constant).digest == "6277922cad93"
    assert load(tmp_path, warmed).digest != "6277922cad93"
    assert load(tmp_path, GOOD + "guard: {low_precision_mean_loss_relative_tolerance: 0.03}\n").digest != "6277922cad93"
    assert load(tmp_path, GOOD + "verify: {finalists: 2}\n").digest == "6277922cad93"
    assert load(tmp_path, GOOD + "verify: {finalists: 3}\n").digest != "6277922cad93"
    stack = "stack: {megatron_core: 0.19.2, torch: 2.11.0}\n"
    assert load(tmp_path, GOOD + stack).digest == "a407945c9897"
    assert load(tmp_path, GOOD + stack.replace("}", ', apex: "0.1"}')).digest != "a407945c9897"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("target_relative_error: 0.01", "training: target_relative_error needs min_measured_steps: from which step on"),
        ("min_measured_steps: 3", "training: min_measured_steps needs target_relative_error: the precision at which"),
        (
            "min_measured_steps: 9, target_relative_error: 0.01",
            "training: min_measured_steps 9 exceeds the cap, measured_steps 8",
        ),
        ("min_measured_steps: 2, target_relative_error: 0.01", "min_measured_steps: input should be greater than or"),
        ("min_measured_steps: 3, target_relative_error: 1.5", "target_relative_error: input should be less than 1"),
    ],
)
def test_when_a_trial_stops_is_said_in_two_keys(tmp_path: Path, keys: str, fault: str) -> None:
    (found,) = faults(tmp_path, GOOD.replace("params_dtype", f"{keys}, params_dtype"))
    assert found.startswith("5:")
    assert fault in found


def test_the_digest_is_of_the_meaning(tmp_path: Path) -> None:
    digest = load(tmp_path, GOOD).digest
    facts = load_model("tiny-moe").model_dump_json()
    for old, new in (
        ("trials: 4", "trials: 400"),
        ("name: try", "name: other"),
        ("seed: 1", "seed: 1 # a comment\ntracking: {folder: elsewhere}\nlaunch: {isolation: job}"),
        ("{preset: tiny-moe}", f"{{facts: {facts}}}"),
        ("seed: 1", "seed: 1\nobjective: {metric: step_time_s}"),
    ):
        assert load(tmp_path, GOOD.replace(old, new)).digest == digest, new
    for old, new in (
        ("seed: 1", "seed: 2"),
        ("micro_batch_size: [1, 2]", "micro_batch_size: [1]"),
        ("sequence_length: 128", "sequence_length: 64"),
        ("workers: 2,", "workers: 4,"),
        ("seed: 1", "seed: 1\nobjective: {metric: peak_memory_bytes}"),
        ("seed: 1", "seed: 1\nguard: {loss_relative_tolerance: 0.5}"),
    ):
        assert load(tmp_path, GOOD.replace(old, new)).digest != digest, new


MUTATIONS = st.lists(
    st.tuples(st.integers(0, len(GOOD) - 1), st.sampled_from(list("{}[]:,&*!?|>'\"%@`\t\n\0 #-019ax\u2028\ufeff"))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=250, deadline=None)
@given(MUTATIONS)
def test_a_damaged_file_is_loaded_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, mutations: list[tuple[int, str]]
) -> None:
    text = list(GOOD)
    for position, character in mutations:
        text[position] = character
    file = tmp_path_factory.getbasetemp() / "damaged.yaml"
    file.write_text("".join(text), encoding="utf-8")
    with suppress(InputError):
        load_sweep(file)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_cleanly(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(raw)
    with pytest.raises(InputError):
        load_sweep(file)
