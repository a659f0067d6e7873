"""The real configuration, experts and router as judges of fusion rules, on a CPU.

Where a check asks for a part of Transformer Engine, stand-ins are injected for what the target's version exports, as
the messages of megatron-core state it: the decision is Megatron's, the presence of a name is ours.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from search_spaces.rules import Case
from search_spaces.rules.versions import older
from tests.search_spaces.oracle import ENGINE, REFUSALS, config_arguments, config_class, target

PERMUTATIONS = (
    "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)  # fmt: skip
ROTARY = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")


def _has(case: Case, least: str) -> bool:
    engine = ENGINE if case.stack is None else case.stack.transformer_engine
    return engine is not None and not older(engine, least)


def _config(case: Case) -> Any:
    """The real configuration, with functions for the names of activations."""
    import torch
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    plain = torch.nn.functional
    functions = {
        "silu": plain.silu, "gelu": plain.gelu, "relu": plain.relu, "quick_gelu": quick_gelu,
        "squared_relu": squared_relu,
    }  # fmt: skip
    arguments = config_arguments(case) | {"perform_initialization": False}
    if isinstance(name := arguments["activation_func"], str):
        arguments["activation_func"] = functions[name]
    return config_class(case)(**arguments)


def config_refusal(case: Case) -> str | None:
    """Why the real configuration refuses, or None."""
    with target(case), ExitStack() as stack:
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.transformer.moe import moe_utils

        exported: list[tuple[Any, tuple[str, ...], str]] = [
            (moe_utils, PERMUTATIONS, "2.1.0"), (rope_utils, ROTARY, "1.4.0"),
        ]  # fmt: skip
        for owner, names, since in exported:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, print if _has(case, since) else None))
        try:
            _config(case)
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


class _Linear:
    """Stands in for te.pytorch.GroupedLinear and te.pytorch.Linear."""

    use_bias = False

    def __init__(self, *_: object, **__: object) -> None:
        pass


def _engine(case: Case) -> ModuleType:
    """What the experts' constructors ask of `transformer_engine`."""
    ops, pytorch, top = (ModuleType(f"transformer_engine{tail}") for tail in (".pytorch.ops", ".pytorch", ""))
    if _has(case, "2.14.0"):
        for name in ("GroupedLinear", "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU"):
            setattr(ops, name, _Linear)
    for name, value in {"GroupedLinear": _Linear, "Linear": _Linear, "ops": ops}.items():
        setattr(pytorch, name, value)
    top.__dict__.update(pytorch=pytorch)
    return top


@contextmanager
def _engine_installed(case: Case) -> Iterator[None]:
    """Transformer Engine for `experts` and `shared_experts`, and the case's environment."""
    with target(case), ExitStack() as stack:
        from megatron.core.transformer.moe import experts, shared_experts

        te = _engine(case)
        named = {"transformer_engine": te, "transformer_engine.pytorch": te.pytorch}
        stack.enter_context(mock.patch.dict(sys.modules, named | {"transformer_engine.pytorch.ops": te.pytorch.ops}))
        stack.enter_context(mock.patch.dict("os.environ", case.env))
        for owner in (experts, shared_experts):
            stack.enter_context(mock.patch.object(owner, "te", te, create=True))
            stack.enter_context(mock.patch.object(owner, "HAVE_TE", _has(case, "0.1")))
        for name in ("Fp8Padding", "Fp8Unpadding"):
            stack.enter_context(mock.patch.object(experts, name, mock.Mock()))
        yield


