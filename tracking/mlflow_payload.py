"""Events in MLflow's words: names, params, metrics, tags and texts. Pure, and imports no mlflow.

Everything here is a function of the event alone (timestamps too), so that writing it again changes nothing.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median

from search_spaces.candidate import Candidate
from tracking.reason import failure_text
from tracking.record import Compared, Event, Proposed, Screened, SweepStarted, TrialRecord
from train_worker.outcome import Diverged, Measured, Outcome, OutOfMemory, PhaseTimes, Rejected

EXPERIMENT = "moetune"  # where a sweep goes whose file names no tracking.experiment
UID = "moetune.uid"
COMPLETE = "moetune.complete"
PARENT = "mlflow.parentRunId"
TEXT_LIMIT = 5000  # characters; MLflow takes 6000 in a param and 8000 in a tag


@dataclass(frozen=True)
class Point:
    """One value of a metric; `at_ms` is milliseconds since 1970, UTC."""

    key: str
    value: float
    at_ms: int
    step: int = 0


@dataclass(frozen=True)
class Payload:
    """What one event adds to a run. `texts` are artifacts by file name."""

    params: dict[str, str] = field(default_factory=dict)
    metrics: tuple[Point, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def parent_uid(head: SweepStarted) -> str:
    """16 hex digits, from the first head of a journal: another run of the same name has another start time.

    Without the fields that a head got later: the runs that are in MLflow already must be found again.
    """
    return hashlib.sha256(head.model_dump_json(exclude={"finalists"}).encode()).hexdigest()[:16]


def child_uid(parent: str, number: int) -> str:
    return f"{parent}-{number:04}"


def parent_name(head: SweepStarted) -> str:
    return f"{head.sweep_name}/{head.run_name}"


def child_name(head: SweepStarted, number: int, candidate: Candidate) -> str:
    """Such as "laptop/001/0007-0123456789ab": trial number and candidate id."""
    return f"{parent_name(head)}/{number:04}-{candidate.id}"


def mark(name: str) -> str:
    """The tag that says that one thing of the parent run is written."""
    return f"{COMPLETE}.{_key(name)}"


def milliseconds(at: str) -> int:
    """ISO 8601 to milliseconds since 1970."""
    return int(datetime.fromisoformat(at).timestamp() * 1000)


def time_of(event: Event) -> int | None:
    """When it happened, in milliseconds since 1970; None for events without a time."""
    match event:
        case SweepStarted():
            return milliseconds(event.started_at)
        case Proposed():
            return milliseconds(event.at)
        case TrialRecord():
            return milliseconds(event.ended_at)
        case _:
            return None


def of_head(head: SweepStarted) -> Payload:
    tags = {"sweep": head.sweep_name, "run": head.run_name, "sweep_digest": head.sweep_digest}
    return Payload(
        params={"seed": str(head.seed)},
        tags=tags | {"space_digest": head.space_digest},
        texts={"sweep.yaml": head.sweep_text},
    )


def of_screened(screened: Screened, at_ms: int) -> Payload:
    """Counts as metrics, and a table of the rules that refused something."""
    rows = [[rule.rule, rule.count, rule.reason, rule.example.model_dump_json()] for rule in screened.rejected]
    table = {"columns": ["rule", "count", "reason", "example"], "data": rows}
    counts = {"space.total": screened.total, "space.accepted": screened.accepted}
    counts |= {f"space.rejected.{_key(rule.rule)}": rule.count for rule in screened.rejected}
    return Payload(metrics=_points(counts, at_ms), texts={"screening.json": json.dumps(table, indent=1)})


def of_proposed(event: Proposed | TrialRecord, default: Candidate | None) -> Payload:
    """What was asked for. `default` is the baseline's candidate, against which a label is worded."""
    params = {f"req.{_key(name)}": _text(value) for name, value in event.candidate.knobs.items()}
    params |= {f"env.{_key(name)}": _text(value) for name, value in event.candidate.env.items()}
    tags = {"purpose": event.purpose, "candidate": event.candidate.id, "trial": event.trial_id}
    if default is not None:
        params["label"] = _text(event.candidate.label(default))
    return Payload(params=params, tags=tags)


def of_record(record: TrialRecord) -> Payload:
    """What happened: a metric a step, a summary, the reason of a failure. Never NaN or infinity (MLflow plots them)."""
    outcome, at_ms = record.outcome, milliseconds(record.ended_at)
    tags, texts = {"outcome": outcome.kind} | _reason_tags(outcome), {}
    numbers: dict[str, float] = {"wall_s": record.wall_s, "attempts": record.attempts}
    params: dict[str, str] = {}
    series: tuple[Point, ...] = ()
    if isinstance(outcome, Measured):
        params = {f"eff.{_key(name)}": _text(value) for name, value in outcome.effective.items()}
        tags["fingerprint"] = outcome.fingerprint.digest
        texts["fingerprint.json"] = outcome.fingerprint.model_dump_json(indent=1)
        numbers |= _summary(outcome) | _throughput(outcome) | _timing(outcome) | _profile(outcome)
        if outcome.profile is not None:
            tags["wall"] = outcome.profile.wall
            texts["profile.json"] = outcome.profile.model_dump_json(indent=1)
        if outcome.work is not None:
            tags["routing"] = outcome.work.routing
        series = _series(outcome, milliseconds(record.started_at))
    else:
        texts["error.txt"] = failure_text(outcome)
    if isinstance(outcome, OutOfMemory) and outcome.peak_memory_bytes is not None:
        numbers["peak_memory_bytes"] = outcome.peak_memory_bytes
    if isinstance(outcome, Diverged):
        start = milliseconds(record.started_at)
        losses = [(step, loss) for step, loss in enumerate(outcome.losses) if loss is not None]
        series = tuple(Point("loss", loss, start + step, step) for step, loss in losses)
    return Payload(params=params, metrics=_finite(series) + _points(numbers, at_ms), tags=tags, texts=texts)


