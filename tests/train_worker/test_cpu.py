"""The CPU shim: each row is needed by a real trial, and everything is put back afterwards."""

from typing import Any

import pytest

from tests.train_worker.gang_script import Case, run_gang
from tests.train_worker.test_megatron import EXPERT, SHORT, case

# row left out -> what then fails, in one process. `manual_seed`, `_set_cuda_rng_state` and `_get_share_storage` are not
# here: without them nothing fails, but weights are not seeded, dropout is not repeated, and a C++ compiler runs.
NEEDED = {
    "current_device": "RuntimeError",
    "zeros": "RuntimeError",
    "ones": "RuntimeError",
    "tensor": "RuntimeError",
    "type": "AssertionError",
    "get_rng_state": "RuntimeError",
    "_get_cuda_rng_state": "RuntimeError",
    "current_stream": "RuntimeError",
    "FP8GlobalStateManager": "NameError",
    "activation_recompute_forward": "NameError",
    "fp8_autocast": "NameError",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    selective = {"recompute_granularity": "selective", "recompute_modules": "layernorm"}
    job = case(
        1, SHORT.model_copy(update={"measured_steps": 1}), **EXPERT | {"expert_model_parallel_size": 1} | selective
    ).job
    cases = {"whole": Case(job)} | {row: Case(job, without=(row,)) for row in NEEDED}
    return run_gang(cases, tmp_path_factory.mktemp("ablation"))


def test_with_all_rows_the_trial_runs(answers: dict[str, list[dict[str, Any]]]) -> None:
    assert answers["whole"][0]["kind"] == "measured"


@pytest.mark.parametrize("row", NEEDED)
def test_row_is_needed(answers: dict[str, list[dict[str, Any]]], row: str) -> None:
    """Where this fails after an upgrade, Megatron no longer needs the row: delete it."""
    assert answers[row][0].get("error", "no error").startswith(NEEDED[row])


def test_everything_is_put_back(answers: dict[str, list[dict[str, Any]]]) -> None:
    assert not {name: ranks[0]["shim_left"] for name, ranks in answers.items() if ranks[0]["shim_left"]}
