"""The Protocol of every place that remembers a sweep. One contract suite (tests/contracts) runs on each."""

from typing import Protocol

from tracking.record import Event


class Store(Protocol):
    """Takes events in order. `put` of an event already there is a no-op, so a store can be filled again."""

    def put(self, event: Event) -> None:
        """Remember one event. Raises ResourceMissing where it cannot be kept."""

    def close(self) -> None:
        """Write out what is pending and let go of files and connections."""
