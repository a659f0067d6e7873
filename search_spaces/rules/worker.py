"""What the stack can do and this project's worker does not do yet. A rule goes when `train_worker` has learnt it.

Kept apart from the rules of the stack, so that a configuration can also be judged for another launcher.
"""

from search_spaces.rules.pipeline import LAYOUT, PP, VPP, virtual_stages
from search_spaces.rules.rule import Case, Rule

IMPL, ROPE = "cuda_graph_impl", "apply_rope_fusion"


def _graphs(case: Case) -> str | None:
    wrong = not case.on_cpu and case.text(IMPL, "none") != "none"
    return "this worker does not capture CUDA graphs yet: the trial would run without them" if wrong else None


def _latent_rope(case: Case) -> str | None:
    wrong = case.model.multi_latent_attention and case.on(ROPE)
    return f"{ROPE} for latent attention, which this worker trains with plain rotary embedding" if wrong else None


def _chunks_not_said(case: Case) -> str | None:
    found = virtual_stages(case)
    wrong = found is not None and case.layout.virtual_pipeline is None and case.layout.pipeline > 1
    return (
        f"a layout of {found} stages a rank without {VPP}: this worker would build the first of them" if wrong else None
    )


RULES = (
    Rule(
        "RUN-02", frozenset({IMPL}), _graphs,
        "train_worker/megatron has no TECudaGraphHelper; one H200: 1.86 s a step with, 1.76 s without, noise 0.3 s",
        f"set {IMPL} to none",
    ),
    Rule(
        "RUN-04", frozenset({ROPE}), _latent_rope,
        "train_worker/megatron/config.py sets rope_type rope; transformer_config.py:2966 of 0.19.2 fuses yarn only",
        f"set {ROPE} to false",
    ),
    Rule(
        "RUN-05", frozenset({PP, VPP, LAYOUT}), _chunks_not_said,
        "train_worker/megatron/model.py; parallel_state, unlike the configuration, does not read the layout",
        f"set {VPP} to the stages a rank",
    ),
)  # fmt: skip
