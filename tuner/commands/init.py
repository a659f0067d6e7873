"""`moetune init`: a commented sweep file for a model and a cluster, ready for `moetune plan`."""

import math
from pathlib import Path

from search_spaces.errors import Fault, InputError
from search_spaces.named_spaces import NAMED_SPACES
from search_spaces.presets import GPUS, load_gpu, load_model, model_names
from search_spaces.shapes import ClusterShape, ModelShape, Noun, TrainingShape
from search_spaces.space import nearest
from tuner.cpu_memory import machine_bytes, shortage

CPU = "CPU"
MAX_GPUS = 100_000

_TEMPLATE = """\
# {model} on {gpus} x {gpu}, written by `moetune init`. Next: `moetune plan` this file, then `moetune run` it.
schema_version: 1
name: {name}

# One of: preset (see search_spaces/presets), hf_config (a Hugging Face config.json), facts (written out here).
model:
  preset: {model}

# Facts of the machine. A trial takes workers_per_trial ranks; workers / workers_per_trial trials run at once.
cluster:
  device: {device}
  workers: {gpus}
  workers_per_trial: {gpus}
  workers_per_node: {per_node}
{gpu_lines}
# The same job for every candidate, so that step times and losses can be compared.
training:
  sequence_length: {sequence}
  global_batch_size: {batch} # sequences per optimizer step, over all ranks
  warmup_steps: {warmup} # run first, never timed
{measured}  params_dtype: {dtype}
  optimizer: adam

# What can be tried. The default of a knob is Megatron-Core's where it is listed, else the first choice.
space:
  name: {space}
{choices}
objective:
  metric: step_time_s # also: tokens_per_s, peak_memory_bytes

# A trial whose loss leaves the default's by more than this share is "diverged", however fast it is.
guard:
  loss_relative_tolerance: 0.02
  low_precision_mean_loss_relative_tolerance: 0.03 # FP8 and FP4 follow bf16 less closely, step by step

budget:
  trials: {trials}
  trial_time_limit_s: {limit} # longer is recorded as hung
  # worker_hours: 8
  # slow_factor: 2 # a trial that much slower than the best one in each of its first three steps is given up

# walls: what the wall of the best one so far asks for first, then TPE; tpe: Optuna's sampler from the start.
search:
  strategy: {strategy}

# The search's best ones and the default measured again in turns; a difference inside the noise is a tie.
verify:
  rounds: 4 # 3 or more; 0 leaves the winner unverified
  finalists: 2 # single trials differ by several percent, so that the best of a search may only have been lucky

tracking:
  folder: moetune-runs
  # mlflow_uri: http://mlflow.example:5000
  experiment: moetune

# Versions on the workers, for the rules about versions and missing packages. `moetune fingerprint` prints them.
# stack:
#   megatron_core: 0.19.2
#   torch: 2.11.0+cu130
#   transformer_engine: 2.20.2 # a package that is not named counts as not installed

seed: 1
"""
_MEASURED = """\
  measured_steps: 12 # at most; a steady trial stops sooner, once the standard error of its steps is 1%
  min_measured_steps: 5
  target_relative_error: 0.01
"""
_GPU_LINES = """\
  gpu_arch: {gpu_arch} # name and compute capability
  memory_bytes: {memory_bytes} # what one rank may use: the datasheet's figure
"""


class InitResult(Noun):
    """What `moetune init --json` prints. `path`: where the text was written, None for nowhere."""

    path: str | None
    text: str
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


def write_sweep(model: str, gpu: str, gpus: int, out: Path | None) -> InitResult:
    """The text of a sweep file, also written to `out`; `gpu` "cpu" gives one for CPU ranks.

    Raises InputError for an unknown model or GPU (listing the known), a bad count, or a file that is there already.
    """
    text = _text(model, gpu, gpus)
    warnings = _warnings(model, gpus) if gpu.upper() == CPU else ()
    if out is None:
        return InitResult(path=None, text=text, warnings=warnings)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InputError([Fault("there is a file already", str(out))], "name another file, or remove it") from error
    except OSError as error:
        reason = (error.strerror or "cannot be written").lower()
        raise InputError([Fault(f"cannot write it: {reason}", str(out))], "name another file") from error
    return InitResult(path=str(out), text=text, warnings=warnings)


