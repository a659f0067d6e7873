"""Small questions to one worker of a cluster."""

from typing import Literal

import ray
from ray.exceptions import GetTimeoutError, RayError

from search_spaces.errors import ResourceMissing
from train_worker.entry import describe
from train_worker.outcome import Fingerprint

ANSWER_LIMIT_S = 180.0  # a cold worker imports torch, and what it probes, first


def ask_fingerprint(device: Literal["cpu", "cuda"]) -> Fingerprint:
    """One worker's fingerprint, asked by a Ray task that takes one device. Raises ResourceMissing (exit 4)."""
    ask = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0, max_calls=1)(describe)  # frees the GPU after
    try:
        return Fingerprint.model_validate_json(ray.get(ask.remote(device), timeout=ANSWER_LIMIT_S))
    except RayError as error:
        what = (
            "no worker answered in time" if isinstance(error, GetTimeoutError) else str(error).strip().splitlines()[-1]
        )
        raise ResourceMissing(
            f"no fingerprint of a {device} worker: {what}",
            "see with `ray status` that a worker is free, and that megatron-core and torch are installed there",
        ) from error
