"""Models and training jobs of which only some facts are known: what an explicit configuration (`check`) can say.

Reading an absent fact raises UnknownFact; a rule that wanted it keeps silent (`rules.rule.Rule.refusal`).
"""

from collections.abc import Mapping
from typing import Any, Self, cast

from search_spaces.shapes import ModelShape, Noun, TrainingShape


class UnknownFact(LookupError):
    """A fact of the model or of the training job that was not given. `args[0]` is its name."""


class _Partial(Noun):
    """Fields with a default keep it; the others may be absent."""

    def __getattr__(self, name: str) -> Any:  # asked only for what is not there
        if name in type(self).model_fields:
            raise UnknownFact(name)
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic defines it, outside type checking

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """From facts that were validated one by one."""
        return cast(Self, cls.model_construct(_fields_set=set(facts), **facts))


class PartialModel(_Partial, ModelShape):
    """`dense`: no experts, which is Megatron's default where a configuration does not give their number."""

    dense: bool = False


class PartialTraining(_Partial, TrainingShape):
    """Sequence length and batch sizes are often not said."""
