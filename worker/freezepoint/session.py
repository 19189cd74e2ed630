"""One membership in the group: which partitions are ours, acquired in the background, each with its runner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from freezepoint.errors import (
    BrokerError,
    FreezepointError,
    OwnershipLostError,
    StalledError,
    StorageFullError,
)
from freezepoint.memory import MemoryBudget
from freezepoint.restore import restore
from freezepoint.runner import FINISH_S, PartitionRunner
from freezepoint.settings import WorkerSettings
from freezepoint.telemetry.figures import Figures
from freezepoint.transport.ports import GroupMember, Lease, Poll

log = structlog.get_logger()

IDLE_GRACE_S = 0.5
"""How long nothing may have come before a worker believes that all is done."""
OTHERS_GRACE_S = 2.0
"""How much longer than a session a worker without all the partitions waits for those of a dead one."""
TELL_S = 1.0
"""How long the line that tells what was acquired waits for the rest."""
ACQUIRE_BACKOFF_S = 0.2
ACQUIRE_BACKOFF_MAX_S = 10.0


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class _Seat:
    """One assigned partition: its runner once it is acquired, or the task that acquires it."""

    runner: PartitionRunner | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Session:
    """Works for as long as the membership lasts. Call :meth:`turn` steadily, :meth:`close` at the end, once."""

    member: GroupMember
    topic_name: str
    settings: WorkerSettings
    executor: Executor
    memory: MemoryBudget
    figures: Figures
    topic_id: str | None = None
    """What the topic was when the session began; see ``TopicAdmin.identity``."""
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _generation: int = 0
    _active_at: float = field(default_factory=_now)
    _assigned_at: float = field(default_factory=_now)
    _acquired: dict[int, int] = field(default_factory=dict)
    """Not told yet; by partition, how many offsets were to be read."""
    _acquired_at: float | None = None
    _closing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    """This session is to end, and the broker does not answer any more, or not in time."""

    @property
    def runners(self) -> list[PartitionRunner]:
        """The partitions at work."""
        return [seat.runner for seat in self._seats.values() if seat.runner is not None]

    @property
    def settled(self) -> bool:
        """Whether there is an assignment and each of its partitions is at work."""
        runners = [seat.runner for seat in self._seats.values()]
        return self._generation > 0 and all(
            runner is not None and runner.failure is None for runner in runners
        )

    async def turn(self) -> None:
        """One round: poll, feed, and see to the partitions.

        :raises BrokerError: the membership is lost or stuck; nothing that counts is.
        :raises ConfigurationError: going on would spoil results.
        """
        poll = await self.member.poll(self.settings.poll_timeout_ms / 1000, self.settings.poll_records_max)
        if poll.generation != self._generation:
            self._reassign(poll)
        await self._feed(poll)
        await self._reap()
        for partition in poll.assigned:
            self._fill(partition)
        self._tell()

    def _tell(self) -> None:
        """One line for all the partitions that came, or for those that did while others take long."""
        if self._acquired_at is None or not (self.settled or _now() - self._acquired_at > TELL_S):
            return
        acquired, self._acquired, self._acquired_at = self._acquired, {}, None
        unread = {partition: offsets for partition, offsets in sorted(acquired.items()) if offsets}
        log.info("acquired", partitions=sorted(acquired), unread=unread)

    async def _feed(self, poll: Poll) -> None:
        fed = [
            (runner, poll.records[partition])
            for partition, runner in self._working()
            if poll.records.get(partition)
        ]
        for runner, _ in fed:
            runner.expect()
        for runner, records in fed:
            self._active_at = _now()
            await runner.feed(records)

    def _working(self) -> Iterator[tuple[int, PartitionRunner]]:
        for partition, seat in self._seats.items():
            if seat.runner is not None and seat.runner.failure is None:
                yield partition, seat.runner

    def _reassign(self, poll: Poll) -> None:
        """Keep what was given back, give up what was taken; what is new is acquired in the background."""
        self._generation = poll.generation
        self._assigned_at = _now()
        self._active_at = _now()
        log.info("assigned", generation=poll.generation, partitions=sorted(poll.assigned))
        for partition in list(self._seats):
            runner = self._seats[partition].runner
            if partition not in poll.assigned:
                seat = self._seats.pop(partition)
                if seat.runner is not None:
                    self._close(partition, seat.runner)
            elif runner is not None and runner.failure is None:
                runner.renew(poll.generation)
        for partition in poll.assigned:
            self._seats.setdefault(partition, _Seat())

    def _close(self, partition: int, runner: PartitionRunner) -> None:
        previous = self._closing.get(partition)

        async def close() -> None:
            if previous is not None:
                await asyncio.wait({previous})
            await runner.stop(drain_s=0, lost=self._lost)

        self._closing[partition] = asyncio.create_task(close(), name=f"close-{partition}")

    async def _reap(self) -> None:
        """Let go of dead runners; let bugs and hopeless configurations out."""
        for partition, seat in self._seats.items():
            if seat.task is not None and seat.task.done():
                task, seat.task = seat.task, None
                await task
            runner = seat.runner
            if runner is None or not runner.task.done():
                continue
            if runner.failure is None:
                await runner.task
            if isinstance(runner.failure, StorageFullError):
                raise runner.failure  # as every partition would: it is said once, where the broker is waited for
            self.figures.counts["leases_lost"] += 1
            self.figures.recent.failed(f"partition {partition}", runner.failure)
            log.warning("lease_lost", partition=partition, error=str(runner.failure))
            if isinstance(runner.failure, StalledError):
                raise runner.failure
            seat.runner = None
            self._close(partition, runner)
        for partition, task in list(self._closing.items()):
            if task.done():
                del self._closing[partition]
                await task

    def _fill(self, partition: int) -> None:
        seat = self._seats.get(partition)
        if seat is None or seat.runner is not None or seat.task is not None:
            return
        seat.task = asyncio.create_task(self._acquire(partition, seat), name=f"acquire-{partition}")

    async def _acquire(self, partition: int, seat: _Seat) -> None:
        backoff_s = ACQUIRE_BACKOFF_S
        while self._seats.get(partition) is seat:
            closing = self._closing.get(partition)
            if closing is not None:
                await asyncio.wait({closing})
            try:
                await self._acquire_once(partition, seat)
            except StorageFullError:
                raise
            except OwnershipLostError:
                return  # a new assignment is under way; the next turn decides
            except BrokerError as error:
                self.figures.recent.failed(f"acquiring partition {partition}", error)
                log.warning("acquire_failed", partition=partition, error=str(error), retry_in_s=backoff_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), backoff_s)
                backoff_s = min(backoff_s * 2, ACQUIRE_BACKOFF_MAX_S)
            else:
                return

    async def _acquire_once(self, partition: int, seat: _Seat) -> None:
        generation = self._generation
        lease = await self.member.acquire(partition)
        try:
            core = await restore(lease, self.settings, self.topic_name, self.figures.counts, self.topic_id)
            if self._seats.get(partition) is not seat:
                raise OwnershipLostError(f"partition {partition} was assigned elsewhere meanwhile")
            await lease.start(core.next_offset)
            if self._generation != generation:
                raise OwnershipLostError(f"partition {partition} was reassigned meanwhile")
        except BaseException:
            await self._close_quietly(lease)
            raise
        self._active_at = _now()
        log.debug("partition_acquired", partition=partition, offset=core.next_offset, log_end=lease.log_end)
        self._acquired.setdefault(partition, max(0, lease.log_end - core.next_offset))
        self._acquired_at = _now() if self._acquired_at is None else self._acquired_at
        if core.unread_offsets:
            log.warning(
                "records_expired_unread",
                partition=partition,
                unread_offsets=core.unread_offsets,
                message=f"{self.topic_name} was cut before it was read: what was in it is lost, raise its retention",
            )
        seat.runner = PartitionRunner(
            lease, core, self.settings, executor=self.executor, memory=self.memory, figures=self.figures
        )

    @staticmethod
    async def _close_quietly(lease: Lease) -> None:
        try:
            await lease.close()
        except BrokerError as error:
            log.warning("lease_close_failed", partition=lease.partition, error=str(error))

    @property
    def _has_all(self) -> bool:
        """Whether every partition of the topic is here."""
        return any(len(self._seats) == runner.lease.partition_count for runner in self.runners)

    async def idle(self) -> bool:
        """Whether everything that is committed has been processed and published."""
        quiet_s = _now() - self._active_at
        if not self._generation or self._closing:
            return False
        if not self._has_all and _now() - self._assigned_at < self.member.session_timeout_s + OTHERS_GRACE_S:
            return False  # who holds the others may be dead, and then they come to us
        runners = [seat.runner for seat in self._seats.values()]
        if quiet_s < IDLE_GRACE_S or any(runner is None or not runner.idle for runner in runners):
            return False
        return all([await runner.lease.caught_up() for runner in runners if runner is not None])

    async def close(self, silence: Callable[[], Awaitable[None]]) -> None:
        """Finish the transaction in hand, free the partitions, leave the group.

        :param silence: returns if the broker has been silent for too long to be waited for.
        """
        listening = asyncio.create_task(self._listen(silence))
        time_is_up = asyncio.get_running_loop().call_later(
            self.settings.shutdown_timeout_s + FINISH_S, self._lost.set
        )  # also for a partition that was given back before, whose transaction is still under way
        try:
            await self._close_all()
        finally:
            time_is_up.cancel()
            listening.cancel()
            await asyncio.wait({listening})

    async def _listen(self, silence: Callable[[], Awaitable[None]]) -> None:
        await silence()
        log.warning("broker_lost", message="leaving without it; what is not committed is replayed")
        self._lost.set()

    async def _close_all(self) -> None:
        seats, self._seats = self._seats, {}
        self._ended.set()
        outcomes: list[object] = await _cancelled(
            [seat.task for seat in seats.values() if seat.task is not None]
        )
        stops = [
            runner.stop(drain_s=self.settings.shutdown_timeout_s, lost=self._lost)
            for runner in (seat.runner for seat in seats.values())
            if runner is not None
        ]
        outcomes += await asyncio.gather(*stops, *self._closing.values(), return_exceptions=True)
        await self.member.leave()
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, FreezepointError):
                raise outcome


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> list[object]:
    """End them, and return what each of them came to."""
    for task in tasks:
        task.cancel()
    return list(await asyncio.gather(*tasks, return_exceptions=True))
