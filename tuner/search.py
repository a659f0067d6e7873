"""The search: an Optuna study that proposes legal, unseen candidates, and its adapter to Ray Tune.

The study lives in memory and is rebuilt from the journal: one truth, so nothing can disagree with it after a
crash. Trial n's sampler is seeded from (seed, n), so a proposal depends on the seed, the space and what was
told before, and on nothing else: the same journal gives the same next candidate, resumed or not.
"""

import hashlib
import json
import logging
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import Trial, TrialState, create_trial
from ray.tune.search import Searcher

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.space import SearchSpace
from tuner.session import Told

STARTUP_SHARE = 4  # a quarter of the trials is drawn at random, 4 at least: TPE needs something to go by
CONSTRAINT = "runs"  # > 0: the trial did not run (out of memory, diverged, hung, rejected)

logger = logging.getLogger(__name__)


class Proposer:
    """Proposes candidates out of `legal`; never the same one twice. Optuna's TPE leads, legality has the last word.

    What TPE draws is moved to the nearest legal unseen candidate (fewest knobs changed, ties drawn by seed), so
    no proposal is wasted on a configuration that the rules refuse.
    """

    def __init__(
        self,
        space: SearchSpace,
        legal: Sequence[Candidate],
        direction: Literal["minimize", "maximize"],
        seed: int,
        expected_trials: int,
    ) -> None:
        self.space, self.legal, self.seed = space, list(legal), seed
        self.startup = max(expected_trials // STARTUP_SHARE, 4)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction=direction)
        self._codes = _codes([space.values(candidate) for candidate in self.legal], space)
        self._index = {candidate.id: row for row, candidate in enumerate(self.legal)}
        self._unseen = np.ones(len(self.legal), dtype=bool)
        self._choices = _live_choices([space.values(candidate) for candidate in self.legal], space)
        self._running: dict[int, Trial] = {}

    def propose(self, number: int) -> Candidate | None:
        """The candidate of trial `number`, or None once every legal candidate has been seen."""
        if not self._unseen.any():
            return None
        self._study.sampler = _sampler(_derived(self.seed, number), self.startup)
        trial = self._study.ask()
        drawn = self.space.canonical(self._walk(trial))
        if self._fresh(drawn):
            self._running[number] = trial
            self._mark(drawn)
            return drawn
        # TPE reads complete and pruned trials only; a failed one is as if it had never been asked.
        self._study.tell(trial, state=TrialState.FAIL)
        chosen = self._nearest(drawn, number)
        self.adopt(number, chosen)
        return chosen

    def adopt(self, number: int, candidate: Candidate) -> None:
        """Trial `number` runs `candidate`, whoever chose it: the baseline, a resumed trial, a repair."""
        self._study.enqueue_trial(self._params(candidate))
        trial = self._study.ask()
        self._walk(trial)
        self._running[number] = trial
        self._mark(candidate)

    def tell(self, number: int, told: Told, value: float | None = None) -> None:
        """How trial `number` ended. "infeasible" teaches the sampler to stay away; "lost" teaches nothing."""
        trial = self._running.pop(number)
        if told == "lost":
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(CONSTRAINT, -1.0 if told == "measured" else 1.0)
        if told == "measured":
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def restore(self, candidate: Candidate, told: Told, value: float | None = None) -> None:
        """Put a trial from the journal into the study as it ended."""
        params = self._params(candidate)
        state = {"measured": TrialState.COMPLETE, "infeasible": TrialState.PRUNED, "lost": TrialState.FAIL}[told]
        constraint = -1.0 if told == "measured" else 1.0
        self._study.add_trial(
            create_trial(
                state=state,
                value=value if told == "measured" else None,
                params=params,
                distributions={name: CategoricalDistribution(self._choices[name]) for name in params},
                constraints={} if told == "lost" else {CONSTRAINT: constraint},
            )
        )
        self._mark(candidate)

    def _walk(self, trial: Trial) -> dict[str, KnobValue]:
        """Ask for the active knobs that have more than one live choice, in the order of the space."""
        decided: dict[str, KnobValue] = {}
        for knob in self.space.knobs:
            if not self.space.active(decided, knob):
                continue
            live = self._choices.get(knob.name, ())
            if len(live) > 1:
                decided[knob.name] = trial.suggest_categorical(knob.name, live)
            else:
                decided[knob.name] = live[0] if live else knob.default
        return decided

    def _params(self, candidate: Candidate) -> dict[str, KnobValue]:
        """What `_walk` would have asked for this candidate; a value outside the live ones is left out."""
        values = self.space.values(candidate)
        live = {name: choices for name, choices in self._choices.items() if len(choices) > 1 and name in values}
        return {name: values[name] for name, choices in live.items() if values[name] in choices}

    def _fresh(self, candidate: Candidate) -> bool:
        row = self._index.get(candidate.id)
        return row is not None and bool(self._unseen[row])

    def _mark(self, candidate: Candidate) -> None:
        if (row := self._index.get(candidate.id)) is not None:
            self._unseen[row] = False

    def _nearest(self, drawn: Candidate, number: int) -> Candidate:
        code = _codes([self.space.values(drawn)], self.space)[0]
        distance = (self._codes != code).sum(axis=1)
        distance[~self._unseen] = distance.max() + 1
        rows = np.flatnonzero(distance == distance.min())
        return self.legal[int(random.Random(_derived(self.seed, number)).choice(rows))]


def _sampler(seed: int, startup_trials: int) -> optuna.samplers.TPESampler:
    """TPE over groups of knobs that exist together: what a conditional space needs. `group` is marked experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=startup_trials)


def _derived(seed: int, number: int) -> int:
    """A 32-bit seed for trial `number`: unrelated numbers for neighbouring trials and seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")


def _codes(rows: Sequence[Mapping[str, KnobValue]], space: SearchSpace) -> "np.ndarray[Any, np.dtype[np.int16]]":
    """One row a candidate, one column a knob: the index of its choice, -1 where the knob does not exist."""
    known = [{json.dumps(choice): index for index, choice in enumerate(knob.choices)} for knob in space.knobs]
    table = np.full((len(rows), len(space.knobs)), -1, dtype=np.int16)
    for row, values in enumerate(rows):
        for column, knob in enumerate(space.knobs):
            if knob.name in values:
                table[row, column] = known[column].get(json.dumps(values[knob.name]), -2)
    return table


def _live_choices(rows: Sequence[Mapping[str, KnobValue]], space: SearchSpace) -> dict[str, tuple[KnobValue, ...]]:
    """For each knob the choices that some legal candidate has: what no candidate can have is never asked."""
    live: dict[str, tuple[KnobValue, ...]] = {}
    for knob in space.knobs:
        used = {json.dumps(values[knob.name]) for values in rows if knob.name in values}
        live[knob.name] = tuple(choice for choice in knob.choices if json.dumps(choice) in used)
    return live


class Session(Protocol):
    """What the adapter needs of a sweep (`tuner.session.SweepSession`)."""

    def next_job(self, handle: str) -> str | Literal["wait", "done"]:
        """A `TrialJob` as JSON for Tune's trial `handle`, or what to do instead."""

    def finish(self, handle: str, result_json: str | None) -> None:
        """A `SlotResult` as JSON; None where Tune lost the trial."""

    def fail(self, error: Exception) -> None:
        """Something broke inside: stop, and raise it when Tune is done."""


class TuneSearcher(Searcher):
    """Ray Tune's side: hands out jobs, takes results. It never raises, since that would end the sweep."""

    def __init__(self, session: Session) -> None:
        super().__init__(metric=None, mode=None)
        self._session = session

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        try:
            answer = self._session.next_job(trial_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, Tune would end the sweep over it without a word
            self._session.fail(error)
            answer = "done"
        if answer == "wait":
            return None
        return str(Searcher.FINISHED) if answer == "done" else {"job": answer}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        try:
            self._session.finish(trial_id, None if error or not result else result.get("result"))
        except Exception as fault:  # noqa: BLE001 - as above: the sweep stops, and the command says why
            self._session.fail(fault)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles the searcher into a file that nothing of ours reads: leave the session out of it."""
        return {key: value for key, value in self.__dict__.items() if key != "_session"}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal holds the state, and a pickled searcher would be a second truth."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep is resumed from its journal: moetune run SWEEP --resume")

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        return True  # the space is the session's; Tune has none to give
