"""Strategy "walls": from the best configuration so far, try what the guides name against the wall it stands at.

The Three Walls workflow by itself: profile, change one thing that the dominant bottleneck asks for, keep what is
faster, profile again, since "fixing one wall usually exposes the next one". When a wall has nothing left to try, the
other walls' settings follow; when none has, TPE goes on, with all that was measured. What buys memory with time is for
the memory wall only: elsewhere it is given back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Literal

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.legal import LegalSpace
from search_spaces.memory.fits import State
from search_spaces.space import Knob
from train_worker.profile import GIVEN_BACK, LARGER, SUGGESTED, Wall
from tuner.proposer import Proposer
from tuner.session import Told

Wanted = dict[str, KnobValue]
FAILURES = 2  # five trials of one FP8 recipe that the guard refuses were run on an H200 before this


class WallsProposer(Proposer):
    """Same contract as `Proposer`: legal, unseen, and the same again from the same past."""

    def __init__(
        self,
        legal: LegalSpace,
        direction: Literal["minimize", "maximize"],
        seed: int,
        expected_trials: int,
        fit: Callable[[Candidate], State | None] = lambda _: None,
    ) -> None:
        super().__init__(legal, direction, seed, expected_trials, fit)
        self._sign = 1.0 if direction == "minimize" else -1.0
        self._knobs = {knob.name: knob for knob in self.space.knobs}
        self._asked: dict[int, Candidate] = {}
        self._tries: defaultdict[tuple[str, KnobValue], list[int]] = defaultdict(lambda: [0, 0])  # ran, failed
        self._best: tuple[float, Candidate, Wall | None] | None = None

    def propose(self, number: int) -> Candidate | None:
        found = self._against_the_wall()
        if found is None:
            found = super().propose(number)
            if found is not None:
                self._asked[number] = found
        else:
            self.adopt(number, found)
        return found

    def adopt(self, number: int, candidate: Candidate) -> None:
        self._asked[number] = candidate
        super().adopt(number, candidate)

    def tell(self, number: int, told: Told, value: float | None = None, wall: Wall | None = None) -> None:
        self._keep(self._asked.pop(number), told, value, wall)
        super().tell(number, told, value)

    def restore(self, candidate: Candidate, told: Told, value: float | None = None, wall: Wall | None = None) -> None:
        self._keep(candidate, told, value, wall)
        super().restore(candidate, told, value)

    def _keep(self, candidate: Candidate, told: Told, value: float | None, wall: Wall | None) -> None:
        if told != "lost":
            for each in self.space.values(candidate).items():
                self._tries[each][told == "infeasible"] += 1
        if told == "measured" and value is not None:
            cost = self._sign * value
            # By id where equal: the same one whichever slot ended first.
            if self._best is None or (cost, candidate.id) < (self._best[0], self._best[1].id):
                self._best = (cost, candidate, wall)

    def _against_the_wall(self) -> Candidate | None:
        """The first setting of the best candidate's wall that gives an unseen candidate which fits."""
        _, best, wall = self._best or (0.0, None, None)
        if best is None or wall is None:
            return None
        for settings in self._lists(best, wall):
            for found in self._changed(best, settings):
                if found.id not in self._seen and self._fit(found) in (None, "fits"):
                    return found
        return None

    def _lists(self, best: Candidate, wall: Wall) -> list[tuple[str, ...]]:
        """Settings to try from `best`, in order. Recompute and offload cost time: they wait for the memory wall."""
        others = [SUGGESTED[each] for each in SUGGESTED if each not in (wall, "memory")]
        if wall == "memory":
            return [SUGGESTED[wall], *others]
        have = self.space.values(best)
        back = tuple(setting for setting in GIVEN_BACK if setting.partition("=")[0] in have)
        return [back, SUGGESTED[wall], *others]

    def _changed(self, best: Candidate, settings: tuple[str, ...]) -> Iterator[Candidate]:
        """Legal candidates with one of `settings` changed, the least different first.

        A knob that comes into being with it takes what another of the settings says. Where the rest of the candidate
        forbids the change, one knob of the rest gives way to its default. What never ran is not asked for again.
        """
        values = self.space.values(best)
        together = dict(
            told for setting in settings for told in self._choices_of(setting, values)[:1] if "=" in setting
        )
        for setting in settings:
            for name, value in self._choices_of(setting, values):
                if (values.get(name) == value and name in values) or self._hopeless(name, value):
                    continue
                wanted: Wanted = {name: value}
                companions = {each: told for each, told in together.items() if each not in values}
                companions |= self._opening(name, values)
                alone = list(self._walked(values, companions | wanted, wanted))
                yield from alone or self._making_room(values, companions, wanted)

    def _making_room(self, values: Wanted, companions: Wanted, wanted: Wanted) -> Iterator[Candidate]:
        """As `_walked`, with one other knob back at its default."""
        for other in values:
            default = self._knobs[other].default
            if other not in wanted and values[other] != default:
                yield from self._walked(values, companions | {other: default} | wanted, wanted)

    def _hopeless(self, name: str, value: KnobValue) -> bool:
        """Whether this value failed as often as `FAILURES` and never ran, wherever it was tried."""
        ran, failed = self._tries[name, value]
        return not ran and failed >= FAILURES

    def _choices_of(self, setting: str, values: Wanted) -> list[tuple[str, KnobValue]]:
        """(knob, value) pairs of "knob=value", "knob=larger" or "knob", as far as the space has them alive."""
        name, _, told = setting.partition("=")
        alive, now = self._choices.get(name, ()), values.get(name)
        if told == LARGER:
            numbers = [each for each in alive if isinstance(each, int) and isinstance(now, int) and each > now]
            return [(name, each) for each in sorted(numbers, reverse=True)]  # the largest that fits, then smaller
        return [(name, value) for value in alive if not told or str(value) == told]

    def _opening(self, name: str, values: Wanted) -> Wanted:
        """What brings a knob into being that the candidate lacks: a recipe needs FP8 to be on."""
        opened: Wanted = {}
        for condition in self._knobs[name].when:
            allowed = [
                each for each in self._choices.get(condition.knob, ()) if condition.holds({condition.knob: each})
            ]
            if not condition.holds(values) and allowed:
                opened |= {condition.knob: allowed[0]} | self._opening(condition.knob, values)
        return opened

    def _walked(self, values: Wanted, preferred: Wanted, wanted: Wanted) -> Iterator[Candidate]:
        """The legal candidate nearest to `values` with `preferred` values; nothing where `wanted` cannot be had."""

        def choose(knob: Knob, live: tuple[KnobValue, ...]) -> KnobValue:
            for told in (preferred, values):
                if knob.name in told and told[knob.name] in live:
                    return told[knob.name]
            return knob.default if knob.default in live else live[0]

        found = self.legal.walk(choose)
        have = self.space.values(found)
        if all(name in have and have[name] == value for name, value in wanted.items()):
            yield found