def of_compared(compared: Compared, at_ms: int) -> Payload:
    numbers = {"ratio": compared.ratio, "ratio_low": compared.ratio_low, "ratio_high": compared.ratio_high}
    tags = {"verdict": compared.verdict, "finalist": compared.finalist_id, "default": compared.default_id}
    if compared.routing is not None:
        tags["compared_routing"] = compared.routing
    for place, each in enumerate(compared.runners_up, start=2):
        tags[f"finalist_{place}"] = each.finalist_id
        for other, found in (("default", each.against_default), ("finalist", each.against_named)):
            tags[f"verdict_{place}_against_{other}"] = found.verdict
            sizes = {"ratio": found.ratio, "ratio_low": found.ratio_low, "ratio_high": found.ratio_high}
            numbers |= {f"finalist_{place}.against_{other}.{key}": value for key, value in sizes.items()}
    text = compared.model_dump_json(indent=1)
    named = {f"compare.{key}": value for key, value in numbers.items()}
    return Payload(metrics=_points(named, at_ms), tags=tags, texts={f"compared-{compared.finalist_id}.json": text})


def _reason_tags(outcome: Outcome) -> dict[str, str]:
    if isinstance(outcome, Measured):
        return {}
    tags = {"reason": _text(failure_text(outcome).partition("\n")[0])}
    return tags | ({"rule": outcome.rule} if isinstance(outcome, Rejected) else {})


def _summary(outcome: Measured) -> dict[str, float]:
    phases = {f"phase.{name}": getattr(outcome.phases, name) for name in PhaseTimes.model_fields}
    found = {"fixed_cost_s": outcome.phases.fixed_s, **phases}
    found |= {"peak_memory_bytes": outcome.peak_memory_bytes, "parameter_count": outcome.parameter_count}
    if outcome.steps:
        found["median_step_time_s"] = median([sample.step_time_s for sample in outcome.steps])
        found["median_tokens_per_s"] = median([sample.tokens_per_s for sample in outcome.steps])
    return found


def _throughput(outcome: Measured) -> dict[str, float]:
    """Of one rank: one GPU, where ranks have GPUs."""
    if outcome.work is None or not outcome.steps:
        return {}
    seconds = median([sample.step_time_s for sample in outcome.steps])
    return {
        "tokens_per_s_per_gpu": outcome.work.tokens_per_s_per_rank(seconds),
        "model_tflops_per_gpu": outcome.work.tflops_per_rank(seconds),
    }


def _timing(outcome: Measured) -> dict[str, float]:
    """How well the step time is known, and the median time between CUDA events."""
    gpu = [sample.gpu_time_s for sample in outcome.steps if sample.gpu_time_s is not None]
    found = {"median_gpu_time_s": median(gpu)} if gpu else {}
    if outcome.timing is None:
        return found
    timing = outcome.timing
    found |= {"timing.steps": timing.count, "timing.outliers": len(timing.outliers)}
    found |= {"timing.drift_per_step": timing.drift_per_step, "timing.mad_s": timing.mad_s}
    error = timing.relative_standard_error
    return found if error is None else found | {"timing.relative_standard_error": error}


def _profile(outcome: Measured) -> dict[str, float]:
    """Where the profiled step's time went; of a CPU under the same names."""
    profile = outcome.profile
    if profile is None:
        return {}
    parts = ("gpu_busy_s", "exposed_communication_s", "hidden_communication_s", "exposed_host_s", "exposed_copy_s")
    found = {name: getattr(profile, name) for name in parts}
    if profile.waiting_s is not None:
        found["waiting_s"] = profile.waiting_s
    return found | {f"kernels.{name}_s": seconds for name, seconds in profile.categories_s.items()}


def _series(outcome: Measured, start_ms: int) -> tuple[Point, ...]:
    """Loss and grad norm of all steps; times of the measured ones only. Steps count from 0, warm-up included."""
    points: list[Point] = []
    for step, sample in enumerate(outcome.warmup + outcome.steps):
        # A millisecond a step: MLflow identifies a point by its time too, and a fixed one makes rewriting a no-op.
        at_ms = start_ms + step
        points += [Point("loss", sample.loss, at_ms, step), Point("grad_norm", sample.grad_norm, at_ms, step)]
        if step >= len(outcome.warmup):
            points.append(Point("step_time_s", sample.step_time_s, at_ms, step))
            points.append(Point("tokens_per_s", sample.tokens_per_s, at_ms, step))
            if sample.gpu_time_s is not None:
                points.append(Point("gpu_time_s", sample.gpu_time_s, at_ms, step))
    return tuple(points)


def _points(numbers: dict[str, float] | dict[str, int], at_ms: int) -> tuple[Point, ...]:
    return _finite(tuple(Point(key, float(value), at_ms) for key, value in numbers.items()))


def _finite(points: tuple[Point, ...]) -> tuple[Point, ...]:
    return tuple(point for point in points if math.isfinite(point.value))


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."


def _key(name: str) -> str:
    """MLflow takes letters, digits and "_-./: " in a key (and no ":" on Windows); the rest becomes "_"."""
    return "".join(char if char.isalnum() or char in "_-./ " else "_" for char in name)
