"""Strategies on a recorded table: only its rows can be tried, the budget holds, and the table is the judge."""

import contextlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.candidate import Candidate
from search_spaces.errors import InputError
from tests.train_worker.recorded import BASELINE, CANDIDATES, measured, row, rows, write
from train_worker.outcome import OutOfMemory
from train_worker.recorded_table import RecordedTable
from train_worker.replay import Replay
from tuner.cli import main
from tuner.replay import BudgetSpent, Game, Strategy, compete
from tuner.replay_space import table_space
from tuner.replay_strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
COUNT = len(CANDIDATES)
IDS = [each.id for each in CANDIDATES]


def table(times: list[float | None]) -> RecordedTable:
    return RecordedTable(rows(dict(zip(IDS, times, strict=True))), "table.jsonl")


def cost(candidate: Candidate) -> float:
    """Every knob has a best value whatever the others are: what one change at a time finds."""
    return 0.2 * (
        (1.0 if candidate.knobs["micro_batch_size"] == 8 else 1.2)
        * (1.0 if candidate.knobs["moe_token_dispatcher_type"] == "alltoall" else 1.1)
        * (1.05 if candidate.knobs["fp8"] else 1.0)
        * {None: 1.0, "moe": 1.4, "moe_act": 1.1}[candidate.knobs.get("recompute_modules")]
        * (0.9 if candidate.env else 1.0)
    )


SEPARABLE = table([cost(each) for each in CANDIDATES])


def game(found: RecordedTable, trials: int = COUNT, seed: int = 0) -> Game:
    replay = Replay(found)
    return Game(replay, table_space(found), trials, seed)


def test_the_legal_points_are_the_rows() -> None:
    legal = table_space(SEPARABLE)
    assert sorted(each.id for each in legal) == sorted(IDS)
    assert legal.space.default() == BASELINE
    assert legal.total > legal.count == COUNT


def test_walls_reads_the_recorded_profiles() -> None:
    """All rows stand at the compute wall; of its settings the table has FP8 beside the baseline's other knobs."""
    played = game(SEPARABLE, trials=2)
    asked: list[Candidate] = []
    answer = played.measure

    def measure(candidate: Candidate) -> float | None:
        asked.append(candidate)
        return answer(candidate)

    played.measure = measure  # type: ignore[method-assign]
    with contextlib.suppress(BudgetSpent):
        STRATEGIES["walls"](played)
    assert asked[0] == BASELINE
    assert asked[1].knobs == BASELINE.knobs | {"fp8": "hybrid", "fp8_recipe": "blockwise"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8_recipe": "blockwise"}, "not those of a point"),
        ({"no_such_knob": 1}, "unknown knobs: no_such_knob"),
        ({"moe_grouped_gemm": 1}, "two choices of moe_grouped_gemm are equal"),
    ],
)
def test_a_row_that_is_no_point_is_refused(changes: dict[str, str], said: str) -> None:
    stranger = row(Candidate(knobs=BASELINE.knobs | changes), measured((0.2,) * 5), 99)
    with pytest.raises(InputError, match=said):
        table_space(RecordedTable([*SEPARABLE.rows, stranger], "table.jsonl"))


@pytest.mark.parametrize("name", ["random", "tpe"])
@settings(max_examples=5, deadline=None)
@given(times=st.lists(st.floats(0.1, 2.0), min_size=COUNT, max_size=COUNT))
def test_trying_everything_without_noise_leaves_no_regret(name: str, times: list[float]) -> None:
    found = compete(Replay(table(list(times))), name, STRATEGIES, COUNT, 1)
    assert found.regret_percent.mean == pytest.approx(0, abs=1e-9)
    assert found.trials_to_within_2_percent.never == 0
    assert found.noise_percent == 0


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_starts_with_the_default_repeats_nothing_and_keeps_to_its_budget(name: str) -> None:
    asked: list[str] = []

    class Watched(Game):
        def measure(self, candidate: Candidate) -> float | None:
            found = super().measure(candidate)
            asked.append(candidate.id)
            return found

    replay = Replay(SEPARABLE)

    def strategy(played: Game) -> None:
        STRATEGIES[name](Watched(replay, played.legal, 12, played.seed))

    compete(replay, "watched", {"watched": strategy}, 12, 1)
    assert asked[0] == BASELINE.id
    assert len(asked) == len(set(asked)) <= 12


def test_one_change_at_a_time_finds_the_best_where_knobs_do_not_interact() -> None:
    found = compete(Replay(SEPARABLE), "one-factor", STRATEGIES, COUNT, 10)
    assert found.regret_percent.p90 == pytest.approx(0, abs=1e-9)
    assert found.best_id == min(CANDIDATES, key=cost).id
    assert found.default_regret_percent == pytest.approx(100 * (1.2 / 0.9 - 1))


