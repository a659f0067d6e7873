"""Rules of FP8 and FP4: what a recipe needs of the GPU, of Transformer Engine and of the shapes.

Those of parameters, gradients and optimizer state in few bits are in `precision_state`.
"""

import re

from search_spaces.rules import precision_state
from search_spaces.rules.activations import ACTIVATION, GATED, activation, gated
from search_spaces.rules.precision_state import FP4, FP8, RECIPE
from search_spaces.rules.recompute import FREQUENCY, has_dense_layers
from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import older

FP4_RECIPE, GROUPED, FACTORY, FP4_FACTORY = (
    "fp4_recipe", "moe_grouped_gemm", "fp8_quantizer_factory", "fp4_quantizer_factory",
)  # fmt: skip
TP, SP, CP = "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"
PP, ETP, MBS = "pipeline_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size"
ENDS, START, END = "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"
OUTPUT, WGRAD, ATTENTION = "fp8_output_proj", "fp8_wgrad", "fp8_dot_product_attention"
PADDING, OLD_PADDING = "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"
DISPATCHER, FUSER = "moe_token_dispatcher_type", "use_transformer_engine_op_fuser"
STORED = "activation_func_fp8_input_store"
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "custom")
# Transformer Engine's first release with the recipe (core/fp8_utils.py:725-755).
FIRST_ENGINE = {"tensorwise": "2.2", "mxfp8": "2.1", "blockwise": "2.3"}


def _recipe(case: Case) -> str:
    """The FP8 recipe in use; "" without FP8. Megatron's own default is delayed."""
    return case.text(RECIPE, "delayed") if case.text(FP8) else ""


def _fp4_recipe(case: Case) -> str:
    """The FP4 recipe in use; "" without FP4."""
    return case.text(FP4_RECIPE, "nvfp4") if case.text(FP4) else ""


def _unknown_fp8(case: Case) -> str | None:
    if case.text(FP8) not in ("", "e4m3", "hybrid"):
        return f"no fp8 format {case.text(FP8)!r}"
    recipe = _recipe(case)
    return f"no fp8_recipe {recipe!r}" if recipe and recipe not in RECIPES else None


def _unknown_fp4(case: Case) -> str | None:
    if case.text(FP4) not in ("", "e2m1"):
        return f"no fp4 format {case.text(FP4)!r}"
    recipe = _fp4_recipe(case)
    return f"no fp4_recipe {recipe!r}" if recipe not in ("", "nvfp4", "custom") else None


def _delayed_ends(case: Case) -> str | None:
    wrong = _recipe(case) == "delayed" and case.on(ENDS)
    return f"{ENDS} with delayed FP8 scaling" if wrong else None


def _ends(case: Case) -> str | None:
    if not _recipe(case) or not case.on(ENDS):
        return None
    most = case.model.num_layers // case.layout.pipeline
    wrong = [f"{name} {case.integer(name, 1)}" for name in (START, END) if not 0 <= case.integer(name, 1) <= most]
    return f"{' and '.join(wrong)} of a stage of {most} layers" if wrong else None


def _custom(case: Case) -> str | None:
    for recipe, factory in ((_recipe(case), FACTORY), (_fp4_recipe(case), FP4_FACTORY)):
        if recipe == "custom" and not case.text(factory):
            return f"a custom recipe without {factory}"
    return None


def _output_projection(case: Case) -> str | None:
    return f"{OUTPUT} without mxfp8" if case.on(OUTPUT) and _recipe(case) != "mxfp8" else None


def _both(case: Case) -> str | None:
    return "fp8 and fp4 at once" if case.text(FP8) and case.text(FP4) else None


def _fp4_engine(case: Case) -> str | None:
    if case.stack is None or not _fp4_recipe(case):
        return None
    engine = case.stack.transformer_engine
    if engine is None:
        return "fp4 needs transformer-engine, which the workers lack"
    return f"fp4 with transformer-engine {engine}" if older(engine, "2.7") else None


