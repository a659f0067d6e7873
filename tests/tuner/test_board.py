"""The board's promises, on a real event loop: every attempt ends, and no rank that is gone is ever given work."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from search_spaces.candidate import Candidate
from search_spaces.shapes import ClusterShape, ModelShape, StackVersions, TrainingShape
from train_worker.job import Order, TrialJob
from train_worker.outcome import Crashed, Fingerprint, Measured, Outcome, OutOfMemory, PhaseTimes
from train_worker.rank_report import InterruptedGang, KillReason, NoSlot, RankReport, SlotResult
from tuner.launch import board as board_module
from tuner.launch.board import SlotBoard

MODEL = ModelShape(
    name="m",
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=4,
    ffn_hidden_size=16,
    vocab_size=32,
    max_position_embeddings=32,
    num_moe_experts=2,
    moe_router_topk=1,
    moe_ffn_hidden_size=8,
)
CLUSTER = ClusterShape(device="cpu", workers=2, workers_per_trial=2, workers_per_node=2)
MEASURED = Measured(
    steps=(),
    peak_memory_bytes=1,
    parameter_count=1,
    effective={},
    fingerprint=Fingerprint(
        stack=StackVersions(megatron_core="0", torch="0"), python="3", device="cpu", device_name="x"
    ),
    phases=PhaseTimes(),
)
Rank = Callable[[SlotBoard, Order, int], Awaitable[RankReport]]


def job(name: str = "t", limit_s: float = 30.0) -> str:
    return TrialJob(
        trial_id=name,
        candidate=Candidate(knobs={"micro_batch_size": 1}),
        model=MODEL,
        cluster=CLUSTER,
        training=TrainingShape(sequence_length=8, global_batch_size=2),
        seed=1,
        time_limit_s=limit_s,
    ).model_dump_json()


async def measured(_board: SlotBoard, _order: Order, rank: int) -> RankReport:
    return RankReport(rank=rank, outcome=MEASURED)


async def traced(_board: SlotBoard, _order: Order, rank: int) -> RankReport:
    return RankReport(rank=rank, outcome=MEASURED, trace="" if rank else "packed")


async def until_killed(board: SlotBoard, order: Order, rank: int) -> RankReport:
    return RankReport(rank=rank, killed=await board.kill_order(order.attempt_id))


async def serve(board: SlotBoard, behave: Rank, rank: int, incarnation: str = "a") -> None:
    """One rank's worker: what `train_worker.entry.serve_slot` does, without Ray and without training."""
    while True:
        order = Order.model_validate_json(await board.next_order("s", incarnation, rank))
        if order.verb == "stop":
            return
        if order.verb == "run":
            report = await behave(board, order, rank)
            await board.report(order.attempt_id, report.model_dump_json())


def play(scene: Callable[[SlotBoard], Awaitable[None]]) -> None:
    async def act() -> None:
        board = SlotBoard({"s": 2})
        await board.slot_opens("s", "a")
        await asyncio.wait_for(scene(board), 20)

    asyncio.run(act())


def result(text: str) -> tuple[Outcome | InterruptedGang | NoSlot, int]:
    found = SlotResult.model_validate_json(text)
    return found.outcome, found.attempts


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "LONG_POLL_S", 0.2)
    monkeypatch.setattr(board_module, "PEER_GRACE_S", 0.05)


def test_trials_queue_for_the_one_slot_and_all_come_back() -> None:
    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, measured, rank)) for rank in (0, 1)]
        found = await asyncio.gather(*[board.run(job(f"t{number}")) for number in range(5)])
        assert [result(text) for text in found] == [(MEASURED, 1)] * 5
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_the_trace_of_rank_0_comes_back_with_the_outcome() -> None:
    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, traced, rank)) for rank in (0, 1)]
        assert SlotResult.model_validate_json(await board.run(job())).trace == "packed"
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_a_slot_gets_no_trial_before_all_its_ranks_wait() -> None:
    async def scene(board: SlotBoard) -> None:
        first = asyncio.create_task(serve(board, measured, 0))
        trial = asyncio.create_task(board.run(job()))
        await asyncio.sleep(0.5)
        assert not trial.done()
        assert await board.ready_slots() == 0
        second = asyncio.create_task(serve(board, measured, 1))
        assert result(await trial) == (MEASURED, 1)
        await board.stop()
        await asyncio.gather(first, second)

    play(scene)


