"""`moetune plan`: exact counts by rule, the default and its verdict, without a worker."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tuner.commands.plan import PlanResult, plan, render
from tuner.sweep import load_sweep

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "examples" / "laptop.yaml"


@pytest.fixture(scope="module")
def laptop() -> PlanResult:
    return plan(load_sweep(LAPTOP))


def test_the_laptop_plan(laptop: PlanResult) -> None:
    assert (laptop.total, laptop.accepted) == (2_688_000, 764)
    assert laptop.total == laptop.accepted + sum(refusal.count for refusal in laptop.rejected)
    assert [refusal.count for refusal in laptop.rejected] == sorted((r.count for r in laptop.rejected), reverse=True)
    assert laptop.default_refused is None
    assert laptop.first[0].id == laptop.default.id
    assert laptop.trials == 16
    assert laptop.worker_hours_at_most == pytest.approx(16 * 60 * 2 / 3600)
    assert laptop.finalists_at_most == 2
    assert laptop.verify_hours_at_most == pytest.approx((1 + 2) * 4 * 60 * 2 / 3600)


def test_the_h200_plan(tmp_path: Path) -> None:
    """The counts that the example tells. Without graphs 504 = 4 micro-batches x 2 dispatchers x 63:

    recomputes without grouped GEMM: bf16 8 minus moe_act = 7; delayed FP8 7 minus layernorm, all three = 5; tensorwise
    and blockwise 7 each: 26. With it: bf16 8, twice for CUTLASS; delayed 8 minus moe_act, layernorm, all three = 5;
    tensorwise and blockwise 8 each: 37.
    """
    text = (ROOT / "examples" / "h200.yaml").read_text()
    found = plan(load_sweep(ROOT / "examples" / "h200.yaml"))
    assert found.accepted == 1_244
    assert f"{found.total:,} points, of which {found.accepted:,} can run here" in text
    assert found.default.knobs["moe_grouped_gemm"] is False, "Megatron-Core's default is what is beaten"
    sizes = "micro_batch_size: [1, 2, 4, 8]"
    eager = tmp_path / "eager.yaml"
    eager.write_text(text.replace(sizes, f"{sizes}\n    cuda_graph_impl: [none]"))
    assert plan(load_sweep(eager)).accepted == 4 * 2 * (26 + 37) == 504


def test_memory_is_judged_on_a_sample_and_on_the_default(laptop: PlanResult, tmp_path: Path) -> None:
    assert laptop.memory is None  # a CPU
    text = (ROOT / "examples" / "h200.yaml").read_text()
    whole = plan(load_sweep(ROOT / "examples" / "h200.yaml")).memory
    assert whole is not None
    assert (whole.drawn, whole.fits + whole.tight, whole.refused) == (1000, 1000, 0)
    assert whole.fits > 900  # tight: graphs at the largest micro-batch
    small = tmp_path / "small.yaml"
    small.write_text(text.replace("gpu_arch: H200 sm_90", "memory_bytes: 80000000000\n  gpu_arch: H200 sm_90"))
    found = plan(load_sweep(small))
    assert found.memory is not None
    assert found.memory.drawn == found.memory.fits + found.memory.tight + found.memory.refused == 1000
    assert 0 < found.memory.refused == sum(found.memory.too_big.values())
    assert found.memory.default is not None
    assert found.memory.default.state == "fits"
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(text.replace("gpu_arch: H200 sm_90", "memory_bytes: 20000000000\n  gpu_arch: H200 sm_90"))
    nothing = plan(load_sweep(tiny))
    assert nothing.memory is not None
    assert (nothing.memory.refused, nothing.first) == (1000, ())
    text_of = StringIO()
    render(nothing, Console(file=text_of, width=300))
    assert "1000 refused [MEM-01] (largest part: optimizer" in text_of.getvalue()


def test_the_plan_survives_json(laptop: PlanResult) -> None:
    assert PlanResult.model_validate_json(laptop.model_dump_json()) == laptop


def test_a_small_space_bounds_the_trials(tmp_path: Path) -> None:
    text = LAPTOP.read_text().replace("  name: laptop #", "  choices: {micro_batch_size: [1]}\n  name: laptop #")
    file = tmp_path / "sweep.yaml"
    file.write_text(text.replace("trials: 16", "trials: 5000"))
    found = plan(load_sweep(file))
    assert found.trials == found.accepted == 222
    file.write_text(text.replace("trials: 16", "trials: 2"))
    assert plan(load_sweep(file)).finalists_at_most == 1  # the other trial is the default's


def test_people_see_counts_reasons_and_the_default(laptop: PlanResult) -> None:
    console = Console(width=200, record=True, file=StringIO())
    render(laptop, console)
    text = console.export_text()
    for words in ("2,688,000", "764 can run here", "CPU-02", "FP8 and FP4 need a GPU", "can run"):
        assert words in text
    assert "and 0.40 to verify the best 2" in " ".join(text.split())
    assert "[" not in text.split("Default configuration")[1].split("\n")[0]


def test_planning_imports_no_heavy_library() -> None:
    """It runs on a machine without torch: importing one would cost seconds, too."""
    program = (
        "import sys, json; from pathlib import Path; from tuner.sweep import load_sweep; "
        "from tuner.commands.plan import plan; plan(load_sweep(Path('examples/laptop.yaml'))); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "optuna", "mlflow", "megatron", "numpy"} & set(json.loads(done.stdout))
