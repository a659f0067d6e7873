"""Ways in which a request is silently not carried out: each switches one feature of Megatron off, and trains on.

Entered around a trial by `gang_script`; everything Megatron's own validation and the read-back can see stays as asked.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Replace = Callable[[Any, str, Any], None]


@contextmanager
def trapped(name: str) -> Iterator[None]:
    """Inside, the named feature does not run."""
    with ExitStack() as undo:

        def replace(owner: Any, attribute: str, value: Any) -> None:
            undo.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, value)

        if name:
            TRAPS[name](replace)
        yield


def _nothing_checkpointed(replace: Replace) -> None:
    from megatron.core import tensor_parallel

    replace(tensor_parallel, "checkpoint", lambda function, _, *arguments: function(*arguments))


def _nothing_discarded(replace: Replace) -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    replace(CheckpointWithoutOutput, "checkpoint", lambda _, function, *arguments: function(*arguments))
    replace(CheckpointWithoutOutput, "discard_output_and_register_recompute", lambda *_: None)


def _reductions_at_the_end(replace: Replace) -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    real: Any = _ParamAndGradBucketGroup.reset

    def reset(self: Any) -> None:
        real(self)
        self.is_first_batch = True

    replace(_ParamAndGradBucketGroup, "reset", reset)


def _gathers_waited_for(replace: Replace) -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    real: Any = _ParamAndGradBucketGroup.start_param_sync
    replace(_ParamAndGradBucketGroup, "start_param_sync", lambda self, **_: real(self, force_sync=True))


def _plans_one_by_one(replace: Replace) -> None:
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan

    real: Any = TransformerModelChunkSchedulePlan.run

    def run(forward: Any, backward: Any, b_grad: Any = None, **hooks: Any) -> Any:
        if forward is None or backward is None:
            return real(forward, backward, b_grad=b_grad, **hooks)
        ahead = real(forward, None, pre_forward=hooks["pre_forward"], post_forward=hooks["post_forward"])
        real(None, backward, b_grad, pre_backward=hooks["pre_backward"], post_backward=hooks["post_backward"])
        return ahead

    replace(TransformerModelChunkSchedulePlan, "run", staticmethod(run))


def _shared_experts_unknown(replace: Replace) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    replace(MoEAlltoAllTokenDispatcher, "set_shared_experts", lambda *_: None)


def _dispatcher_left_out(replace: Replace) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    replace(MoELayer, "dispatch", lambda _, hidden, probs: (hidden, probs))


def _off(owner: Any, method: str, flag: str) -> Any:
    """The method with a flag of its configuration off while it runs."""
    real = vars(owner)[method]

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        asked = getattr(self.config, flag)
        setattr(self.config, flag, False)
        try:
            return real(self, *arguments, **named)
        finally:
            setattr(self.config, flag, asked)

    return call


def _activation_unfused(replace: Replace) -> None:
    from megatron.core.transformer.mlp import MLP

    replace(MLP, "forward", _off(MLP, "forward", "bias_activation_fusion"))


def _loss_unfused(replace: Replace) -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    name = "compute_language_model_loss"
    replace(LanguageModule, name, _off(LanguageModule, name, "cross_entropy_loss_fusion"))


def _all_steps_are_slow(replace: Replace) -> None:
    """No trap: a slow step is profiled in part, and these are small."""
    from train_worker.megatron import profiler

    replace(profiler, "PROFILED_S", 1e-6)


TRAPS: dict[str, Callable[[Replace], None]] = {
    "nothing checkpointed": _nothing_checkpointed,
    "nothing discarded": _nothing_discarded,
    "reductions at the end": _reductions_at_the_end,
    "gathers waited for": _gathers_waited_for,
    "plans one by one": _plans_one_by_one,
    "shared experts unknown": _shared_experts_unknown,
    "dispatcher left out": _dispatcher_left_out,
    "activation unfused": _activation_unfused,
    "loss unfused": _loss_unfused,
    "all steps are slow": _all_steps_are_slow,
}