def test_when_one_rank_fails_the_others_are_told_to_die() -> None:
    async def failing(board: SlotBoard, order: Order, rank: int) -> RankReport:
        if rank == 1:
            return RankReport(rank=1, outcome=OutOfMemory(where="device", phase="measure", detail="CUDA out of memory"))
        return await until_killed(board, order, rank)

    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, failing, rank)) for rank in (0, 1)]
        outcome, attempts = result(await board.run(job()))
        assert isinstance(outcome, OutOfMemory)
        assert attempts == 1
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_a_rank_that_cannot_meet_rank_0_is_released() -> None:
    async def scene(board: SlotBoard) -> None:
        async def dead_first(board: SlotBoard, order: Order, rank: int) -> RankReport:
            if rank == 0:
                return RankReport(rank=0, exit_code=1)
            assert await board.rendezvous(order.attempt_id) is None
            return RankReport(rank=1, killed="peer")

        ranks = [asyncio.create_task(serve(board, dead_first, rank)) for rank in (0, 1)]
        outcome, _ = result(await board.run(job()))
        assert isinstance(outcome, Crashed)
        assert outcome.exit_code == 1
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_a_lost_slot_is_infrastructure_and_the_trial_is_retried_on_the_next_incarnation() -> None:
    async def scene(board: SlotBoard) -> None:
        old = [asyncio.create_task(serve(board, until_killed, rank)) for rank in (0, 1)]
        trial = asyncio.create_task(board.run(job()))
        await asyncio.sleep(0.1)
        await board.slot_lost("s", "node died", False, gone=False)
        await board.slot_opens("s", "b")
        new = [asyncio.create_task(serve(board, measured, rank, "b")) for rank in (0, 1)]
        assert result(await trial) == (MEASURED, 2)
        await asyncio.gather(*old)  # the old ranks are told to stop, not given the new trial
        await board.stop()
        await asyncio.gather(*new)

    play(scene)


def test_a_trial_that_loses_every_slot_has_no_outcome_and_does_not_hang() -> None:
    async def scene(board: SlotBoard) -> None:
        trials = [asyncio.create_task(board.run(job(f"t{number}"))) for number in range(3)]
        await asyncio.sleep(0.05)
        await board.slot_lost("s", "no such node", False, gone=True)
        for trial in trials:
            outcome, _ = result(await trial)
            assert isinstance(outcome, NoSlot)
            assert "no such node" in outcome.detail
        assert isinstance(result(await board.run(job("later")))[0], NoSlot)

    play(scene)


def test_rays_memory_monitor_is_out_of_memory() -> None:
    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, until_killed, rank)) for rank in (0, 1)]
        trial = asyncio.create_task(board.run(job()))
        await asyncio.sleep(0.1)
        await board.slot_lost("s", "node running low on memory", True, gone=False)
        outcome, attempts = result(await trial)
        assert isinstance(outcome, OutOfMemory)
        assert outcome.where == "host"
        assert attempts == 1
        await asyncio.gather(*ranks)

    play(scene)


@pytest.mark.parametrize("signal", [9, None])
def test_a_death_by_signal_is_tried_twice_an_exception_once(signal: int | None) -> None:
    async def dying(_board: SlotBoard, _order: Order, rank: int) -> RankReport:
        crashed = Crashed(phase="measure", detail="x", signal=signal)
        return RankReport(rank=rank, outcome=crashed)

    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, dying, rank)) for rank in (0, 1)]
        outcome, attempts = result(await board.run(job()))
        assert isinstance(outcome, Crashed)
        assert attempts == (2 if signal else 1)
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_interrupt_brings_running_and_waiting_trials_back_at_once() -> None:
    async def scene(board: SlotBoard) -> None:
        seen: list[KillReason | None] = []

        async def watching(board: SlotBoard, order: Order, rank: int) -> RankReport:
            seen.append(await board.kill_order(order.attempt_id))
            return RankReport(rank=rank, killed="stop")

        ranks = [asyncio.create_task(serve(board, watching, rank)) for rank in (0, 1)]
        trials = [asyncio.create_task(board.run(job(f"t{number}"))) for number in range(3)]
        await asyncio.sleep(0.1)
        await board.interrupt()
        for trial in trials:
            outcome, _ = result(await trial)
            assert isinstance(outcome, InterruptedGang)
        assert seen == ["stop", "stop"]
        outcome, _ = result(await board.run(job("late")))
        assert isinstance(outcome, InterruptedGang)
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_a_silent_slot_is_given_up_by_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "WATCHDOG_MARGIN_S", 0.2)
    monkeypatch.setattr(board_module, "NO_SLOT_S", 0.3)

    async def silent(_board: SlotBoard, _order: Order, _rank: int) -> RankReport:
        await asyncio.sleep(3600)
        raise AssertionError

    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, silent, rank)) for rank in (0, 1)]
        outcome, attempts = result(await board.run(job(limit_s=0.2)))
        assert isinstance(outcome, NoSlot)  # the retry found no slot whose ranks all wait
        assert attempts == 2
        for task in ranks:
            task.cancel()

    play(scene)


