"""Fields of Megatron Bridge's configuration objects that no rule reads, and words that none of them has.

`comm_overlap` and `mixed_precision` are dataclasses: an unknown field raises TypeError, an unknown recipe ValueError
(0.6.2 training/mixed_precision.py:461). Of the other parts a field that no rule reads is accepted, except where it is
one slip away from a field that is read.
"""

import difflib
import re
from collections.abc import Iterator, Mapping

from search_spaces.bridge_paths import KEPT, OF_COMM_OVERLAP, split_paths
from search_spaces.bridge_recipes import PRECISION_DEFAULTS, precision_recipe, recipe_names
from search_spaces.explicit_knobs import CaseFault, known_words, read_words, shown
from search_spaces.space import nearest

# training/comm_overlap.py:341-374 and training/mixed_precision.py:40-75, beside what bridge_paths.py reads of them.
COMM_OVERLAP = OF_COMM_OVERLAP | {"tp_comm_overlap_cfg", "data_parallel_size"}
MIXED_PRECISION = frozenset(PRECISION_DEFAULTS) | {
    "fp32", "params_dtype", "pipeline_dtype", "autocast_dtype", "autocast_enabled", "loss_scale",
    "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
}  # fmt: skip
# models/gpt_provider.py, mla_provider.py: what the provider has beside Megatron-Core's fields.
MODEL = frozenset({
    "dense_grouped_gemm", "fp16_lm_cross_entropy", "hf_model_id", "hf_model_revision", "make_vocab_size_divisible_by",
    "mtp_enabled", "parallel_output", "position_embedding_type", "restore_modelopt_state", "rope_scaling",
    "rope_scaling_factor", "scatter_embedding_sequence_parallel", "seq_len_interpolation_factor",
    "share_embeddings_and_output_weights", "should_pad_vocab", "tp_comm_overlap_cfg", "transformer_layer_spec",
    "use_arbitrary_attention_mask", "use_transformer_engine_full_layer_spec", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_correction_range_round_to_int", "yarn_mscale", "yarn_mscale_all_dim",
    "yarn_original_max_position_embeddings", "yarn_rotary_scaling_factor",
})  # fmt: skip
DATA_PARALLEL = frozenset({"param_name_patterns_for_fp32_local_accumulation"})  # training/config.py, Bridge's own
OPEN = ("train", "dist", "rerun_state_machine", "rng", "checkpoint", "validation", *KEPT)  # parts read in part only
# Of training/config.py: near a field that is read, and a field all the same.
_REAL = frozenset({"eval_iters", "train_samples", "exit_interval", "save", "load"})
SLIP = 0.9  # likeness of two words from which on one is taken for a misspelling of the other


def bridge_faults(knobs: Mapping[str, object]) -> Iterator[CaseFault]:
    """Fields and recipes under Bridge's paths that Bridge does not have."""
    for part, fields in split_paths(knobs).items():
        if part in ("comm_overlap", "mixed_precision"):
            yield from _whole(part, fields.get(""))
            known = COMM_OVERLAP if part == "comm_overlap" else MIXED_PRECISION
            for name in fields.keys() - known - {""}:
                yield _unknown(knobs, part, name, nearest(name, sorted(known)))
        elif part in OPEN:
            for name in sorted(fields.keys() - known_words() - _REAL - {""}):
                if f"{part}.{name}" not in known_words() and (close := _slip(part, name)):
                    yield _unknown(knobs, part, name, f"did you mean {close}?")


def read_nowhere(path: str) -> bool:
    """Whether a field is Bridge's and nothing reads it ("checkpoint.save")."""
    part, dot, name = path.partition(".")
    if part in OPEN:
        return path.removesuffix(".") not in known_words() if part in KEPT else bool(dot) and name not in known_words()
    return (part == "model" and name in MODEL - known_words()) or (part == "ddp" and name in DATA_PARALLEL)


def _unknown(knobs: Mapping[str, object], part: str, name: str, hint: str) -> CaseFault:
    path = f"{part}.{name}"
    key = next((key for key in (path, f"cfg.{path}") if key in knobs), name)
    return CaseFault(key, f"no field {shown(name)} in Megatron Bridge's {part}", hint)


def _whole(part: str, value: object) -> Iterator[CaseFault]:
    if value is not None and not isinstance(value, bool | str):
        yield CaseFault(part, f"{part} is an object{' or a recipe' * (part != 'comm_overlap')}, not {shown(value)}")
    elif part == "mixed_precision" and isinstance(value, str) and not _recipe(value):
        known = recipe_names()
        close = difflib.get_close_matches(value.lower().replace("-", "_"), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        yield CaseFault(part, f"no recipe {shown(value)} of mixed_precision", hint)


def _recipe(text: str) -> bool:
    """A registered name, one of the performance scripts' short words ("fp8_cs"), or a recipe told in words."""
    name = text.strip().lower().replace("-", "_")
    told = not re.fullmatch(r"\w+", name) or not ("mixed" in name or "with" in name)
    return name in recipe_names() or (told and precision_recipe(text) is not None)


def _slip(part: str, name: str) -> str | None:
    words = [word.removeprefix(f"{part}.") for word in read_words() if "." not in word or word.startswith(f"{part}.")]
    close = difflib.get_close_matches(name[:100], words, n=1, cutoff=SLIP)
    return close[0] if close else None
