"""`moetune fingerprint`: the software stack and hardware as a worker sees them, not as the controller does."""

from typing import Literal

from search_spaces.errors import ResourceMissing
from search_spaces.shapes import ClusterShape, Noun
from train_worker.environment import fingerprint
from train_worker.outcome import Fingerprint


class FingerprintResult(Noun):
    """`digest` is what records are compared by."""

    digest: str
    fingerprint: Fingerprint


def fingerprint_of(device: Literal["cpu", "cuda"], address: str | None) -> FingerprintResult:
    """Of this machine, or of one worker of the Ray cluster at `address`. Raises ResourceMissing (exit 4)."""
    try:
        found = fingerprint(device) if address is None else _on_a_worker(device, address)
    except (RuntimeError, AssertionError) as error:  # torch's words for a missing GPU or driver
        raise ResourceMissing(
            f"no fingerprint of a {device} worker: {error}", "run it where the GPUs are, or give --address"
        ) from error
    return FingerprintResult(digest=found.digest, fingerprint=found)


def _on_a_worker(device: Literal["cpu", "cuda"], address: str) -> Fingerprint:
    from tuner.launch.cluster import joined
    from tuner.launch.remote import ask_fingerprint

    with joined(address, ClusterShape(device=device, workers=1, workers_per_trial=1, workers_per_node=1)):
        return ask_fingerprint(device)
