"""Small questions to one worker of a cluster."""

from typing import Literal

import ray

from train_worker.entry import describe
from train_worker.outcome import Fingerprint


def ask_fingerprint(device: Literal["cpu", "cuda"]) -> Fingerprint:
    """One worker's fingerprint, asked by a Ray task that takes one device."""
    ask = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(describe)
    return Fingerprint.model_validate_json(ray.get(ask.remote(device)))
