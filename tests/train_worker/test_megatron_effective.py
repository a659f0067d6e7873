"""What is read back, and what a difference means, on real config objects and on modules made up for the purpose."""

import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.named_spaces import ENVIRONMENT_KNOBS, NAMED_SPACES
from tests.train_worker.megatron_trials import MLA, SGD, case

KNOBS = sorted({knob.name for space in NAMED_SPACES.values() for knob in space.knobs if not knob.is_env})


@pytest.fixture(scope="module", autouse=True)
def _light_import() -> None:
    """Megatron without inductor, which saves seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compile", lambda model=None, **_: model if model is not None else (lambda f: f))
        import train_worker.megatron.trial  # noqa: F401


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_of_every_named_space_has_a_reader(name: str) -> None:
    from train_worker.megatron.config import refuse_unknown
    from train_worker.megatron.readers import readable

    assert readable(name)
    refuse_unknown(Candidate(knobs={name: None}))


def test_a_word_that_is_no_knob_has_none() -> None:
    from train_worker.megatron.readers import readable

    assert not readable("micro_batchsize")


def difference(**knobs: KnobValue) -> str | None:
    """What the diff of the config objects says of a request."""
    from train_worker.megatron.config import configs_of
    from train_worker.megatron.effective import config_mismatch

    job = case(2, **knobs).job
    rejected = config_mismatch(job.candidate, configs_of(job))
    return rejected.reason if rejected else None


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|tL"},
        {"recompute_granularity": "selective", "recompute_modules": "moe+core_attn"},
        {"recompute_granularity": "selective", "recompute_modules": None},
        {"moe_expert_capacity_factor": -1.0},
        {"overlap_grad_reduce": True, "bucket_size": None},
        {"micro_batch_size": 4, "manual_gc": True, "cpu_affinity": "exclusive"},
        {"moe_flex_dispatcher_backend": "hybridep"},
    ],
    ids=str,
)
def test_what_the_configuration_keeps_or_only_renames_is_no_difference(knobs: dict[str, KnobValue]) -> None:
    assert difference(**knobs) is None


def test_what_the_configuration_changes_is_told_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    real: Any = TransformerConfig.__post_init__

    def meddle(self: Any) -> None:
        real(self)
        self.bias_activation_fusion, self.moe_router_dtype = False, None

    monkeypatch.setattr(TransformerConfig, "__post_init__", meddle)
    assert difference(bias_activation_fusion=True, moe_router_dtype="fp64") == (
        "would measure something else: bias_activation_fusion: requested True, effective False; "
        "moe_router_dtype: requested 'fp64', effective None"
    )


def test_inherited_variables_are_recorded_and_those_searched_over_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from train_worker.megatron.effective import effective_environment, mismatch

    for name in ENVIRONMENT_KNOBS:
        monkeypatch.delenv(name, raising=False)
    name = "NVTE_USE_CUTLASS_GROUPED_GEMM"
    plain, switched = Candidate(knobs={}), Candidate(knobs={}, env={name: "1"})
    assert effective_environment(plain) == {}
    assert "requested '1', effective None" in str(mismatch(switched, effective_environment(switched)))
    monkeypatch.setenv(name, "1")
    found = effective_environment(plain)
    assert found == {name: "1"}
    assert mismatch(plain, found) is None
    refused = mismatch(plain, found, searched=(name,))
    assert refused is not None
    assert refused.reason == f"would measure something else: {name}: requested None, effective '1'"
    assert mismatch(switched, effective_environment(switched), searched=(name,)) is None


def test_a_variable_read_at_import_is_set_anew_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from train_worker.megatron.latches import CPU_OFFLOAD, OWNER, follow_environment, in_force

    module: Any = ModuleType(OWNER)
    module.NVTE_CPU_OFFLOAD_V1 = False
    monkeypatch.setitem(sys.modules, OWNER, module)
    monkeypatch.setenv(CPU_OFFLOAD, "1")
    assert in_force(CPU_OFFLOAD) is None
    follow_environment()
    assert module.NVTE_CPU_OFFLOAD_V1 is True
    assert in_force(CPU_OFFLOAD) == "1"
    monkeypatch.delenv(CPU_OFFLOAD)
    assert in_force(CPU_OFFLOAD) == "1"
    follow_environment()
    assert in_force(CPU_OFFLOAD) is None


def test_a_context_parallel_rank_adds_its_mean_to_the_gradient_once() -> None:
    """Megatron multiplies the loss of a function that returns two values by the context-parallel size."""
    import torch
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    from train_worker.megatron.config import configs_of
    from train_worker.megatron.step import _mean_loss

    config = configs_of(case(1).job).transformer
    per_token = torch.tensor([[1.0, 2.0, 3.0, 6.0]], requires_grad=True)
    for ranks in (1, 2):
        reported: list[Any] = []
        loss, _ = forward_step_calc_loss(
            torch.nn.Identity(), per_token, _mean_loss, config, None, False, 2, reported, ranks, True
        )
        assert loss.item() == pytest.approx(3.0 / 2)  # two micro-batches
        assert reported[0]["loss"].item() == pytest.approx(3.0)
        (gradient,) = torch.autograd.grad(loss, per_token)
        assert gradient.tolist() == [[0.125] * 4]


def test_two_projections_fused_into_one_matrix_start_as_the_two() -> None:
    import torch

    from train_worker.megatron.config import configs_of
    from train_worker.megatron.init import _full

    config = configs_of(case(1, SGD, MLA).job).transformer
    prefix, cpu = "decoder.layers.0.self_attention.", torch.device("cpu")
    apart = [
        _full(f"{prefix}linear_{which}_down_proj.weight", [rows, 64], config, 7, cpu)
        for which, rows in (("q", 32), ("kv", 40))
    ]
    fused = _full(f"{prefix}linear_qkv_down_proj.weight", [72, 64], config, 7, cpu)
    assert torch.equal(fused, torch.cat(apart))


def test_a_rank_holds_its_part_of_each_of_two_fused_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """FusedMLASelfAttention splits what a rank computed into its share of the queries and its share of the rest."""
    import torch

    from train_worker.megatron import init
    from train_worker.megatron.config import configs_of

    config = configs_of(case(1, SGD, MLA).job).transformer
    name = "decoder.layers.0.self_attention.linear_qkv_down_proj.weight"
    whole = init._full(name, [72, 64], config, 7, torch.device("cpu"))
    weight: Any = torch.nn.Parameter(torch.empty(36, 64))
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    held = []
    for rank in (0, 1):
        monkeypatch.setattr(init, "_tensor_parallel_place", lambda _, rank=rank: (2, rank))
        held.append(init._slice_of(name, weight, config, 7))
    assert torch.equal(torch.cat([part[:16] for part in held]), whole[:32])
    assert torch.equal(torch.cat([part[16:] for part in held]), whole[32:])


def test_a_field_of_latent_attention_only_reaches_its_configuration() -> None:
    from train_worker.megatron.config import configs_of
    from train_worker.megatron.effective import config_mismatch

    job = case(1, SGD, MLA, mla_down_proj_fusion=True).job
    configs = configs_of(job)
    assert getattr(configs.transformer, "mla_down_proj_fusion") is True  # noqa: B009  a field of MLATransformerConfig
    assert config_mismatch(job.candidate, configs) is None


@pytest.mark.parametrize(("asked", "moved"), [({}, 1.0), ({"optimizer_offload_fraction": 0.5}, 0.5)])
def test_all_of_the_optimizer_is_offloaded_unless_a_share_is_asked(asked: dict[str, KnobValue], moved: float) -> None:
    from train_worker.megatron.config import configs_of

    optimizer = configs_of(case(1, optimizer_cpu_offload=True, **asked).job).optimizer
    assert (optimizer.optimizer_cpu_offload, optimizer.optimizer_offload_fraction) == (True, moved)


def test_the_first_and_last_layers_are_not_asked_for_fp8() -> None:
    """They stay in bf16 as asked, so that a stage that holds only these says what its configuration says."""
    from train_worker.megatron.readers import READERS
    from train_worker.megatron.seen import Run

    class Asked:
        first_last_layers_bf16, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16 = True, 1, 1
        num_layers, fp8, fp8_recipe, fp4 = 4, "hybrid", "mxfp8", None

    class Ends(Run):
        @property
        def config(self) -> Any:
            return Asked

        def layers(self) -> list[Any]:
            return [SimpleNamespace(layer_number=number) for number in (1, 4)]

    run = Ends(built=None, micro_batch_sizes=(), planned=False, host={})  # type: ignore[arg-type]
    assert run.quantized_layers() == []
    assert [READERS[name](run) for name in ("fp8", "fp8_recipe", "fp4")] == ["hybrid", "mxfp8", None]


def test_types_of_optimizer_state_are_words_and_read_from_what_is_stored() -> None:
    import torch

    from train_worker.megatron.config import megatron_value
    from train_worker.megatron.readers import READERS
    from train_worker.megatron.seen import Run

    assert [megatron_value("exp_avg_dtype", word) for word in ("bf16", "torch.float32", "fp8")] == [
        torch.bfloat16, torch.float32, torch.uint8
    ]  # fmt: skip
    with pytest.raises(ValueError, match="exp_avg_dtype 'int4' is no type"):
        megatron_value("exp_avg_dtype", "int4")

    def run(*kept: torch.dtype) -> Any:
        states = {index: {"exp_avg": torch.zeros(1, dtype=dtype)} for index, dtype in enumerate(kept)}
        config = SimpleNamespace(exp_avg_dtype=torch.bfloat16)
        optimizer = SimpleNamespace(optimizer=SimpleNamespace(state=states), config=config)
        built: Any = SimpleNamespace(optimizer=optimizer)
        return Run(built, (), False, {})

    read = READERS["exp_avg_dtype"]
    assert read(run(torch.float32, torch.float32)) == "fp32"  # as on the host, whatever was asked for
    assert read(run(torch.bfloat16)) == "bf16"
    assert read(run(torch.bfloat16, torch.float32)) == "mixed moments: bf16, fp32"
    assert read(run()) == "bf16"  # a rank without state knows what its configuration says


def test_weights_kept_in_few_bits_start_main_weights_from_the_same_draw() -> None:
    """Transformer Engine keeps their first value in full; the optimizer makes its main weights of it."""
    import torch

    from train_worker.megatron.config import configs_of
    from train_worker.megatron.init import PRECISE, _draw, initialise_by_name

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 4))
            setattr(self.weight, PRECISE, torch.ones(4, 4, dtype=torch.bfloat16))

    config, model = configs_of(case(1).job).transformer, Bare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train_worker.megatron.init.global_name", lambda name, *_: name)
        initialise_by_name(model, config, 7)
    drawn = _draw("weight", [4, 4], config, 7, torch.device("cpu"))
    assert torch.equal(getattr(model.weight, PRECISE), drawn.bfloat16())


def test_counters_are_taken_away_after_the_step_they_watch() -> None:
    """Measured steps run Megatron's own functions, also where the watched step raised."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.models.common.language_module import language_module
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from train_worker.megatron.observe_calls import counting

    owners: list[Any] = [
        _ParamAndGradBucketGroup, language_module, TransformerLayerSchedulePlan, ChunkOffloadHandler,
        CheckpointWithoutOutput, moe_utils, SharedExpertMLP,
    ]  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]
    with suppress(RuntimeError), counting([]):
        assert vars(_ParamAndGradBucketGroup)["start_grad_sync"] is not before[0]["start_grad_sync"]
        raise RuntimeError("in the step")
    assert [dict(vars(owner)) for owner in owners] == before
