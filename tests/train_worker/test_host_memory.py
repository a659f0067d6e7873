"""What counts as this machine's memory, with and without a container's limit."""

from pathlib import Path

import pytest

from train_worker.host_memory import AHEAD_OF_RAY, host_memory, limit_share

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