def test_what_was_measured_before_the_interrupt_reached_it_is_kept() -> None:
    async def scene(board: SlotBoard) -> None:
        async def quick(board: SlotBoard, order: Order, rank: int) -> RankReport:
            await board.kill_order(order.attempt_id)
            return RankReport(rank=rank, outcome=MEASURED)

        ranks = [asyncio.create_task(serve(board, quick, rank)) for rank in (0, 1)]
        trial = asyncio.create_task(board.run(job()))
        await asyncio.sleep(0.1)
        await board.interrupt()
        assert result(await trial) == (MEASURED, 1)
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_an_interrupted_trial_is_interrupted_whatever_its_ranks_say_of_it() -> None:
    """A rank killed while it is being forked may report a deadline, a peer or a signal."""

    async def scene(board: SlotBoard) -> None:
        async def odd(board: SlotBoard, order: Order, rank: int) -> RankReport:
            await board.kill_order(order.attempt_id)
            return RankReport(rank=rank, killed="deadline") if rank else RankReport(rank=rank, signal=9)

        ranks = [asyncio.create_task(serve(board, odd, rank)) for rank in (0, 1)]
        trial = asyncio.create_task(board.run(job()))
        await asyncio.sleep(0.1)
        await board.interrupt()
        assert isinstance(result(await trial)[0], InterruptedGang)
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_an_order_given_in_the_turn_in_which_the_wait_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs and orders are made to meet, many times: no rank may be told "wait" while its slot is given a trial."""
    monkeypatch.setattr(board_module, "LONG_POLL_S", 0.01)

    async def scene(board: SlotBoard) -> None:
        ranks = [asyncio.create_task(serve(board, measured, rank)) for rank in (0, 1)]
        for number in range(300):
            await asyncio.sleep(0.0099 + number % 7 * 0.0001)
            text = await asyncio.wait_for(board.run(job(f"t{number}", limit_s=5)), 5)
            assert result(text) == (MEASURED, 1)
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)


def test_a_pinned_trial_waits_for_its_slot() -> None:
    async def act() -> None:
        board = SlotBoard({"s": 1, "other": 1})
        await board.slot_opens("s", "a")
        await board.slot_opens("other", "a")
        assert await board.steady_slot() == "s"

        async def elsewhere() -> None:
            order = Order.model_validate_json(await board.next_order("other", "a", 0))
            assert order.verb != "run", "a trial pinned to another slot"

        idle = asyncio.create_task(elsewhere())
        trial = asyncio.create_task(board.run(one_rank(), "s"))
        await idle
        assert not trial.done()
        rank = asyncio.create_task(serve(board, measured, 0))
        assert result(await asyncio.wait_for(trial, 5)) == (MEASURED, 1)
        await board.stop()
        await rank

    def one_rank() -> str:
        shape = CLUSTER.model_copy(update={"workers_per_trial": 1})
        return TrialJob.model_validate_json(job()).model_copy(update={"cluster": shape}).model_dump_json()

    asyncio.run(act())


def test_the_wall_time_of_all_attempts_is_counted() -> None:
    async def scene(board: SlotBoard) -> None:
        async def dying(_board: SlotBoard, order: Order, rank: int) -> RankReport:
            await asyncio.sleep(0.2)
            return (
                RankReport(rank=rank, signal=9)
                if order.attempt_id.endswith(".1")
                else await measured(board, order, rank)
            )

        ranks = [asyncio.create_task(serve(board, dying, rank)) for rank in (0, 1)]
        found = SlotResult.model_validate_json(await board.run(job()))
        assert found.attempts == 2
        assert found.wall_s >= 0.4
        assert await board.served("s") == 2
        await board.stop()
        await asyncio.gather(*ranks)

    play(scene)
