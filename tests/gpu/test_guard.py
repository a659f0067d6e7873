"""The numerics guard of examples/h200.yaml on 20 steps: it lets FP8 and graphs pass, and catches what is broken."""

from pathlib import Path

import pytest
import yaml

from search_spaces.candidate import Candidate
from tests.gpu.conftest import Run
from tests.gpu.trials import CUTLASS, LONG, QWEN, SENT, Knobs, fp8, graphs, job
from train_worker.outcome import Diverged, Measured
from tuner.objective import Guard, judge

pytestmark = pytest.mark.gpu
SWEEP = Path(__file__).parents[2] / "examples" / "h200.yaml"
GUARD = Guard.model_validate(yaml.safe_load(SWEEP.read_text())["guard"])
FULL = graphs("attn+moe_router+moe_preprocess")
HONEST: dict[str, tuple[Knobs, dict[str, str]]] = {
    "FP8 blockwise": (fp8("blockwise"), {}),
    "FP8 delayed": (fp8("delayed"), {}),
    "graphs": (FULL, {}),
    "graphs, FP8 tensorwise": (FULL | fp8("tensorwise"), {}),
    "graphs, CUTLASS": (FULL, CUTLASS),
}


@pytest.fixture(scope="module")
def reference(run: Run) -> Measured:
    outcome = run(job("reference of 20 steps", training=LONG))
    assert isinstance(outcome, Measured), outcome
    assert judge(outcome, None, GUARD) is outcome
    assert len(outcome.losses) == 20
    return outcome


@pytest.mark.parametrize("name", HONEST)
def test_low_precision_and_graphs_pass_the_guard(run: Run, reference: Measured, name: str) -> None:
    knobs, env = HONEST[name]
    outcome = run(job(f"guard {name}", Candidate(knobs=SENT | knobs, env=env), training=LONG))
    assert isinstance(judge(outcome, reference, GUARD), Measured), judge(outcome, reference, GUARD)


def test_a_learning_rate_a_thousand_times_too_high_is_caught(run: Run, reference: Measured) -> None:
    training = LONG.model_copy(update={"learning_rate": 1000 * LONG.learning_rate})
    outcome = judge(run(job("guard learning rate", training=training)), reference, GUARD)
    assert isinstance(outcome, Diverged), outcome


def test_routing_that_ignores_the_router_is_caught(run: Run, reference: Measured) -> None:
    """Tokens sent at random run as fast, or faster, and learn less (11% off on a CPU)."""
    candidate = Candidate(knobs=SENT | {"moe_router_force_load_balancing": True})
    measured = run(job("guard routing", candidate, QWEN, LONG))
    assert isinstance(measured, Measured), measured
    assert isinstance(judge(measured, reference, GUARD), Diverged), measured.losses
