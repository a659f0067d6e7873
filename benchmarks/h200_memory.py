"""How much memory a training step takes on one GPU: many small models and settings, one row each.

    python benchmarks/h200_memory.py ROWS.jsonl [--seconds 560] [--part N/M]

Every configuration is one trial of this project's worker (a fresh process forked from a parent that has imported
Megatron-Core): 3 warm-up steps, 2 measured. Rows append; what is in the file already is skipped, so a run that was cut
off goes on. One JSON object a line: knobs, env, model, training, world_size, gpu_arch, outcome, bytes (allocated,
reserved, in use on the device, static), parameter_count, routing, step times, stack.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.presets import load_model
from search_spaces.shapes import ClusterShape, ModelShape, TrainingShape
from train_worker.gang import LocalGang
from train_worker.job import TrialJob
from train_worker.outcome import Measured, OutOfMemory

CLUSTER = ClusterShape(device="cuda", workers=1, workers_per_trial=1, workers_per_node=1, gpu_arch="H200 sm_90")
TRIAL_LIMIT_S = 100.0
X = load_model("qwen3-30b-a3b-4l")
A = X.model_copy(
    update={"name": "shape-a", "num_moe_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 1536,
            "vocab_size": 32768}
)  # fmt: skip
GROUPED: dict[str, KnobValue] = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
RECOMPUTES: tuple[dict[str, KnobValue], ...] = (
    {}, *({"recompute_granularity": "selective", "recompute_modules": modules} for modules in (
        "core_attn", "layernorm", "moe_act", "moe", "layernorm+moe_act", "core_attn+layernorm+moe")),
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
)  # fmt: skip
RECIPES: tuple[dict[str, KnobValue], ...] = tuple(
    {"fp8": "hybrid", "fp8_recipe": recipe} for recipe in ("delayed", "tensorwise", "blockwise")
)
GRAPHS: tuple[dict[str, KnobValue], ...] = tuple(
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules}
    for modules in ("attn", "attn+moe_router+moe_preprocess")
)


def cut(name: str, layers: int, **facts: Any) -> ModelShape:
    """A preset with fewer layers, and other facts where given."""
    model = load_model(name)
    dense = min(model.first_dense_layers, 1)
    update = {"name": f"{name}-{layers}l", "num_layers": layers, "first_dense_layers": dense, **facts}
    return ModelShape.model_validate(model.model_dump() | update)


def settings() -> Iterator[tuple[ModelShape, dict[str, KnobValue], dict[str, Any]]]:
    """(model, knobs, changes of the training job), the most telling first."""
    for model, recompute in product((A, X), RECOMPUTES):
        yield model, GROUPED | recompute | {"micro_batch_size": 4}, {}
    for size in (1, 2, 8, 16):
        yield A, GROUPED | {"micro_batch_size": size}, {"global_batch_size": 16}
        yield X, GROUPED | {"micro_batch_size": size}, {"global_batch_size": 16}
    for recipe, recompute in product(RECIPES, (RECOMPUTES[0], RECOMPUTES[4], RECOMPUTES[7])):
        yield A, GROUPED | recipe | recompute | {"micro_batch_size": 4}, {}
    for graphs, size in product(GRAPHS, (1, 4, 8)):
        yield A, GROUPED | graphs | {"micro_batch_size": size}, {}
    for recipe in RECIPES:
        yield X, GROUPED | recipe | {"micro_batch_size": 4}, {}
    yield from shapes()
    yield from variants()
    yield from captured()


def shapes() -> Iterator[tuple[ModelShape, dict[str, KnobValue], dict[str, Any]]]:
    """Other widths, expert counts, layers, sequences, attention kinds: what a fit must not have seen to be trusted."""
    four: dict[str, KnobValue] = GROUPED | {"micro_batch_size": 4}
    two: dict[str, KnobValue] = GROUPED | {"micro_batch_size": 2}
    for layers in (2, 8):
        yield A.model_copy(update={"name": f"shape-a-{layers}l", "num_layers": layers}), four, {}
    for experts in (8, 64):
        yield A.model_copy(update={"name": f"shape-a-{experts}e", "num_moe_experts": experts}), four, {}
    for length in (1024, 8192):
        yield A, two, {"sequence_length": length}
    yield cut("moonlight-16b-a3b", 4), two, {}
    yield cut("moonlight-16b-a3b", 4), two | RECOMPUTES[4], {}
    yield (
        cut("moonlight-16b-a3b", 4),
        two | {"recompute_granularity": "selective", "recompute_modules": "mla_up_proj"},
        {},
    )
    yield cut("deepseek-v3", 2, num_moe_experts=16), GROUPED | {"micro_batch_size": 1}, {}
    yield cut("olmoe-1b-7b", 8), four, {}
    yield cut("mixtral-8x7b", 2), two, {}
    yield cut("mixtral-8x7b", 2), two | RECOMPUTES[4], {}
    yield cut("gpt-oss-20b", 6), two, {}
    yield cut("qwen3-235b-a22b", 2), two, {}


def variants() -> Iterator[tuple[ModelShape, dict[str, KnobValue], dict[str, Any]]]:
    """Experts one by one, the other dispatcher, optimizers, routing, and what does not fit."""
    four: dict[str, KnobValue] = GROUPED | {"micro_batch_size": 4}
    changes: tuple[dict[str, KnobValue], ...] = (
        {"moe_grouped_gemm": False}, {"moe_token_dispatcher_type": "allgather"}, {"grad_reduce_in_fp32": False},
        {"moe_permute_fusion": True}, {"bias_activation_fusion": True},
    )  # fmt: skip
    for change in changes:
        yield A, four | change, {}
    yield X, four | changes[1], {}
    yield A, four, {"optimizer": "sgd"}
    yield A, four, {"routing": "forced"}
    yield X, four, {"routing": "forced"}
    for model, size in ((A, 32), (A, 64), (X, 32)):
        yield model, GROUPED | {"micro_batch_size": size}, {"global_batch_size": size}
    for layers in (10, 12, 16):
        yield X.model_copy(update={"name": f"qwen3-30b-a3b-{layers}l", "num_layers": layers}), four, {}
    yield cut("mixtral-8x7b", 6), four, {}
    yield cut("deepseek-v3", 3, num_moe_experts=128), GROUPED | {"micro_batch_size": 1}, {}


def captured() -> Iterator[tuple[ModelShape, dict[str, KnobValue], dict[str, Any]]]:
    """More of CUDA graphs: their pool by what is captured, the micro-batch, the model, recompute and precision."""
    every = ("attn", "attn+moe_router", "attn+moe_router+moe_preprocess", "moe_router+moe_preprocess")
    whole = GRAPHS[1]
    for modules, size in product(every, (2, 4, 8)):
        graphs: dict[str, KnobValue] = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules}
        yield X, GROUPED | graphs | {"micro_batch_size": size}, {}
    for size in (2, 16):
        yield A, GROUPED | whole | {"micro_batch_size": size}, {"global_batch_size": 16}
    for recompute in (RECOMPUTES[1], RECOMPUTES[2], RECOMPUTES[3]):
        yield A, GROUPED | whole | recompute | {"micro_batch_size": 4}, {}
    for recipe, size in product(RECIPES, (4, 8)):
        yield A, GROUPED | whole | recipe | {"micro_batch_size": size}, {}
    yield X, GROUPED | whole | RECIPES[1] | {"micro_batch_size": 8}, {}
    yield A, GROUPED | GRAPHS[0] | RECOMPUTES[4] | {"micro_batch_size": 8}, {}
    yield A, GROUPED | whole | {"micro_batch_size": 4, "moe_token_dispatcher_type": "allgather"}, {}
    yield A.model_copy(update={"name": "shape-a-8l", "num_layers": 8}), GROUPED | whole | {"micro_batch_size": 4}, {}
    yield cut("moonlight-16b-a3b", 4), GROUPED | whole | {"micro_batch_size": 2}, {}
    yield cut("olmoe-1b-7b", 8), GROUPED | whole | {"micro_batch_size": 4}, {}
    yield cut("mixtral-8x7b", 2), GROUPED | whole | {"micro_batch_size": 2}, {}


def jobs() -> Iterator[tuple[str, TrialJob]]:
    """(stable id, job), each once."""
    seen = set()
    for model, knobs, changes in settings():
        facts = {"sequence_length": 4096, "global_batch_size": 8, "warmup_steps": 3, "measured_steps": 2, **changes}
        training = TrainingShape.model_validate(facts)
        text = json.dumps([model.model_dump(), knobs, training.model_dump()], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        if name not in seen:
            seen.add(name)
            candidate = Candidate(knobs=knobs)
            yield name, TrialJob(
                trial_id=name, candidate=candidate, model=model, cluster=CLUSTER, training=training, seed=1,
                time_limit_s=TRIAL_LIMIT_S,
            )  # fmt: skip


def row_of(name: str, job: TrialJob, outcome: Any, wall_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": name, "knobs": job.candidate.knobs, "env": job.candidate.env, "model": job.model.model_dump(),
        "training": job.training.model_dump(), "world_size": 1, "gpu_arch": CLUSTER.gpu_arch, "outcome": outcome.kind,
        "routing": job.training.routing, "wall_s": round(wall_s, 2),
    }  # fmt: skip
    if isinstance(outcome, Measured):
        row |= outcome.memory.model_dump() if outcome.memory else {}
        row |= {"parameter_count": outcome.parameter_count, "stack": outcome.fingerprint.stack.model_dump()}
        row["step_times_s"] = [round(step.step_time_s, 4) for step in outcome.steps]
        row["losses"] = [round(loss, 4) for loss in outcome.losses]
    elif isinstance(outcome, OutOfMemory):
        row |= {"phase": outcome.phase, "detail": outcome.detail.strip().splitlines()[-1][:160]}
    else:
        row["detail"] = str(getattr(outcome, "reason", None) or getattr(outcome, "detail", ""))[-600:]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0)
    options = parser.parse_args()
    began = time.monotonic()
    done = set()
    if options.rows.exists():
        rows = map(json.loads, options.rows.read_text().splitlines())
        done = {row["id"] for row in rows if row["outcome"] in ("measured", "out_of_memory")}
    waiting = [(name, job) for name, job in jobs() if name not in done]
    print(f"{len(waiting)} to run, {len(done)} done", flush=True)
    with tempfile.TemporaryDirectory() as folder, LocalGang(1, "cuda", Path(folder)) as gang:
        for name, job in waiting:
            start = time.monotonic()
            if start - began > options.seconds - 20:
                break
            outcome = gang.run(job)
            row = row_of(name, job, outcome, time.monotonic() - start)
            with options.rows.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            reserved = row.get("reserved_bytes", 0) / 2**30
            print(
                f"{name} {job.model.name} {job.candidate.knobs} {row['outcome']} {reserved:.1f} GiB {row['wall_s']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
