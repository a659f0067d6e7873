import math

import pytest
from pydantic import ValidationError

from search_spaces.shapes import StackVersions
from train_worker.outcome import Crashed, Diverged, Fingerprint, Measured, PhaseTimes, Rejected, StepSample
from tuner.objective import Guard, Objective, judge, score

FINGERPRINT = Fingerprint(
    stack=StackVersions(megatron_core="0.19.2", torch="2.11.0"), python="3.12", device="cpu", device_name="test"
)


def measured(
    losses: list[float], times: list[float] | None = None, grad_norm: float = 1.0, warmup: int = 1
) -> Measured:
    times = times or [0.1] * len(losses)
    samples = tuple(
        StepSample(step_time_s=t, tokens_per_s=100 / t, loss=loss, grad_norm=grad_norm)
        for t, loss in zip(times, losses, strict=True)
    )
    return Measured(
        steps=samples[warmup:],
        warmup=samples[:warmup],
        peak_memory_bytes=1000,
        parameter_count=10,
        effective={},
        fingerprint=FINGERPRINT,
        phases=PhaseTimes(),
    )


def test_score_is_the_median_of_measured_steps_only() -> None:
    outcome = measured([1.0] * 4, [9.0, 0.1, 0.2, 0.4])
    assert score(outcome, Objective()) == 0.2
    assert score(outcome, Objective(metric="tokens_per_s", direction="maximize")) == 500
    assert score(outcome, Objective(metric="peak_memory_bytes")) == 1000


def test_a_failed_or_unreadable_trial_has_no_score() -> None:
    assert score(Crashed(phase="build", detail="x"), Objective()) is None
    assert score(measured([1.0, 1.0], [0.1, math.nan]), Objective()) is None
    assert score(measured([1.0], warmup=1), Objective()) is None


def test_an_objective_that_goes_the_wrong_way_is_refused() -> None:
    with pytest.raises(ValidationError, match="tokens_per_s is to maximize"):
        Objective(metric="tokens_per_s", direction="minimize")


def test_a_trial_that_follows_the_baseline_passes_unchanged() -> None:
    outcome = measured([4.0, 3.0, 2.03])
    assert judge(outcome, measured([4.0, 3.0, 2.0]), Guard()) is outcome


FP8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
ON_AVERAGE = Guard(low_precision_mean_loss_relative_tolerance=0.03)


def in_fp8(losses: list[float]) -> Measured:
    return measured(losses).model_copy(update={"effective": FP8})


def test_low_precision_is_judged_on_average_whoever_trains_in_it() -> None:
    apart, base = [4.2, 3.0, 1.9], measured([4.0, 3.0, 2.0])  # 5% above, then 5% below
    assert judge(in_fp8(apart), base, ON_AVERAGE) == in_fp8(apart)
    plain = measured(apart)
    assert judge(plain, base.model_copy(update={"effective": {"fp4": "e2m1"}}), ON_AVERAGE) is plain
    in_bf16 = plain.model_copy(update={"effective": {"fp8": None, "fp8_recipe": "blockwise"}})
    for outcome, guard in ((in_bf16, ON_AVERAGE), (plain, ON_AVERAGE), (in_fp8(apart), Guard())):
        verdict = judge(outcome, base, guard)
        assert isinstance(verdict, Diverged)
        assert verdict.step == 0
        assert verdict.reason.endswith("(allowed: 2.00%)")


@pytest.mark.parametrize(("losses", "away"), [([4.2, 3.15, 2.1], "+5.00%"), ([3.8, 2.85, 1.9, 9.0], "-5.00%")])
def test_low_precision_that_trains_to_other_losses_is_refused_in_either_direction(
    losses: list[float], away: str
) -> None:
    verdict = judge(in_fp8(losses), measured([4.0, 3.0, 2.0]), ON_AVERAGE)
    assert isinstance(verdict, Diverged)
    assert verdict.step == 2
    assert verdict.reason == f"losses are on average {away} away from the baseline's (allowed: 3.00%)"
    assert verdict.losses == tuple(losses)


def test_low_precision_must_be_finite_at_every_step_and_its_reference_no_zero() -> None:
    endless = judge(in_fp8([4.0, math.inf, 2.0]), measured([4.0, 3.0, 2.0]), ON_AVERAGE)
    assert isinstance(endless, Diverged)
    assert endless.step == 1
    assert isinstance(judge(in_fp8([0.0, 1.0]), measured([0.0, 1.0]), ON_AVERAGE), Diverged)


def test_loss_away_from_the_baseline_names_step_and_numbers() -> None:
    verdict = judge(measured([4.0, 3.0, 2.2]), measured([4.0, 3.0, 2.0]), Guard())
    assert isinstance(verdict, Diverged)
    assert verdict.step == 2
    assert "2.2" in verdict.reason
    assert "10.00%" in verdict.reason
    assert verdict.losses == (4.0, 3.0, 2.2)


def test_warmup_counts_for_the_guard() -> None:
    verdict = judge(measured([5.0, 3.0], warmup=1), measured([4.0, 3.0], warmup=1), Guard())
    assert isinstance(verdict, Diverged)
    assert verdict.step == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_a_number_is_refused_with_and_without_a_reference(bad: float) -> None:
    for reference in (None, measured([4.0, 3.0])):
        verdict = judge(measured([4.0, bad]), reference, Guard())
        assert isinstance(verdict, Diverged)
        assert verdict.losses == (4.0, None)
    assert isinstance(judge(measured([4.0], grad_norm=bad), None, Guard()), Diverged)


def test_grad_norm_is_compared_only_where_the_guard_says_so() -> None:
    outcome, reference = measured([4.0], grad_norm=2.0), measured([4.0], grad_norm=1.0)
    assert judge(outcome, reference, Guard()) is outcome
    verdict = judge(outcome, reference, Guard(grad_norm_relative_tolerance=0.1))
    assert isinstance(verdict, Diverged)
    assert verdict.reason.startswith("grad norm 2 is 100.00% away")


def test_a_failed_trial_is_not_judged() -> None:
    crash = Crashed(phase="build", detail="x")
    assert judge(crash, measured([1.0]), Guard()) is crash


def test_trials_of_different_lengths_are_compared_over_the_steps_both_have() -> None:
    long, short = measured([4.0, 3.0, 2.0, 1.0]), measured([4.0, 3.0, 2.0])
    assert judge(short, long, Guard(), 3) is short
    assert judge(long, short, Guard(), 3) is long
    early = judge(measured([4.0, 3.5, 2.0, 1.0]), short, Guard(), 3)
    assert isinstance(early, Diverged)
    assert early.step == 1
    endless = judge(measured([4.0, 3.0, 2.0, math.nan]), short, Guard(), 3)
    assert isinstance(endless, Diverged)  # a step the baseline does not have must still be a number


def test_a_comparison_over_too_few_steps_is_none() -> None:
    for mine, theirs in (([4.0, 3.0], [4.0, 3.0, 2.0]), ([4.0, 3.0, 2.0], [4.0, 3.0])):
        refused = judge(measured(mine), measured(theirs), Guard(), 3)
        assert isinstance(refused, Rejected)
        assert refused.rule == "too-few-steps"
        assert "over 2 steps, of 3 needed" in refused.reason