def _engine(case: Case) -> str | None:
    if case.stack is None or not _recipe(case):
        return None
    engine = case.stack.transformer_engine
    if engine is None:
        return "fp8 needs transformer-engine, which the workers lack"
    if case.dense:
        return None
    if older(engine, "1.7.0"):
        return f"FP8 experts with transformer-engine {engine}"
    wrong = case.on(GROUPED) and older(engine, "1.11.0")
    return f"FP8 grouped GEMM with transformer-engine {engine}" if wrong else None


def _young_recipe(case: Case) -> str | None:
    engine, first = case.stack.transformer_engine if case.stack else None, FIRST_ENGINE.get(_recipe(case))
    wrong = engine is not None and first is not None and older(engine, first)
    return f"{_recipe(case)} FP8 with transformer-engine {engine}" if wrong else None


def _multiple(case: Case) -> int:
    """What both sizes of a quantized matrix must be a multiple of: blocks of 32 (mxfp8), else cuBLAS's 16."""
    return 32 if _recipe(case) == "mxfp8" else 16


def _widths(case: Case) -> dict[str, int]:
    """Sizes of the weights' sides, by what they are; only of layers the model has."""
    model, layout = case.model, case.layout
    found = {"hidden_size": model.hidden_size}
    if not case.dense:
        found["moe_ffn_hidden_size / ETP"] = model.moe_ffn_hidden_size // layout.expert_tensor
    if not case.dense and model.moe_shared_expert_intermediate_size is not None:
        found["moe_shared_expert_intermediate_size / TP"] = model.moe_shared_expert_intermediate_size // layout.tensor
    if has_dense_layers(case):
        found["ffn_hidden_size / TP"] = model.ffn_hidden_size // layout.tensor
    return found


def _tokens(case: Case) -> int:
    """Tokens of a rank as its first matrix product sees them."""
    layout = case.layout
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    return case.training.sequence_length * case.integer(MBS, 1) // parts


def _quantized(case: Case) -> str:
    """The recipe whose blocks the sizes must fit; "" without one, or with one that only its factory knows."""
    recipe = _recipe(case) or _fp4_recipe(case)
    return "" if recipe == "custom" else recipe


def _tokens_alignment(case: Case) -> str | None:
    """Rows of experts need no rule: experts, router or dispatcher pad them to 16, 32, 128 or 256
    (core/transformer/moe/experts.py:306, 1307; moe_utils.py:1397)."""
    recipe, multiple = _quantized(case), _multiple(case)
    wrong = recipe and _tokens(case) % multiple
    return f"{recipe} needs multiples of {multiple}, not {_tokens(case)} tokens of a rank" if wrong else None


def _width_alignment(case: Case) -> str | None:
    recipe, multiple = _quantized(case), _multiple(case)
    wrong = [f"{name} {size}" for name, size in _widths(case).items() if size % multiple] if recipe else []
    return f"{recipe} needs multiples of {multiple}, not {' and '.join(wrong)}" if wrong else None


def _router_padding(case: Case) -> str | None:
    if not case.on(PADDING) and not case.on(OLD_PADDING):
        return None
    if not case.text(FP8) and not case.text(FP4):
        return f"{PADDING} without fp8 or fp4"
    dispatcher = case.text(DISPATCHER, "allgather")
    return f"{PADDING} with {dispatcher}" if dispatcher in ("allgather", "alltoall_seq") else None


def _rows(case: Case) -> int:
    """The multiple that rows of an expert are padded to (core/transformer/moe/moe_utils.py:1397)."""
    return 256 if case.on(FUSER) else 128 if case.text(FP4) else _multiple(case)


def _too_few_to_pad(case: Case) -> str | None:
    padding = (case.on(PADDING) or case.on(OLD_PADDING)) and (_recipe(case) or _fp4_recipe(case))
    if not padding or case.text(DISPATCHER, "allgather") != "alltoall":
        return None
    wrong = _tokens(case) < _rows(case)
    return f"{_tokens(case)} tokens of a rank cannot pad an expert's rows to {_rows(case)}" if wrong else None


