"""What every Store must do, run on each of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.errors import MoetuneError
from tests.tracking.runs import prepare, read_runs
from tests.tracking.sample import sweep
from tracking.journal import Journal, read_events
from tracking.mlflow_store import MlflowStore
from tracking.mlflow_view import MlflowView
from tracking.record import Event
from tracking.store import Store
from tracking.uri import default_uri

# A fresh or reopened store in a folder, and what that folder holds, as something that compares equal for equal content.
Pair = tuple[Callable[[Path], Store], Callable[[Path], object]]


def open_journal(folder: Path) -> Store:
    path = folder / "journal.jsonl"
    return Journal.open(path) if path.exists() else Journal.create(path)


def journal_content(folder: Path) -> object:
    return read_events(folder / "journal.jsonl")


def open_mlflow(folder: Path) -> Store:
    return MlflowStore(prepare(folder))


def open_view(folder: Path) -> Store:
    return MlflowView(prepare(folder))


def mlflow_content(folder: Path) -> object:
    return read_runs(default_uri(folder))


STORES: dict[str, Pair] = {
    "journal": (open_journal, journal_content),
    "mlflow": (open_mlflow, mlflow_content),
    "mlflow view": (open_view, mlflow_content),
}


@pytest.fixture(params=STORES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return STORES[request.param]


def put_all(store: Store, events: list[Event]) -> None:
    for event in events:
        store.put(event)
    store.close()


def test_a_second_filling_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    make, content = pair
    put_all(make(tmp_path), sweep())
    first = content(tmp_path)
    put_all(make(tmp_path), sweep())
    assert content(tmp_path) == first


def test_putting_twice_in_a_row_is_putting_once(pair: Pair, tmp_path: Path) -> None:
    make, content = pair
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    put_all(make(tmp_path / "once"), sweep())
    put_all(make(tmp_path / "twice"), [event for event in sweep() for _ in range(2)])
    assert content(tmp_path / "once") == content(tmp_path / "twice")


def test_a_store_filled_in_two_sittings_equals_one_filled_in_one(pair: Pair, tmp_path: Path) -> None:
    make, content = pair
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    put_all(make(tmp_path / "one"), sweep())
    put_all(make(tmp_path / "two"), sweep()[:9])
    put_all(make(tmp_path / "two"), sweep())
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_close_may_be_called_twice(pair: Pair, tmp_path: Path) -> None:
    store = pair[0](tmp_path)
    put_all(store, sweep()[:2])
    store.close()


def test_the_head_comes_first(pair: Pair, tmp_path: Path) -> None:
    store = pair[0](tmp_path)
    with pytest.raises(MoetuneError, match="sweep_started"):
        store.put(sweep()[1])
    store.close()
