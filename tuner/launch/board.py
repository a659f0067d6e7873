"""The board: where trials wait for a slot and ranks wait for work. One light Ray actor, no torch in it.

`SlotBoard` is the whole logic on asyncio, and knows nothing of Ray: it is tested without a cluster.
A slot gets a trial only when every rank of its current incarnation is waiting, so a rank that is gone or stuck
can never be handed one. An attempt always ends: by reports, by the loss of its slot, or by the watchdog.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from train_worker.failures import without_home
from train_worker.gang import PEER_GRACE_S, GangState
from train_worker.job import Order, TrialJob
from train_worker.outcome import Crashed, Outcome, OutOfMemory
from train_worker.rank_report import InterruptedGang, KillReason, NoSlot, RankReport, SlotResult

LONG_POLL_S = 5.0
WATCHDOG_MARGIN_S = 60.0  # beyond a trial's own limit: the slot itself is gone or stuck
NO_SLOT_S = 900.0
RETRIES = 1


@dataclass
class Attempt:
    """One run of one trial on one slot."""

    id: str
    number: int
    state: GangState
    result: "asyncio.Future[SlotResult]"
    slot: str | None = None  # the only slot it may run on
    began: float = 0.0
    met: asyncio.Event = field(default_factory=asyncio.Event)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    kill: KillReason | None = None


@dataclass
class Seats:
    """One slot: the ranks of its current incarnation that wait for work, each with its mailbox."""

    world_size: int
    incarnation: str = ""
    waiting: "dict[int, asyncio.Future[Order]]" = field(default_factory=dict)
    attempt: Attempt | None = None
    served: int = 0  # attempts that this incarnation brought to their end


class SlotBoard:
    """All methods run on one event loop. JSON crosses the process border, typed nouns live inside."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots = {name: Seats(world_size) for name, world_size in slots.items()}
        self.queue: deque[Attempt] = deque()
        self.attempts: dict[str, Attempt] = {}
        self.stopping: Order | None = None
        self.interrupted = False
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the trial's side

    async def run(self, job_json: str, slot: str | None = None) -> str:
        """Run a trial on the next free slot, or on the one called `slot`; returns a `SlotResult` as JSON.

        Infrastructure faults are retried; `wall_s` sums all attempts.
        """
        job = TrialJob.model_validate_json(job_json)
        wall_s = 0.0
        for number in range(1, RETRIES + 2):
            if self.interrupted or not self.slots:
                return self._refused(number, wall_s).model_dump_json()
            attempt = Attempt(f"{job.trial_id}.{number}", number, GangState(job), asyncio.Future(), slot)
            self.attempts[attempt.id] = attempt
            self.queue.append(attempt)
            self._dispatch()
            try:
                result = await self._result(attempt)
            finally:
                self._retire(attempt)
            wall_s += result.wall_s
            if not worth_a_retry(result.outcome) or number > RETRIES:
                return result.model_copy(update={"wall_s": wall_s}).model_dump_json()
        raise AssertionError("unreachable: the last attempt returns")

    async def interrupt(self) -> None:
        """Stop running and waiting trials; they come back as interrupted."""
        self.interrupted = True
        for attempt in list(self.attempts.values()):
            if attempt.began:
                self._kill(attempt, "stop")
            else:
                self._settle(attempt, InterruptedGang())

    # --- the ranks' side

    async def next_order(self, slot: str, incarnation: str, rank: int) -> str:
        """Wait for work, at most a few seconds (then verb "wait": ask again)."""
        seats = self.slots.get(slot)
        if self.stopping or seats is None or seats.incarnation != incarnation:
            return Order(verb="stop").model_dump_json()
        mailbox: asyncio.Future[Order] = asyncio.Future()
        seats.waiting[rank] = mailbox
        self._dispatch()
        # Not wait_for: in the turn in which both come true it drops the order and says "timed out".
        await asyncio.wait({mailbox}, timeout=LONG_POLL_S)
        order = mailbox.result() if mailbox.done() else Order(verb="wait")
        if seats.waiting.get(rank) is mailbox:
            del seats.waiting[rank]
        return order.model_dump_json()

    async def announce(self, attempt_id: str, host: str, port: int) -> None:
        """Rank 0 says where it listens."""
        if attempt := self.attempts.get(attempt_id):
            attempt.state.rendezvous = (host, port)
            attempt.met.set()

    async def rendezvous(self, attempt_id: str) -> tuple[str, int] | None:
        """Where to meet rank 0; None if the attempt ended before it said so."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return None
        await attempt.met.wait()
        return attempt.state.rendezvous

    async def kill_order(self, attempt_id: str) -> KillReason | None:
        """Returns once the attempt is decided: why to kill the rank, or None where it may end by itself."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return "stop"
        await attempt.decided.wait()
        return attempt.kill

    async def report(self, attempt_id: str, report_json: str) -> None:
        """A rank has ended."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return
        report = RankReport.model_validate_json(report_json)
        attempt.state.add(report, time.monotonic())
        if attempt.state.complete:
            measured = all(each.ok for each in attempt.state.reports.values())
            stopped = attempt.kill == "stop" and not measured  # what was measured all the same is kept
            self._settle(attempt, InterruptedGang() if stopped else attempt.state.outcome())
            self._count_served(attempt)
        elif not report.ok:
            self._later(PEER_GRACE_S, attempt, "peer")

    # --- the supervisor's side

    async def slot_opens(self, slot: str, incarnation: str) -> None:
        """A new worker group serves `slot`; ranks of an older one are told to stop."""
        seats = self.slots[slot]
        seats.incarnation, seats.waiting, seats.served = incarnation, {}, 0

    async def served(self, slot: str) -> int:
        """Attempts that the present worker group of `slot` brought to their end."""
        return self.slots[slot].served if slot in self.slots else 0

    async def slot_lost(self, slot: str, detail: str, host_out_of_memory: bool, gone: bool) -> None:
        """The worker group of `slot` died. Its trial is retried elsewhere. `gone`: it will not be started again."""
        seats = self.slots[slot]
        seats.incarnation, seats.waiting = "", {}
        if seats.attempt:
            self._settle(seats.attempt, _lost(detail, host_out_of_memory))
        if gone:
            del self.slots[slot]
        if not self.slots:
            for attempt in list(self.attempts.values()):
                self._settle(attempt, NoSlot(detail=f"no slot is left: {detail}"))

    async def stop(self) -> None:
        """Let every waiting rank go home: the worker groups end normally and release their placement groups."""
        self.stopping = Order(verb="stop")
        for seats in self.slots.values():
            for mailbox in seats.waiting.values():
                if not mailbox.done():
                    mailbox.set_result(self.stopping)

    async def ready_slots(self) -> int:
        """Slots whose ranks all wait for work."""
        return sum(len(seats.waiting) == seats.world_size and not seats.attempt for seats in self.slots.values())

    async def steady_slot(self) -> str | None:
        """The first slot that is left: what is to be compared runs there."""
        return next(iter(self.slots), None)

    # --- inside

    def _dispatch(self) -> None:
        for name, seats in self.slots.items():
            ready = [mailbox for mailbox in seats.waiting.values() if not mailbox.done()]
            attempt = next((each for each in self.queue if each.slot in (None, name)), None)
            if attempt is not None and seats.attempt is None and len(ready) == seats.world_size:
                self.queue.remove(attempt)
                seats.attempt, attempt.began = attempt, time.monotonic()
                for mailbox in ready:
                    mailbox.set_result(Order(verb="run", attempt_id=attempt.id, job=attempt.state.job))

    async def _result(self, attempt: Attempt) -> SlotResult:
        """The attempt's result; the watchdog speaks where neither reports nor the supervisor do."""
        limit = NO_SLOT_S
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(attempt.result), limit)
            except TimeoutError:
                overdue = attempt.state.job.time_limit_s + WATCHDOG_MARGIN_S
                since = time.monotonic() - attempt.began
                if attempt.began and since < overdue:
                    limit = overdue - since
                    continue
                self._kill(attempt, "stop")
                if attempt.began:
                    self._settle(attempt, _lost("its slot went silent", False))
                else:
                    self._settle(attempt, NoSlot(detail=f"no slot was free for {NO_SLOT_S:.0f} s"))

    def _later(self, seconds: float, attempt: Attempt, why: KillReason) -> None:
        async def wait_and_kill() -> None:
            await asyncio.sleep(seconds)
            self._kill(attempt, why)

        task = asyncio.get_running_loop().create_task(wait_and_kill())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _kill(self, attempt: Attempt, why: KillReason) -> None:
        if not attempt.decided.is_set():
            attempt.kill = why
            attempt.decided.set()
        attempt.met.set()

    def _settle(self, attempt: Attempt, outcome: Outcome | InterruptedGang | NoSlot) -> None:
        if not attempt.result.done():
            wall_s = time.monotonic() - attempt.began if attempt.began else 0.0
            result = SlotResult(outcome=outcome, attempts=attempt.number, wall_s=wall_s, trace=attempt.state.trace)
            attempt.result.set_result(result)
        attempt.decided.set()
        attempt.met.set()

    def _retire(self, attempt: Attempt) -> None:
        self.attempts.pop(attempt.id, None)
        if attempt in self.queue:
            self.queue.remove(attempt)
        for seats in self.slots.values():
            if seats.attempt is attempt:
                seats.attempt = None
        self._dispatch()

    def _count_served(self, attempt: Attempt) -> None:
        for seats in self.slots.values():
            seats.served += seats.attempt is attempt

    def _refused(self, number: int, wall_s: float) -> SlotResult:
        outcome = InterruptedGang() if self.interrupted else NoSlot(detail="no slot is left")
        return SlotResult(outcome=outcome, attempts=number, wall_s=wall_s)


def _lost(words: str, host_out_of_memory: bool) -> Outcome:
    detail = without_home(words)
    if host_out_of_memory:
        return OutOfMemory(where="host", phase="unknown", detail=detail)
    return Crashed(phase="unknown", detail=detail, infrastructure=True)


def worth_a_retry(outcome: Outcome | InterruptedGang | NoSlot) -> bool:
    """Infrastructure faults and deaths by signal may be chance; a Python exception comes again."""
    return isinstance(outcome, Crashed) and (outcome.infrastructure or outcome.signal is not None)