def _input_store(case: Case) -> str | None:
    if not case.on(STORED):
        return None
    return None if gated(case) and activation(case) == "silu" else f"{STORED} without SwiGLU"


def _wgrad(case: Case) -> str | None:
    wrong = case.knobs.get(WGRAD) is False and _recipe(case) not in ("", "delayed")
    return f"{WGRAD} false is honoured by delayed scaling only, not by {_recipe(case)}" if wrong else None


def _attention(case: Case) -> str | None:
    wrong = case.on(ATTENTION) and _recipe(case) == "blockwise"
    return f"{ATTENTION} does not reach the blockwise recipe" if wrong else None


def _cuda(case: Case) -> str | None:
    """CUDA of the workers' torch: as told, else as torch's version says it ("2.8.0+cu128" -> "12.8")."""
    if case.stack is None or case.stack.cuda is not None:
        return case.stack.cuda if case.stack else None
    found = re.search(r"\+cu(\d+)(\d)$", case.stack.torch)
    return f"{found[1]}.{found[2]}" if found else None


def _scaled_gpu(case: Case) -> str | None:
    capability, cuda = case.compute_capability, _cuda(case)
    if _recipe(case) not in ("delayed", "tensorwise") or capability is None:
        return None
    if capability < (8, 9):
        return f"{_recipe(case)} FP8 needs compute capability 8.9, not {case.cluster.gpu_arch}"
    wrong = capability < (9, 0) and cuda is not None and older(cuda, "12.1")
    return f"{_recipe(case)} FP8 needs CUDA 12.1 on {case.cluster.gpu_arch}, not {cuda}" if wrong else None


def _blockwise_gpu(case: Case) -> str | None:
    if _recipe(case) != "blockwise":
        return None
    capability, cuda = case.compute_capability, _cuda(case)
    if capability is not None and capability < (9, 0):
        return f"blockwise FP8 needs compute capability 9.0, not {case.cluster.gpu_arch}"
    return f"blockwise FP8 needs CUDA 12.9, not {cuda}" if cuda is not None and older(cuda, "12.9") else None


