"""What a trial has built and run, as the readers look at it, and how many values become one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from search_spaces.candidate import KnobValue
from train_worker.megatron.model import Built


@dataclass(frozen=True)
class Run:
    """What was built, and how it ran: the micro-batches of the last step, whether its schedule asked for plans of two
    micro-batches (`planned`), what the process itself was set to (`train_worker.host`), and whether the graphs that
    this stage has layers for were captured and `replayed`."""

    built: Built
    micro_batch_sizes: tuple[int, ...]
    planned: bool
    host: dict[str, KnobValue]
    replayed: bool = False

    @property
    def config(self) -> Any:
        """The TransformerConfig that the model holds, as Megatron left it."""
        return self.built.models[0].config

    def layers(self) -> list[TransformerLayer]:
        inside = (module for model in self.built.models for module in model.modules())
        return [module for module in inside if isinstance(module, TransformerLayer)]

    def moe_layers(self) -> list[MoELayer]:
        return [layer.mlp for layer in self.layers() if isinstance(layer.mlp, MoELayer)]

    def quantized_layers(self) -> list[TransformerLayer]:
        """Those that the configuration does not keep in bf16 (first_last_layers_bf16)."""
        return [layer for layer in self.layers() if not is_first_last_bf16_layer(self.config, layer.layer_number - 1)]


def all_equal(values: Iterable[Any], what: str) -> Any:
    """The one value that all layers of this rank share; a mixture is written out, so that it equals no request."""
    distinct = sorted(set(values), key=str)
    if not distinct:
        return None
    return distinct[0] if len(distinct) == 1 else f"mixed {what}: {', '.join(map(str, distinct))}"


def from_layers(
    field: str,
    what: str,
    layers: Callable[[Run], Iterable[Any]],
    values: Callable[[Any], Iterable[Any]],
) -> Callable[[Run], Any]:
    """A reader: the one value of all `layers` of this rank. A stage without any can only tell what its config says."""

    def read(run: Run) -> Any:
        found = list(layers(run))
        if not found:
            return getattr(run.config, field)
        return all_equal((value for layer in found for value in values(layer)), what)

    return read


def word(table: dict[type, Any], found: Any) -> Any:
    """The word for the class of `found`; the name of a class that is not in the table, which equals no request."""
    return table.get(type(found), type(found).__name__)