def _text(model: str, gpu: str, gpus: int) -> str:
    faults = []
    if model not in model_names():
        faults.append(Fault(f"no model preset {model!r}", hint=nearest(model, model_names())))
    known = [*GPUS, CPU]
    if gpu.upper() not in known:
        faults.append(Fault(f"no GPU {gpu!r}", hint=nearest(gpu.upper(), known)))
    if not 1 <= gpus <= MAX_GPUS:
        faults.append(Fault(f"--gpus {gpus} is not between 1 and {MAX_GPUS}"))
    if faults:
        raise InputError(faults, f"models: {', '.join(model_names())}; GPUs: {', '.join(known)}")
    shape = load_model(model)
    facts = _cpu_facts(shape, gpus) if gpu.upper() == CPU else _gpu_facts(shape, gpu, gpus)
    return _TEMPLATE.format(model=model, gpu=gpu.upper(), gpus=gpus, name=f"{model}-{gpus}x{gpu.lower()}", **facts)


def _warnings(model: str, ranks: int) -> tuple[str, ...]:
    """A model that is too large for the memory of this machine: its file is written, for it may run elsewhere."""
    shape = load_model(model)
    facts = _cpu_facts(shape, ranks)
    cluster = ClusterShape(device="cpu", workers=ranks, workers_per_trial=ranks, workers_per_node=ranks)
    training = TrainingShape.model_validate(
        {"sequence_length": facts["sequence"], "global_batch_size": facts["batch"], "params_dtype": facts["dtype"]}
    )
    short = shortage(shape, cluster, training, NAMED_SPACES[str(facts["space"])].default(), machine_bytes())
    return (str(short),) if short else ()


def _cpu_facts(model: ModelShape, ranks: int) -> dict[str, object]:
    return {
        "device": "cpu",
        "per_node": ranks,
        "gpu_lines": "",
        "sequence": min(128, model.max_position_embeddings),
        "batch": 8 * ranks,
        "warmup": 2,
        "measured": "  measured_steps: 6\n",
        "dtype": "fp32",
        "space": "laptop",
        "strategy": "tpe",
        "choices": "",
        "trials": 16,
        "limit": 60,
    }


def _gpu_facts(model: ModelShape, gpu: str, gpus: int) -> dict[str, object]:
    shape = load_gpu(gpu)
    return {
        "device": "cuda",
        "per_node": min(gpus, shape.gpus_per_node),
        "gpu_lines": _GPU_LINES.format(gpu_arch=shape.gpu_arch, memory_bytes=shape.memory_bytes),
        "sequence": min(4096, model.max_position_embeddings),
        "batch": 8 * gpus,
        "warmup": 4,
        "measured": _MEASURED,
        "dtype": "bf16",
        "space": "moe-core",
        "strategy": "walls",
        "choices": _choices(model, gpus),
        "trials": 40,
        "limit": 300,
    }


def _choices(model: ModelShape, gpus: int) -> str:
    """A layout that fits the ranks: experts spread as widely as they divide, the dense part lightly."""
    shared = math.gcd(gpus, model.num_moe_experts)
    spread = [size for size in (64, 32, 16, 8, 4, 2, 1) if shared % size == 0][:2]
    split = [size for size in (1, 2) if gpus % size == 0]
    dispatchers = "[allgather, alltoall]" if spread[0] == 1 else "[alltoall, flex]"
    return f"""\
  choices:
    expert_model_parallel_size: {spread} # the widest first: it is the default, and holds the fewest experts a rank
    tensor_model_parallel_size: {split}
    pipeline_model_parallel_size: {split}
    virtual_pipeline_model_parallel_size: [null, 2, 3]
    expert_tensor_parallel_size: [1]
    moe_token_dispatcher_type: {dispatchers}
    micro_batch_size: [1, 2, 4]
"""