def _experts(case: Case) -> Any:
    """The real TEGroupedMLP of the case."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    groups = SimpleNamespace(ep=None, expt_tp=SimpleNamespace(size=lambda: case.layout.expert_tensor))
    return TEGroupedMLP(2, _config(case), GroupedMLPSubmodules(_Linear, _Linear), groups)  # type: ignore[arg-type]


def experts_refusal(case: Case) -> str | None:
    """Why the real grouped experts refuse to be built, or None."""
    with _engine_installed(case):
        try:
            _experts(case)
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def output_layer_refusal(case: Case) -> str | None:
    """Why the real output layer refuses to be built, or None."""
    with target(case):
        from megatron.core.tensor_parallel import layers

        there = case.stack is None or case.stack.apex is not None
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        with mock.patch.object(layers, "_grad_accum_fusion_available", there):
            try:
                layers.ColumnParallelLinear(
                    8, 16, config=_config(case), init_method=lambda weight: weight, bias=False,
                    skip_weight_param_allocation=True, tp_group=group,
                )  # type: ignore[arg-type]  # fmt: skip
            except REFUSALS as error:
                return f"{type(error).__name__}: {error}"
    return None


def slow_experts(case: Case) -> str | None:
    """What the real grouped experts warn of while they are built, or None."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.transformer.moe.experts")
    with _engine_installed(case):
        logger.addHandler(handler)
        try:
            _experts(case)
        finally:
            logger.removeHandler(handler)
    return heard[0] if heard else None


def expert_forward_refusal(case: Case) -> str | None:
    """Why the experts that need no Transformer Engine refuse their first forward, or None."""
    import torch

    with target(case):
        from megatron.core.transformer.moe.experts import SequentialMLP

        expert = SimpleNamespace(
            config=_config(case), num_local_experts=1,
            local_experts=[lambda tokens, _: (tokens, None)],
            ep_group=None, tp_group=None,
        )  # fmt: skip
        try:
            SequentialMLP.forward(expert, torch.ones(2, 4), torch.tensor([2]), torch.ones(2))  # type: ignore[arg-type]
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def router_refusal(case: Case) -> str | None:
    """Why the real fused routing refuses its first step, or None."""
    import torch

    with target(case), ExitStack() as stack:
        from megatron.core.transformer.moe import moe_utils

        since = {
            "fused_topk_with_score_function": "2.6.0", "fused_compute_score_for_moe_aux_loss": "2.6.0",
            "fused_moe_aux_loss": "2.7.0",
        }  # fmt: skip
        for name, least in since.items():
            stand_in = (lambda **_: (0, 0)) if _has(case, least) else None
            stack.enter_context(mock.patch.object(moe_utils, name, stand_in))
        stack.enter_context(mock.patch.object(moe_utils, "HAVE_TE", _has(case, "0.1")))
        config, logits = _config(case), torch.ones(4, case.model.num_moe_experts)
        fused, score = config.moe_router_fusion, config.moe_router_score_function
        try:
            moe_utils.topk_routing_with_score_function(logits, 2, score_function=score, fused=fused)
            if config.moe_aux_loss_coeff:
                moe_utils.switch_load_balancing_loss_func(logits, logits, 4, 2, 8, config.moe_aux_loss_coeff, fused)
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def shared_expert_refusal(case: Case) -> str | None:
    """Why the real fused shared expert refuses, when built or when it chooses its recipe, or None."""
    with _engine_installed(case):
        from megatron.core.transformer.moe.shared_experts import FusedSharedExpertMLP, te

        te.common = mock.Mock()
        expert = FusedSharedExpertMLP.__new__(FusedSharedExpertMLP)
        expert.__dict__.update(
            config=_config(case), linear_fc1=_Linear(), linear_fc2=_Linear(), _fused_grouped_swiglu_recipe=None
        )
        try:
            expert._validate_fused_grouped_swiglu()
            expert._get_fused_grouped_swiglu_recipe()
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return None


def one_by_one(case: Case) -> str | None:
    """The experts that the real backend builds, where they are not those asked for."""
    with target(case):
        from megatron.core.models.backends import get_backend
        from megatron.core.transformer.moe.experts import SequentialMLP

        asked = case.on("moe_grouped_gemm")
        chosen = "local" if case.on_cpu else case.text("transformer_impl")
        built = get_backend(chosen).grouped_mlp_modules(asked).func  # type: ignore[arg-type]
    return "grouped GEMM asked for, SequentialMLP built" if asked and built is SequentialMLP else None
