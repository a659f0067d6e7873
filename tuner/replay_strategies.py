"""The strategies that `moetune replay` compares, one function each. Each starts with the default, as a sweep does."""

import random

from search_spaces.candidate import Candidate, KnobValue
from tuner.replay import Game, Strategy
from tuner.session import Told


def at_random(game: Game) -> None:
    """Every configuration once, in random order."""
    rest = [each for each in game.replay.table.candidates if each.id != game.default.id]
    random.Random(f"random/{game.seed}").shuffle(rest)
    for candidate in (game.default, *rest):
        game.measure(candidate)


def tpe(game: Game) -> None:
    """The sampler of `moetune run`, told what a sweep would tell it."""
    from tuner.proposer import Proposer  # optuna: half a second, and only for this strategy

    proposer = Proposer(game.legal, "minimize", game.seed, min(game.trials, game.legal.count))
    candidate: Candidate | None = game.default
    proposer.adopt(0, game.default)
    while candidate is not None:
        found = game.measure(candidate)
        proposer.tell(game.asked - 1, "infeasible" if found is None else "measured", found)
        candidate = proposer.propose(game.asked)


def walls(game: Game) -> None:
    """What the wall of the best one so far asks for first, then TPE: `search.strategy: walls` of `moetune run`."""
    from tuner.walls_search import WallsProposer

    proposer = WallsProposer(game.legal, "minimize", game.seed, min(game.trials, game.legal.count))
    candidate: Candidate | None = game.default
    proposer.adopt(0, game.default)
    while candidate is not None:
        found = game.measure(candidate)
        told: Told = "infeasible" if found is None else "measured"
        proposer.tell(game.asked - 1, told, found, game.wall_of(candidate))
        candidate = proposer.propose(game.asked)


def one_factor(game: Game) -> None:
    """By hand: from the default change one knob at a time, keep what was faster, go round until nothing helps.

    The knobs are taken in an order that the seed decides: which one comes first is the tuner's guess, and matters.
    """
    best, best_s = game.default, game.measure(game.default)
    knobs = [knob for knob in game.legal.space.knobs if len(knob.choices) > 1]
    random.Random(f"one-factor/{game.seed}").shuffle(knobs)
    tried = {best.id}
    helped = True
    while helped:
        helped = False
        for knob in knobs:
            for candidate in _neighbours(game, best, knob.name, knob.choices):
                if candidate.id in tried:
                    continue
                tried.add(candidate.id)
                found = game.measure(candidate)
                if found is not None and (best_s is None or found < best_s):
                    best, best_s, helped = candidate, found, True


def _neighbours(game: Game, near: Candidate, name: str, choices: tuple[KnobValue, ...]) -> list[Candidate]:
    """Recorded candidates that differ from `near` in one knob, and in the knobs that come and go with it."""
    space = game.legal.space
    values = space.values(near)
    if name not in values:
        return []
    changed = (space.canonical({**values, name: choice}) for choice in choices if choice != values[name])
    return [candidate for candidate in changed if candidate in game.legal]


STRATEGIES: dict[str, Strategy] = {"random": at_random, "tpe": tpe, "one-factor": one_factor, "walls": walls}