def test_one_change_at_a_time_stops_where_only_two_at_once_would_help() -> None:
    """Micro-batch 8 pays only with FP8, and FP8 only with micro-batch 8."""
    good = {"micro_batch_size": 8, "fp8": "hybrid"}
    plain = {"micro_batch_size": 4, "fp8": None}
    times = []
    for each in CANDIDATES:
        both, neither = (all(each.knobs[k] == v for k, v in want.items()) for want in (good, plain))
        times.append(
            (0.1 if both else 0.2 if neither else 0.3) + 0.01 * (each.knobs["recompute_granularity"] is not None)
        )
    found = compete(Replay(table(times)), "one-factor", STRATEGIES, COUNT, 10)
    assert found.regret_percent.mean == pytest.approx(100)
    assert found.trials_to_within_2_percent.never == 10
    assert found.trials_to_within_2_percent.mean == COUNT + 1
    large = compete(Replay(table(times)), "one-factor", STRATEGIES, 10**24, 10)
    assert large.trials_to_within_2_percent.mean == COUNT + 1  # no search has more trials than the table configurations
    assert compete(Replay(table(times)), "random", STRATEGIES, COUNT, 10).regret_percent.mean == pytest.approx(0)


def test_trials_that_do_not_run_are_wasted_seconds() -> None:
    times: list[float | None] = [0.2] * COUNT
    times[5] = times[6] = None
    found = compete(Replay(table(times)), "random", STRATEGIES, COUNT, 3)
    assert found.seconds_wasted == 2 * 4.0
    assert found.seconds_spent == COUNT * 4.0


def noisy_table() -> RecordedTable:
    """As SEPARABLE, with repeats of the baseline that differ by 10% or so."""
    chance = random.Random(5)
    found = rows({each.id: cost(each) for each in CANDIDATES}, repeats=0)
    for number in range(12):
        seconds = cost(BASELINE) * math.exp(chance.gauss(0, 0.1))
        found.append(row(BASELINE, measured((seconds,) * 5), 100 + number, repeat=number + 1))
    return RecordedTable(found, "noisy.jsonl")


def test_the_winner_is_chosen_by_noisy_answers_and_judged_by_the_table() -> None:
    replay = Replay(noisy_table())
    fooled = [game(noisy_table(), seed=seed) for seed in range(20)]
    for each in fooled:
        STRATEGIES["random"](each)
    assert len({each.winner for each in fooled}) > 1, "noise of 10% must sometimes hide a difference of 5%"
    for each in fooled:
        assert each.winner is not None
        assert each.true_s == replay.values[each.winner.id]
        assert each.regret_percent >= 0


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_the_seeds_decide(name: str) -> None:
    replay = Replay(noisy_table())
    assert compete(replay, name, STRATEGIES, 10, 3) == compete(replay, name, STRATEGIES, 10, 3)


def test_a_spread_over_seeds_is_the_mean_and_the_nearest_rank() -> None:
    """Each of 10 seeds measures one configuration more than the seed before: times fall, regrets are known."""
    order = sorted(CANDIDATES, key=lambda each: each != BASELINE)
    times = {each.id: 0.2 / (1 + number / 10) for number, each in enumerate(order)}
    found = table([times[name] for name in IDS])

    def strategy(played: Game) -> None:
        for candidate in order[: played.seed + 1]:
            played.measure(candidate)

    steps: dict[str, Strategy] = {"steps": strategy}
    result = compete(Replay(found), "steps", steps, COUNT, 10)
    best = 1 + (COUNT - 1) / 10
    regrets = sorted(100 * (best / (1 + seed / 10) - 1) for seed in range(10))
    assert result.regret_percent.mean == pytest.approx(sum(regrets) / 10)
    assert result.regret_percent.p90 == pytest.approx(regrets[8])


def test_the_command_answers_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "table.jsonl", list(noisy_table().rows))
    assert main(["replay", str(path), "--strategy", "random", "--trials", "8", "--seeds", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {"table", "strategy", "trials", "seeds", "seconds_spent", "seconds_wasted"} <= found.keys()
    assert found["regret_percent"].keys() == {"mean", "p90"}
    assert found["trials_to_within_2_percent"].keys() == {"mean", "p90", "never"}
    assert (found["trials"], found["seeds"], found["strategy"]) == (8, 4, "random")
    assert main(["replay", str(path), "--strategy", "one-factor", "--trials", "8", "--seeds", "2"]) == 0
    assert "regret" in capfd.readouterr().out


def test_wrong_input_is_exit_2_and_a_table_without_a_measurement_is_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "table.jsonl", list(SEPARABLE.rows))
    assert main(["replay", str(path), "--strategy", "tpee", "--trials", "0"]) == 2
    said = capsys.readouterr().err
    assert "did you mean tpe?" in said
    assert "--trials 0" in said
    assert main(["replay", str(path), "--strategy", "random", "--trials", "3", "--seeds", "1000000000"]) == 2
    assert "--seeds 1000000000: at most 10,000" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "absent"), "--strategy", "tpe", "--trials", "3"]) == 2
    failed = row(BASELINE, OutOfMemory(where="device", phase="warmup", detail=""), repeat=1)
    write(path, [failed])
    assert main(["replay", str(path), "--strategy", "tpe", "--trials", "3"]) == 3


def test_it_needs_no_ray_mlflow_or_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "table.jsonl", list(SEPARABLE.rows))
    words = ["replay", str(path), "--strategy", "tpe", "--trials", "6", "--seeds", "1"]
    script = (
        f"import sys\nfrom tuner.cli import main\nassert main({words!r}) == 0\n"
        "print(sorted({'ray', 'mlflow', 'torch', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
