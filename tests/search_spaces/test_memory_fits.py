"""Who is refused, who is tried last, and what the refusal advises."""

from dataclasses import replace

import pytest

from search_spaces.candidate import Candidate, KnobValue
from search_spaces.memory.calibration import stored
from search_spaces.memory.fits import PARTS, MemoryJudge, capacity_of, fits, parts_of, worst_of
from search_spaces.memory.plan import plan_of
from search_spaces.presets import load_model
from search_spaces.rules import Case
from search_spaces.screen import verdict
from search_spaces.shapes import TrainingShape
from tests.search_spaces.cases import SHORT, cpus, gpus
from tests.search_spaces.memory_rows import MEASURED, ROWS, case_of_row

H200_BYTES = round(139.8 * 2**30)  # what CUDA reported where the rows were measured


def facts(world: int = 8, arch: str = "H100 sm_90") -> Case:
    training = TrainingShape(sequence_length=4096, global_batch_size=512)
    return Case({}, load_model("qwen3-30b-a3b"), gpus(world, arch), training)


def candidate(**knobs: KnobValue) -> Candidate:
    named: dict[str, KnobValue] = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    return Candidate(knobs=named | {SHORT.get(name, name): value for name, value in knobs.items()})


def test_every_row_that_ran_out_of_memory_is_refused_and_none_that_ran() -> None:
    out = [row for row in ROWS if row["outcome"] == "out_of_memory"]
    assert len(out) >= 5
    for row in out:
        assert fits(plan_of(case_of_row(row)), H200_BYTES, stored()).state == "refused", row["id"]
    for row in MEASURED:
        assert fits(plan_of(case_of_row(row)), H200_BYTES, stored()).state != "refused", row["id"]


def test_none_that_fits_with_three_percent_to_spare_is_refused() -> None:
    for row in MEASURED:
        capacity = round(row["device_used_bytes"] / 0.97)
        assert fits(plan_of(case_of_row(row)), capacity, stored()).state != "refused", row["id"]


def test_the_margin_is_the_error_of_the_calibration() -> None:
    plan = plan_of(replace(facts(), knobs=candidate(ep=8).knobs))
    worst = worst_of(plan, stored())
    device, margin = stored().device(worst), stored().margin(worst)
    sizes = (device * (1 + margin.low) + 1, device, device * (1 - margin.high) - 1)
    assert [fits(plan, round(size), stored()).state for size in sizes] == ["fits", "tight", "refused"]


def test_a_dispatcher_that_no_one_knows_has_a_plan_without_its_buffers() -> None:
    """What is wrong with the word, `check` says."""
    sizes = {
        sent: plan_of(replace(facts(), knobs=candidate(ep=8, dispatcher=sent).knobs)).worst.communication
        for sent in ("bogus", "allgather", "alltoall")
    }
    assert sizes["bogus"] < sizes["allgather"] < sizes["alltoall"]


def test_parts_add_up_to_what_is_reserved() -> None:
    stage = plan_of(replace(facts(), knobs=candidate(ep=8).knobs)).worst
    parts = parts_of(stage, stored())
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(stored().reserved(stage), abs=2)


def test_a_refusal_names_the_part_and_two_cheap_cures_that_work() -> None:
    judge = MemoryJudge(facts(64))
    found = judge.explain(candidate(ep=8, mbs=1))
    assert found is not None
    assert (found.state, found.part) == ("refused", "optimizer")
    assert len(found.cures) == 2
    assert found.cures[0] == "use_distributed_optimizer=True"
    assert "GiB predicted on a GPU of 79.1 GiB, most of it optimizer" in found.reason


def test_a_single_knob_is_advised_where_one_is_enough() -> None:
    judge = MemoryJudge(facts(arch="H200 sm_90"))
    found = judge.explain(candidate(ep=8, mbs=2, use_distributed_optimizer=True))
    assert found is not None
    assert found.state == "refused"
    assert found.cures
    assert all("=" in cure and cure.count("micro_batch_size") + cure.count("recompute_g") == 1 for cure in found.cures)


def test_advice_that_the_rules_refuse_is_not_given() -> None:
    judge = MemoryJudge(facts())
    advised = judge.explain(candidate(ep=8), lambda case: verdict(case, ()) is None)
    silenced = judge.explain(candidate(ep=8), lambda _case: False)
    assert advised is not None
    assert silenced is not None
    assert advised.cures
    assert not silenced.cures
    assert "use more GPUs" in silenced.reason


def test_silent_on_cpu_without_a_capacity_and_on_what_makes_no_sense() -> None:
    assert MemoryJudge(replace(facts(), cluster=cpus(8))).judge(candidate(ep=8)) is None
    unknown = facts().cluster.model_copy(update={"gpu_arch": None})
    assert MemoryJudge(replace(facts(), cluster=unknown)).judge(candidate(ep=8)) is None
    assert MemoryJudge(facts()).judge(candidate(ep=3)) is None


def test_the_cluster_says_how_much_a_gpu_has_or_its_datasheet() -> None:
    assert capacity_of(gpus(1)) == int(139.8 * 2**30)  # as the measured one reports
    assert capacity_of(gpus(1).model_copy(update={"memory_bytes": 5})) == 5
    assert capacity_of(gpus(1, "nothing")) is None
