"""What screening lets through on a CPU, the worker measures: random legal points of `moe-full`, on two real ranks.

Of 190 such points (three models, fp32 and bf16) every one was measured; before rules RUN-13, RUN-14 and RUN-15 18 of
the first 40 were not.
"""

import random
from pathlib import Path

from search_spaces.named_spaces import MOE_FULL
from search_spaces.screen import screen
from search_spaces.shapes import ClusterShape, StackVersions
from tests.train_worker.gang_script import Case, run_gang
from tests.train_worker.megatron_trials import HALF, MLA, MODEL, RICH, SHORT
from train_worker.job import TrialJob

POINTS, SEED = 15, 11
TWO = ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=2)
STACK = StackVersions(megatron_core="0.19.2", torch="2.11.0")
# What two ranks and four layers leave of the sizes, so that few points are alike.
SPACE = MOE_FULL.restrict(
    {
        "pipeline_model_parallel_size": [1, 2],
        "virtual_pipeline_model_parallel_size": [None, 2],
        "num_layers_in_first_pipeline_stage": [None, 1],
    }
)


def drawn(number: int, source: random.Random) -> Case:
    model = (MODEL, RICH, MLA)[number % 3]
    training = (SHORT, HALF.model_copy(update={"optimizer": "adam", "learning_rate": 1e-3}))[number % 2]
    training = training.model_copy(update={"measured_steps": 1})
    candidate = screen(SPACE, model, TWO, training, STACK).draw(source)
    return Case(
        TrialJob(
            trial_id=f"random-{number}",
            candidate=candidate,
            model=model,
            cluster=TWO,
            training=training,
            seed=7,
            time_limit_s=100,
        )
    )


def test_a_legal_point_is_measured(tmp_path: Path) -> None:
    source = random.Random(SEED)
    cases = {f"{number}": drawn(number, source) for number in range(POINTS)}
    answers = run_gang(cases, tmp_path)
    default = SPACE.default()
    failed = {
        cases[name].job.candidate.label(default): str(answer.get("reason") or answer.get("error") or answer["kind"])
        for name, ranks in answers.items()
        for answer in ranks
        if answer.get("kind") != "measured"
    }
    assert not failed
