"""`moetune fingerprint`: the software stack and hardware as a worker sees them, not as the controller does."""

from importlib.metadata import PackageNotFoundError
from typing import Literal

from search_spaces.errors import ResourceMissing
from search_spaces.shapes import ClusterShape, Noun
from train_worker.environment import fingerprint_apart
from train_worker.outcome import Fingerprint


class FingerprintResult(Noun):
    """`digest` is what records are compared by."""

    digest: str
    fingerprint: Fingerprint


def fingerprint_of(device: Literal["cpu", "cuda"], address: str | None) -> FingerprintResult:
    """Of this machine, or of one worker of the Ray cluster at `address`. Raises ResourceMissing (exit 4)."""
    found = seen_on_a_worker(ClusterShape(device=device, workers=1, workers_per_trial=1, workers_per_node=1), address)
    return FingerprintResult(digest=found.digest, fingerprint=found)


def seen_on_a_worker(cluster: ClusterShape, address: str | None) -> Fingerprint:
    """Of this machine, where `address` is None and the workers will be here; else of one worker of that Ray cluster,
    which must be large enough for `cluster`. Raises ResourceMissing (exit 4)."""
    if address is not None:
        return _on_a_worker(cluster, address)
    try:
        return fingerprint_apart(cluster.device)
    except (RuntimeError, PackageNotFoundError) as error:  # torch's words for a missing GPU or driver
        raise ResourceMissing(
            f"no fingerprint of a {cluster.device} worker: {error}", "run it where the GPUs are, or give --address"
        ) from error


def _on_a_worker(cluster: ClusterShape, address: str) -> Fingerprint:
    from tuner.launch.cluster import joined

    with joined(address, cluster):
        from tuner.launch.remote import ask_fingerprint  # only now: it imports ray, and a wrong address is said at once

        return ask_fingerprint(cluster.device)
