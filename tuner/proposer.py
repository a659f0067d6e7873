"""The search: an Optuna study that proposes legal, unseen candidates.

The study lives in memory and is rebuilt from the journal: one truth, so nothing can disagree with it after a
crash. Trial n's sampler is seeded from (seed, n), so a proposal depends on the seed, the space and what was
told before, and on nothing else: the same journal gives the same next candidate, resumed or not.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Literal

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import Trial, TrialState, create_trial

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.legal import LegalSpace
from search_spaces.memory.fits import State
from search_spaces.space import Knob
from train_worker.profile import Wall
from tuner.session import Told

STARTUP_SHARE = 4  # a quarter of the trials is drawn at random, 4 at least: TPE needs something to go by
NEAR_ATTEMPTS, NEAR_SHARE = 64, 16  # tries for an unseen neighbour: 16 with one knob changed, 16 with two, ...
FAR_ATTEMPTS = 512  # more tries where memory refuses most: 0.2 s at 0.4 ms a draw
SCAN_LIMIT = 50_000  # legal points looked through when no try helps: some 20 s, once, at the end of a small space
CONSTRAINT = "runs"  # > 0: the trial did not run (out of memory, diverged, hung, rejected)


class Proposer:
    """Proposes legal candidates, never the same one twice. Optuna's TPE leads, legality has the last word.

    A proposal is a walk through the legal space: each knob takes TPE's suggestion where a legal point goes on from it,
    else one of the choices still open, so no proposal is wasted on a configuration that the rules refuse.

    `fit` judges memory (MEM-01), which reads too many knobs to be in the legal space: a drawn candidate that it refuses
    is replaced by a neighbour that fits; one that is "tight" only runs when nothing else is found. What was passed over
    is not told to TPE, so that a resumed search goes on as an uninterrupted one.
    """

    def __init__(
        self,
        legal: LegalSpace,
        direction: Literal["minimize", "maximize"],
        seed: int,
        expected_trials: int,
        fit: Callable[[Candidate], State | None] = lambda _: None,
    ) -> None:
        self._fit = fit
        self.legal, self.space, self.seed = legal, legal.space, seed
        self.startup = max(expected_trials // STARTUP_SHARE, 4)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction=direction)
        self._choices = legal.choices_alive()
        self._seen: set[str] = set()
        self._legal_seen = 0
        self._running: dict[int, Trial] = {}

    def propose(self, number: int) -> Candidate | None:
        """The candidate of trial `number`, or None once every legal candidate (that fits) has been seen."""
        if self._legal_seen == self.legal.count:
            return None
        source = random.Random(_derived(self.seed, number))
        self._study.sampler = _sampler(_derived(self.seed, number), self.startup)
        trial = self._study.ask()
        moved = False

        def choose(knob: Knob, live: tuple[KnobValue, ...]) -> KnobValue:
            nonlocal moved
            wanted = self._suggested(trial, knob)
            if wanted in live:
                return wanted
            moved = True
            return source.choice(live)

        drawn = self.legal.walk(choose)
        welcome = drawn.id not in self._seen and self._fit(drawn) in (None, "fits")
        if not moved and welcome:
            self._running[number] = trial
            self._mark(drawn)
            return drawn
        # TPE reads complete and pruned trials only; a failed one is as if it had never been asked.
        self._study.tell(trial, state=TrialState.FAIL)
        chosen = drawn if welcome else self._near(drawn, source)
        if chosen is not None:
            self.adopt(number, chosen)
        return chosen

    def adopt(self, number: int, candidate: Candidate) -> None:
        """Trial `number` runs `candidate`, whoever chose it: the baseline, a resumed trial, a repair."""
        self._study.enqueue_trial(self._params(candidate))
        trial = self._study.ask()
        decided = self.space.values(candidate)
        for knob in self.legal.order:
            if knob.name in decided:
                self._suggested(trial, knob)
        self._running[number] = trial
        self._mark(candidate)

    def tell(self, number: int, told: Told, value: float | None = None, wall: Wall | None = None) -> None:  # noqa: ARG002
        """How trial `number` ended. "infeasible" teaches the sampler to stay away; "lost" teaches nothing.

        `wall`: where it stood, for strategies that go by it.
        """
        trial = self._running.pop(number)
        if told == "lost":
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(CONSTRAINT, -1.0 if told == "measured" else 1.0)
        if told == "measured":
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def restore(
        self,
        candidate: Candidate,
        told: Told,
        value: float | None = None,
        wall: Wall | None = None,  # noqa: ARG002
    ) -> None:
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

    def _suggested(self, trial: Trial, knob: Knob) -> KnobValue:
        """What TPE says for a knob that has more than one live choice; the others are not asked."""
        live = self._choices.get(knob.name, ())
        if len(live) > 1:
            return trial.suggest_categorical(knob.name, live)
        return live[0] if live else knob.default

    def _params(self, candidate: Candidate) -> dict[str, KnobValue]:
        """What TPE would have been asked for this candidate; a value outside the live ones is left out."""
        values = self.space.values(candidate)
        live = {name: choices for name, choices in self._choices.items() if len(choices) > 1 and name in values}
        return {name: values[name] for name, choices in live.items() if values[name] in choices}

    def _mark(self, candidate: Candidate) -> None:
        if candidate.id not in self._seen:
            self._seen.add(candidate.id)
            self._legal_seen += candidate in self.legal

    def _near(self, drawn: Candidate, source: random.Random) -> Candidate | None:
        """An unseen legal candidate that fits and differs from `drawn` in few knobs; any where none is found soon.

        A tight one where none fits; None where all unseen ones are refused.
        """
        tight = drawn if drawn.id not in self._seen and self._fit(drawn) == "tight" else None
        for found in chain(self._neighbours(drawn, source), islice(self.legal, SCAN_LIMIT)):
            if found.id in self._seen:
                continue
            state = self._fit(found)
            if state in (None, "fits"):
                return found
            if state == "tight" and tight is None:
                tight = found
        return tight

    def _neighbours(self, drawn: Candidate, source: random.Random) -> Iterator[Candidate]:
        """Legal candidates ever farther from `drawn`; seen ones among them. Far ones only where some were refused."""
        values = self.space.values(drawn)
        refused = 0
        for attempt in range(NEAR_ATTEMPTS + FAR_ATTEMPTS):
            if attempt >= NEAR_ATTEMPTS and not refused:
                return
            changed = set(source.sample(sorted(values), min(1 + attempt // NEAR_SHARE, len(values))))

            def choose(knob: Knob, live: tuple[KnobValue, ...], changed: set[str] = changed) -> KnobValue:
                kept = values.get(knob.name, knob.default)
                return kept if knob.name not in changed and kept in live else source.choice(live)

            found = self.legal.walk(choose)
            refused += found.id not in self._seen
            yield found


def _sampler(seed: int, startup_trials: int) -> optuna.samplers.TPESampler:
    """TPE over groups of knobs that exist together: what a conditional space needs. `group` is marked experimental.

    No constant liar, which would count what runs by what was first drawn for it: the journal holds what runs instead.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, n_startup_trials=startup_trials, constant_liar=False
        )


def _derived(seed: int, number: int) -> int:
    """A 32-bit seed for trial `number`: unrelated numbers for neighbouring trials and seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
