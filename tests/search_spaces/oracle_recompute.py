"""The real layer of multi-token prediction as judge of recompute, on a CPU."""

from types import SimpleNamespace
from unittest import mock

from search_spaces.rules import Case
from tests.search_spaces.oracle import config_arguments, config_class, target


def prediction_refusal(case: Case) -> str | None:
    """Why the real MultiTokenPredictionLayer refuses to recompute, or None; what it then computes is left out."""
    with target(case):
        from megatron.core.transformer import multi_token_prediction as real

        layer = SimpleNamespace(config=config_class(case)(**config_arguments(case)))
        with mock.patch.object(real.tensor_parallel, "checkpoint", return_value=None):
            try:
                real.MultiTokenPredictionLayer._checkpointed_forward(layer, None, None)
            except AssertionError as error:
                return str(error)
    return None
