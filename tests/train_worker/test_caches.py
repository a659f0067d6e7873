"""Folders of compile caches: one a stack, the user's own settings first."""

from pathlib import Path

import pytest

from train_worker import caches
from train_worker.caches import VARIABLES, cache_environment, cache_root, stack_key


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES, caches.FOLDER]:
        monkeypatch.delenv(name, raising=False)


def test_every_cache_has_a_folder_of_its_own_that_exists(tmp_path: Path) -> None:
    found = cache_environment(tmp_path)
    assert found.keys() == VARIABLES.keys()
    assert len(set(found.values())) == len(found)
    assert all(Path(folder).is_dir() and tmp_path in Path(folder).parents for folder in found.values())


def test_another_version_of_a_package_gets_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, again = cache_environment(tmp_path), cache_environment(tmp_path)
    monkeypatch.setattr(caches, "_version", lambda package: "99" if package == "triton" else "1")
    after = cache_environment(tmp_path)
    assert before == again
    assert not set(before.values()) & set(after.values())


def test_another_driver_or_gpu_is_another_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {stack_key()}
    monkeypatch.setattr(caches, "driver_version", lambda: "999.1")
    keys.add(stack_key())
    monkeypatch.setattr(caches, "device_names", lambda: ("NVIDIA H999",))
    keys.add(stack_key())
    assert len(keys) == 3


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    assert "TRITON_CACHE_DIR" not in cache_environment(tmp_path)


def test_a_folder_that_cannot_be_made_costs_no_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache_environment(tmp_path / "file") == {}


def test_the_users_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "moetune"
    monkeypatch.setenv(caches.FOLDER, str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"


@pytest.mark.parametrize("variable", [caches.FOLDER, "XDG_CACHE_HOME"])
def test_without_a_home_there_are_no_caches(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "~nobody-of-that-name/cache")
    assert cache_environment() == {}
