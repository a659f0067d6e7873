"""How well a search strategy does on a recorded table: it measures, chooses, and is judged by what the table knows."""

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import fmean

from search_spaces.candidate import Candidate
from search_spaces.legal import LegalSpace
from search_spaces.shapes import Noun
from train_worker.profile import Wall
from train_worker.replay import Replay
from tuner.objective import Objective, score
from tuner.replay_space import table_space

NEAR = 1.02  # "within 2% of the best"


class BudgetSpent(Exception):
    """No trial is left: the strategy ends here."""


class Game:
    """One strategy on one table: hands out answers, counts what they cost, remembers the best one seen.

    `trials`: how many a strategy may run; every measurement counts. The answers depend on `seed` and on the number of
    the trial. Raises InputError for a table that cannot be searched.
    """

    def __init__(self, replay: Replay, legal: LegalSpace, trials: int, seed: int) -> None:
        self.replay, self.legal, self.trials, self.seed = replay, legal, trials, seed
        self.default = replay.table.baseline
        self.seconds_spent = self.seconds_wasted = 0.0
        self.winner: Candidate | None = None
        self.near_after: int | None = None
        self.asked = 0
        self._best = float("inf")
        self._costs = {name: fmean(row.wall_s for row in rows) for name, rows in replay.table.by_id.items()}

    def measure(self, candidate: Candidate) -> float | None:
        """Run one trial: its median step time in seconds, None where it did not run. Raises BudgetSpent."""
        if self.asked == self.trials:
            raise BudgetSpent
        draw = random.Random(f"{self.seed}/{self.asked}")
        self.asked += 1
        found = score(self.replay.answer(candidate, draw), Objective())
        cost = self._costs[candidate.id]
        self.seconds_spent += cost
        if found is None:
            self.seconds_wasted += cost
        elif found < self._best:
            self._best, self.winner = found, candidate
        if self.near_after is None and self.true_s <= NEAR * self.replay.best_s:
            self.near_after = self.asked
        return found

    def wall_of(self, candidate: Candidate) -> Wall | None:
        """Where the table's first profiled trial of it stood."""
        parts = self.replay.table.measured_of(candidate.id)
        return next((part.profile.wall for part in parts if part.profile is not None), None)

    @property
    def true_s(self) -> float:
        """What the table knows of the configuration that looks best so far, seconds; infinite before any ran."""
        return self.replay.values[self.winner.id] if self.winner else float("inf")

    @property
    def regret_percent(self) -> float:
        """How much slower the winner really is than the table's best."""
        return 100 * (self.true_s / self.replay.best_s - 1)


Strategy = Callable[[Game], None]


class Spread(Noun):
    """Over the seeds; `p90` by the nearest rank. None stands where a value is infinite: nothing ran."""

    mean: float | None
    p90: float | None


class Reached(Spread):
    """`never`: seeds that did not get there. They count as one trial more than they could have: at least that."""

    never: int


class ReplayResult(Noun):
    """What `moetune replay --json` prints. Seconds are means over the seeds, as the table's trials took them.

    `regret_percent` is against the best noise-adjusted row (`train_worker.replay`); `noise_percent` is the
    standard deviation over trials of one configuration.
    """

    table: str
    strategy: str
    trials: int
    seeds: int
    configurations: int
    noise_percent: float
    best_id: str
    best_step_time_s: float
    default_step_time_s: float
    default_regret_percent: float
    regret_percent: Spread
    seconds_spent: float
    seconds_wasted: float
    trials_to_within_2_percent: Reached


def compete(replay: Replay, name: str, strategies: Mapping[str, Strategy], trials: int, seeds: int) -> ReplayResult:
    """Play strategy `name` with seeds 0 .. `seeds` - 1. Raises InputError for a table that cannot be searched."""
    legal = table_space(replay.table)
    most = min(trials, legal.count)
    games = [played(Game(replay, legal, trials, seed), strategies[name]) for seed in range(seeds)]
    reached = [float(most + 1 if game.near_after is None else game.near_after) for game in games]
    spread = spread_over(reached)
    best = min(replay.values, key=replay.values.__getitem__)
    default_s = replay.values.get(replay.table.baseline.id, float("inf"))
    return ReplayResult(
        table=replay.table.where,
        strategy=name,
        trials=trials,
        seeds=seeds,
        configurations=legal.count,
        noise_percent=100 * replay.spread,
        best_id=best,
        best_step_time_s=replay.best_s,
        default_step_time_s=default_s,
        default_regret_percent=100 * (default_s / replay.best_s - 1),
        regret_percent=spread_over([game.regret_percent for game in games]),
        seconds_spent=fmean(game.seconds_spent for game in games),
        seconds_wasted=fmean(game.seconds_wasted for game in games),
        trials_to_within_2_percent=Reached(
            mean=spread.mean, p90=spread.p90, never=sum(game.near_after is None for game in games)
        ),
    )


def played(game: Game, strategy: Strategy) -> Game:
    """The game after the strategy has used up its trials, or ended before."""
    with suppress(BudgetSpent):
        strategy(game)
    return game


def spread_over(values: list[float]) -> Spread:
    """Mean and 90th percentile of what each search came to."""
    ordered = sorted(values)
    rank = -(-9 * len(ordered) // 10)  # the nearest rank, from 1
    numbers = (fmean(ordered), ordered[rank - 1])
    mean, p90 = (None if number == float("inf") else number for number in numbers)
    return Spread(mean=mean, p90=p90)
