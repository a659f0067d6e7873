"""Megatron's own layer, dispatcher and graph helper as judges of what a CUDA graph can hold, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from packaging.version import Version

from search_spaces.rules import Case
from tests.search_spaces.oracle import REFUSALS, config_arguments, config_class, load_megatron, target

NO_GROUPS = SimpleNamespace(**dict.fromkeys(("ep", "expt_tp", "tp_ep", "tp", "pp", "cp", "dp_cp"), None))


def helper_refusal(case: Case) -> str | None:
    """Why TECudaGraphHelper, which every launcher makes before it captures, refuses; None past its first checks."""
    if case.text("cuda_graph_impl", "none") != "transformer_engine":
        return None
    engine = case.stack is None or case.stack.transformer_engine is not None
    with target(case), mock.patch.dict("os.environ", case.env):
        from megatron.core.transformer import cuda_graphs

        config = config_class(case)(**config_arguments(case))
        with mock.patch.object(cuda_graphs, "HAVE_TE_GRAPHS", engine):
            try:
                cuda_graphs.TECudaGraphHelper(None, config, 128, 1, pg_collection=NO_GROUPS)
            except AssertionError as error:
                return str(error)
            except (TypeError, AttributeError, RuntimeError, ValueError):
                return None  # it wants a model, past its checks
    return None


def preprocess_refusal(case: Case) -> str | None:
    """Why the real alltoall dispatcher refuses to count four tokens of each of two local experts, or None."""
    import torch

    stream = mock.patch("torch.cuda.Stream", SimpleNamespace)
    device = mock.patch("torch.cuda.current_device", return_value=torch.device("cpu"))
    with target(case), stream, device:
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        experts = case.model.num_moe_experts
        kept = MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
        try:
            config = config_class(case)(**config_arguments(case))
            dispatcher = MoEAlltoAllTokenDispatcher(experts, list(range(experts)), config, NO_GROUPS)
            dispatcher.preprocess(torch.ones(4, experts, dtype=torch.bool))
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
        finally:
            MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = kept
    return None


@cache
def _own_norms(latent_attention: bool, fused_down: bool) -> tuple[bool, bool]:
    """Whether the real spec of Transformer Engine's layers has a norm of its own (before attention, before experts)."""
    load_megatron("megatron.core.models.gpt.gpt_layer_specs")
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.identity_op import IdentityOp

    pretended = {"TESpecProvider": mock.MagicMock(), "get_mlp_module_spec_for_backend": mock.MagicMock()}
    with mock.patch.multiple(specs, **pretended):
        spec = specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=8, moe_grouped_gemm=True, multi_latent_attention=latent_attention,
            mla_down_proj_fusion=fused_down,
        )  # fmt: skip
    parts = spec.submodules
    return parts.input_layernorm is not IdentityOp, parts.pre_mlp_layernorm is not IdentityOp


@contextmanager
def _layer(case: Case) -> Iterator[Any]:
    """A real TransformerLayer of experts, with the norms of its own that Transformer Engine's spec gives it."""
    import torch

    own = _own_norms(case.model.multi_latent_attention, case.on("mla_down_proj_fusion"))
    torch_version = "2.11.0" if case.stack is None else case.stack.torch
    with target(case), mock.patch("megatron.core.utils.get_torch_version", return_value=Version(torch_version)):
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

        class Experts(MoELayer):
            def __init__(self, **_: object) -> None:
                torch.nn.Module.__init__(self)

            def set_layer_number(self, layer_number: int) -> None: ...

            def set_for_recompute_pre_mlp_layernorm(self) -> None: ...

        class Attention(torch.nn.Identity):
            def set_for_recompute_input_layernorm(self) -> None: ...

        def norm(**_: object) -> torch.nn.Module:
            return torch.nn.Identity()

        config = config_class(case)(**config_arguments(case))
        before, after = (norm if has else IdentityOp for has in own)
        submodules = TransformerLayerSubmodules(
            input_layernorm=before, self_attention=Attention, pre_mlp_layernorm=after, mlp=Experts
        )
        with mock.patch.object(TransformerLayer, "create_mcore_cudagraph_manager"):  # local graphs: it wants a GPU
            layer = TransformerLayer(config, submodules, pg_collection=NO_GROUPS, add_layer_offset=False)
        yield layer


def layer_refusal(case: Case) -> str | None:
    """Why the real layer is not built, or None."""
    try:
        with _layer(case):
            return None
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"


def dropped_norm(case: Case) -> str | None:
    """Whether the real layer recomputes a norm, as asked."""
    with _layer(case) as layer:
        kept = layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm
        return None if kept else "the layer recomputes none of its norms"


def dropped_norm_offload(case: Case) -> str | None:
    """Whether the real layer offloads its norm, as asked."""
    with _layer(case) as layer:
        return None if layer.offload_mlp_norm else "the layer does not offload its norm"


def nothing_graphable(case: Case) -> str | None:
    """Whether the real helper would capture a layer of a transformer."""
    with _layer(case) as layer:
        from megatron.core.transformer.cuda_graphs import _layer_is_graphable

        return None if _layer_is_graphable(layer, layer.config) else "No graphable layers found."
