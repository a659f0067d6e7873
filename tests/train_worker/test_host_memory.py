"""What counts as this machine's memory, with and without a container's limit."""

from pathlib import Path

import pytest

from train_worker.host_memory import AHEAD_OF_RAY, CALM_S, WAIT_S, host_memory, limit_share, wait_until_back

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    file.write_text(MEMINFO)
    return file


def test_the_machine_where_no_container_limits_it(proc: Path, tmp_path: Path) -> None:
    found = host_memory(proc, tmp_path / "none")
    assert (found.used_bytes, found.total_bytes) == (600 * 1024, 1000 * 1024)
    assert found.share == 0.6


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_containers_smaller_limit_counts_without_its_page_cache(
    proc: Path, tmp_path: Path, limit: str, used: str, stat: str
) -> None:
    for name, text in (
        (limit, "512000\n"),
        (used, "300000\n"),
        (str(Path(limit).parent / "memory.stat"), f"{stat} 44000\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = host_memory(proc, tmp_path)
    assert (found.used_bytes, found.total_bytes) == (256000, 512000)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_no_limit_is_the_machine(proc: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert host_memory(proc, tmp_path).total_bytes == 1000 * 1024


def test_the_real_machine_has_memory_and_uses_some() -> None:
    assert 0 < host_memory().share < 1


def test_a_rank_goes_before_ray_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.8")
    assert limit_share() == pytest.approx(0.8 - AHEAD_OF_RAY)


class Time:
    """A clock that goes on only while somebody sleeps; the share of memory in use by what time it shows."""

    def __init__(self, full_until_s: float, dips: tuple[float, float] = (0, 0)) -> None:
        self.now_s, self.full_until_s, self.dips = 0.0, full_until_s, dips

    def share(self) -> float:
        dipped = self.dips[0] <= self.now_s < self.dips[1]
        return 0.5 if self.now_s >= self.full_until_s or dipped else 0.99

    def wait(self, calm_s: float) -> float:
        wait_until_back(calm_s, self.share, lambda: self.now_s, self.sleep)
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_memory_that_is_free_is_not_waited_for_but_after_a_kill() -> None:
    assert Time(0).wait(0) == 0
    assert Time(0).wait(CALM_S) == pytest.approx(CALM_S, abs=0.06)


def test_memory_is_waited_for_until_it_has_been_back_for_a_while() -> None:
    assert Time(3).wait(0) == pytest.approx(3, abs=0.06)
    assert Time(3).wait(CALM_S) == pytest.approx(3 + CALM_S, abs=0.12)
    assert Time(3, dips=(1, 1 + CALM_S / 2)).wait(CALM_S) == pytest.approx(3 + CALM_S, abs=0.12)


def test_memory_that_stays_full_is_not_waited_for_without_end() -> None:
    assert Time(1e9).wait(CALM_S) == pytest.approx(WAIT_S, abs=0.06)