def _emulated(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = _recipe(case) == "blockwise" and capability is not None and capability >= (10, 0)
    return f"blockwise FP8 is emulated with mxfp8 products on {case.cluster.gpu_arch}" if wrong else None


def _mxfp8_gpu(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = _recipe(case) == "mxfp8" and capability is not None and not (10, 0) <= capability < (12, 0)
    return f"mxfp8 needs compute capability 10.x or 11.x, not {case.cluster.gpu_arch}" if wrong else None


def _fp4_gpu(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = _fp4_recipe(case) == "nvfp4" and capability is not None and capability < (10, 0)
    return f"nvfp4 needs compute capability 10.0, not {case.cluster.gpu_arch}" if wrong else None


def _fp4_zeros(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = _fp4_recipe(case) == "nvfp4" and capability is not None and capability >= (12, 0)
    return f"nvfp4 gave gradients of zero on {case.cluster.gpu_arch}, without an error" if wrong else None


_CONFIG, _QUANTIZATION = "core/transformer/transformer_config.py", "TE 2.20.2 pytorch/quantization.py"
_UTILS, _OLD_ENGINE = "core/fp8_utils.py", "install a newer transformer-engine"
_FP8, _FP4 = frozenset({FP8, RECIPE}), frozenset({FP4, FP4_RECIPE})
_TOKENS = frozenset({TP, SP, CP, MBS})
RULES = (
    *precision_state.RULES,
    Rule("UNK-01", _FP8, _unknown_fp8, f"{_UTILS}:712", f"known: e4m3, hybrid; {', '.join(RECIPES)}", "first step"),
    Rule("UNK-02", _FP4, _unknown_fp4, "core/fp4_utils.py:211", "known: e2m1; nvfp4, custom", "first step"),
    Rule("PRC-02", _FP8 | {ENDS}, _delayed_ends, f"{_CONFIG}:1403", "use another fp8_recipe"),
    Rule("PRC-03", _FP8 | {ENDS, START, END, PP}, _ends, f"{_CONFIG}:1416", "keep fewer layers in bf16"),
    Rule(
        "PRC-04", _FP8 | _FP4 | {FACTORY, FP4_FACTORY}, _custom, f"{_CONFIG}:1433, 1459", "name one", since="0.16",
    ),
    Rule(
        "PRC-06", _FP8 | {OUTPUT}, _output_projection, f"{_CONFIG}:1444", "use mxfp8 or leave it out", since="0.18",
    ),
    Rule(
        "PRC-07", frozenset({FP8, FP4}), _both,
        f"{_CONFIG}:1455; MLM arguments.py:1065; Bridge training/mixed_precision.py:108", "choose one",
    ),
    Rule(
        "PRC-08", _FP4, _fp4_engine,
        "core/fp4_utils.py:211; MLM arguments.py:1073; Bridge training/mixed_precision.py:111", "install 2.7 or newer",
        "first step",
    ),
    Rule("PRC-09", _FP8 | {GROUPED}, _engine, f"{_CONFIG}:2297", "install 1.11 or newer"),
    Rule("PRC-09b", _FP8, _young_recipe, f"{_UTILS}:721", _OLD_ENGINE, "first step"),
    Rule(
        "PRC-12", _FP8 | _FP4 | _TOKENS, _tokens_alignment, "TE 2.20.2 quantizer.cpp, VC-29",
        "change the recipe, the sequence length or the layout", "first step",
    ),
    Rule(
        "PRC-12b", _FP8 | _FP4 | {TP, ETP, FREQUENCY}, _width_alignment, "TE 2.20.2 quantizer.cpp",
        "change the recipe or the layout", "first step",
    ),
    Rule(
        "PRC-13", frozenset({FP8, FP4, PADDING, OLD_PADDING, DISPATCHER}), _router_padding, f"{_CONFIG}:2308",
        "leave it out, or use alltoall or flex",
    ),
    Rule(
        "PRC-17", frozenset({STORED, GATED, ACTIVATION}), _input_store, f"{_CONFIG}:2163", f"set {STORED} to false"
    ),
    Rule(
        "TRAP-10", _FP8 | _FP4 | _TOKENS | {PADDING, OLD_PADDING, DISPATCHER, FUSER}, _too_few_to_pad,
        "megatron-core 0.19.2, moe_utils.py:675", f"set {PADDING} to false", "runtime risk",
    ),
    Rule("TRAP-21", _FP8 | {WGRAD}, _wgrad, f"{_UTILS}:725", f"leave {WGRAD} out", "first step"),
    Rule("TRAP-22", _FP8 | {ATTENTION}, _attention, f"{_UTILS}:735", "leave it out", "first step"),
    Rule("HW-01", _FP8, _scaled_gpu, f"{_QUANTIZATION}:149", "leave fp8 out on this GPU", "first step"),
    Rule("HW-02", _FP8, _blockwise_gpu, f"{_QUANTIZATION}:177", "use delayed or tensorwise", "first step"),
    Rule("TRAP-23", _FP8, _emulated, "TE#2157, TE#2668", "use mxfp8 where the GPU has it", "runtime risk"),
    Rule("HW-03", _FP8, _mxfp8_gpu, f"{_QUANTIZATION}:161; seen on an H200", "use another recipe", "first step"),
    Rule("HW-04", _FP4, _fp4_gpu, f"{_QUANTIZATION}:170", "use fp8 on this GPU", "first step"),
    Rule("HW-05", _FP4, _fp4_zeros, "TE#3281, TE#3195", "use fp8 on this GPU", "first step"),
)  # fmt: skip
