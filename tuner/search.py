"""The search as Ray Tune sees it: the adapter between a sweep's session and Tune."""

from typing import Any, Literal, Protocol

from ray.tune.search import Searcher


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
