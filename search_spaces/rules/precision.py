"""Rules of FP8 and FP4: what a recipe needs of the GPU, of Transformer Engine and of the shapes."""

from search_spaces.rules.rule import Case, Rule
from search_spaces.rules.versions import older

FP8, RECIPE, FP4, GROUPED = "fp8", "fp8_recipe", "fp4", "moe_grouped_gemm"
TP, SP, CP = "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"
ETP, MBS = "expert_tensor_parallel_size", "micro_batch_size"
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def _recipe(case: Case) -> str:
    """The FP8 recipe in use; "" without FP8. Megatron's own default is delayed."""
    return case.text(RECIPE, "delayed") if case.text(FP8) else ""


def _unknown_recipe(case: Case) -> str | None:
    recipe = _recipe(case)
    return f"no fp8_recipe {recipe!r}" if recipe and recipe not in RECIPES else None


def _inert_recipe(case: Case) -> str | None:
    recipe = case.text(RECIPE)
    return f"fp8_recipe {recipe} without fp8 is ignored" if recipe and not case.text(FP8) else None


def _both(case: Case) -> str | None:
    return "fp8 and fp4 at once" if case.text(FP8) and case.text(FP4) else None


def _engine(case: Case) -> str | None:
    if case.stack is None or not _recipe(case):
        return None
    engine = case.stack.transformer_engine
    if engine is None:
        return "fp8 needs transformer-engine, which the workers lack"
    if older(engine, "1.7.0"):
        return f"FP8 experts with transformer-engine {engine}"
    wrong = case.on(GROUPED) and older(engine, "1.11.0")
    return f"FP8 grouped GEMM with transformer-engine {engine}" if wrong else None


def _alignment(case: Case) -> str | None:
    recipe = _recipe(case)
    if not recipe:
        return None
    multiple = 32 if recipe == "mxfp8" else 16
    layout, training = case.layout, case.training
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    sizes = {
        "hidden_size": case.model.hidden_size,
        "moe_ffn_hidden_size / ETP": case.model.moe_ffn_hidden_size // layout.expert_tensor,
        "tokens of a rank": training.sequence_length * case.integer(MBS, 1) // parts,
    }
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % multiple]
    return f"{recipe} needs multiples of {multiple}, not {' and '.join(wrong)}" if wrong else None


def _scaled_gpu(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = _recipe(case) in ("delayed", "tensorwise") and capability is not None and capability < (8, 9)
    return f"{_recipe(case)} FP8 needs compute capability 8.9, not {case.cluster.gpu_arch}" if wrong else None


def _blockwise_gpu(case: Case) -> str | None:
    if _recipe(case) != "blockwise":
        return None
    capability, cuda = case.compute_capability, case.stack.cuda if case.stack else None
    if capability is not None and capability < (9, 0):
        return f"blockwise FP8 needs compute capability 9.0, not {case.cluster.gpu_arch}"
    return f"blockwise FP8 needs CUDA 12.9, not {cuda}" if cuda is not None and older(cuda, "12.9") else None


def _mxfp8_gpu(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = _recipe(case) == "mxfp8" and capability is not None and not (10, 0) <= capability < (12, 0)
    return f"mxfp8 needs compute capability 10.x or 11.x, not {case.cluster.gpu_arch}" if wrong else None


def _fp4_gpu(case: Case) -> str | None:
    capability = case.compute_capability
    wrong = case.text(FP4) and capability is not None and capability < (10, 0)
    return f"nvfp4 needs compute capability 10.0, not {case.cluster.gpu_arch}" if wrong else None


_QUANTIZATION = "TE 2.20.2 pytorch/quantization.py"
_FP8 = frozenset({FP8, RECIPE})
RULES = (
    Rule("UNK-01", _FP8, _unknown_recipe, "core/fp8_utils.py, get_fp8_recipe", f"known: {', '.join(RECIPES)}"),
    Rule("PRC-07", frozenset({FP8, FP4}), _both, "core/transformer/transformer_config.py, VC-53", "choose one"),
    Rule("PRC-09", _FP8 | {GROUPED}, _engine, "core/transformer/transformer_config.py:2297", "install 1.11 or newer"),
    Rule(
        "PRC-12", _FP8 | {TP, SP, CP, ETP, MBS}, _alignment, "TE quantizer.cpp, VC-29",
        "change the recipe, the sequence length or the layout",
    ),
    Rule("HW-01", _FP8, _scaled_gpu, f"{_QUANTIZATION}:149", "leave fp8 out on this GPU"),
    Rule("HW-02", _FP8, _blockwise_gpu, f"{_QUANTIZATION}:177", "use delayed or tensorwise"),
    Rule("HW-03", _FP8, _mxfp8_gpu, f"{_QUANTIZATION}:161; seen on an H200", "use another recipe"),
    Rule("HW-04", frozenset({FP4}), _fp4_gpu, f"{_QUANTIZATION}:170", "use fp8 on this GPU"),
    Rule("DUP-09", _FP8, _inert_recipe, "core/fp8_utils.py", "leave fp8_recipe out"),
)  # fmt: skip
