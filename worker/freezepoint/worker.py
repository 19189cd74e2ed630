"""The worker: poll -> decode -> feed -> perform effects -> commit, over whatever partitions the group gives it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from freezepoint.errors import BrokerError, OwnershipLostError
from freezepoint.restore import restore
from freezepoint.runner import PartitionRunner
from freezepoint.settings import WorkerSettings
from freezepoint.transport.ports import GroupMember, Lease, Poll, Transport
from freezepoint_schemas.topics import Topic

log = structlog.get_logger()

BUILD_THREADS = 2
IDLE_GRACE_S = 0.5
"""``until_idle``: how long nothing may have come before the worker believes that all is done."""
STANDBY_GRACE_S = 5.0
"""``until_idle``: the same for a worker that was given no partition, which an unfinished rebalance may explain."""
ACQUIRE_BACKOFF_S = 0.2
ACQUIRE_BACKOFF_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """What a worker has done: records read, results published (masked ones among them), dead letters, lives open."""

    records: int
    results: int
    masked: int
    dead_letters: int
    open_rollouts: int
    partitions: int


@dataclass(slots=True)
class _Seat:
    """One assigned partition: its runner once it is acquired, or the task that acquires it."""

    runner: PartitionRunner | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Worker:
    """One process of the group. :meth:`run` returns at a stop, or when idle if asked to; it raises what cannot be
    survived: a configuration that would spoil results, a membership that is lost, a bug."""

    transport: Transport
    settings: WorkerSettings
    on_progress: Callable[[WorkerSummary], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _generation: int = 0
    _active_at: float = 0.0
    _closing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _at_stop: list[PartitionRunner] = field(default_factory=list)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event, *, until_idle: bool = False) -> WorkerSummary:
        """Work until ``stop`` is set, or with ``until_idle`` until everything that is there has been processed."""
        member = await self.transport.join(self.settings.group)
        self._active_at = asyncio.get_running_loop().time()
        executor = ThreadPoolExecutor(BUILD_THREADS, thread_name_prefix="build")
        try:
            while not stop.is_set():
                await self._turn(member, executor)
                if until_idle and await self._idle():
                    break
        finally:
            await self._shut_down(member)
            executor.shutdown(wait=False, cancel_futures=True)
        return self.summary()

    def summary(self) -> WorkerSummary:
        """The figures so far."""
        runners = self._at_stop or _runners_of(self._seats)
        return WorkerSummary(
            records=self.counts["records"],
            results=self.counts["results"],
            masked=self.counts["masked"],
            dead_letters=self.counts["dead_letters"],
            open_rollouts=sum(len(runner.core.open) for runner in runners),
            partitions=len(runners),
        )

    async def _turn(self, member: GroupMember, executor: ThreadPoolExecutor) -> None:
        poll = await member.poll(self.settings.poll_timeout_ms / 1000, self.settings.poll_records_max)
        if poll.generation != self._generation:
            self._reassign(poll)
        await self._feed(poll)
        await self._reap()
        for partition in poll.assigned:
            self._fill(partition, member, executor)
        if self.on_progress is not None:
            self.on_progress(self.summary())

    async def _feed(self, poll: Poll) -> None:
        fed = [
            (runner, poll.records[partition])
            for partition, runner in self._working()
            if poll.records.get(partition)
        ]
        for runner, _ in fed:
            runner.expect()
        for runner, records in fed:
            self._active_at = asyncio.get_running_loop().time()
            self.counts["records"] += len(records)
            await runner.feed(records)

    def _working(self) -> Iterator[tuple[int, PartitionRunner]]:
        for partition, seat in self._seats.items():
            if seat.runner is not None and seat.runner.failure is None:
                yield partition, seat.runner

    def _reassign(self, poll: Poll) -> None:
        """Keep what was given back, give up what was taken; what is new is acquired in the background."""
        self._generation = poll.generation
        self._active_at = asyncio.get_running_loop().time()
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
            await runner.stop(drain_s=0)

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
            log.warning("lease_lost", partition=partition, error=str(runner.failure))
            seat.runner = None
            self._close(partition, runner)
        for partition, task in list(self._closing.items()):
            if task.done():
                del self._closing[partition]
                await task

    def _fill(self, partition: int, member: GroupMember, executor: ThreadPoolExecutor) -> None:
        seat = self._seats.get(partition)
        if seat is None or seat.runner is not None or seat.task is not None:
            return
        seat.task = asyncio.create_task(
            self._acquire(partition, seat, member, executor), name=f"acquire-{partition}"
        )

    async def _acquire(
        self, partition: int, seat: _Seat, member: GroupMember, executor: ThreadPoolExecutor
    ) -> None:
        backoff_s = ACQUIRE_BACKOFF_S
        while self._seats.get(partition) is seat:
            closing = self._closing.get(partition)
            if closing is not None:
                await asyncio.wait({closing})
            try:
                await self._acquire_once(partition, seat, member, executor)
            except OwnershipLostError:
                return  # a new assignment is under way; the next turn decides
            except BrokerError as error:
                log.warning("acquire_failed", partition=partition, error=str(error), retry_in_s=backoff_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), backoff_s)
                backoff_s = min(backoff_s * 2, ACQUIRE_BACKOFF_MAX_S)
            else:
                return

    async def _acquire_once(
        self, partition: int, seat: _Seat, member: GroupMember, executor: ThreadPoolExecutor
    ) -> None:
        generation = self._generation
        lease = await member.acquire(partition)
        try:
            core = await restore(lease, self.settings, self.transport.names[Topic.TOKENS])
            if self._seats.get(partition) is not seat:
                raise OwnershipLostError(f"partition {partition} was assigned elsewhere meanwhile")
            await lease.start(core.next_offset)
            if self._generation != generation:
                raise OwnershipLostError(f"partition {partition} was reassigned meanwhile")
        except BaseException:
            await self._close_quietly(lease)
            raise
        self._active_at = asyncio.get_running_loop().time()
        log.info("acquired", partition=partition, offset=core.next_offset, log_end=lease.log_end)
        seat.runner = PartitionRunner(lease, core, self.settings, executor, self.counts)

    @staticmethod
    async def _close_quietly(lease: Lease) -> None:
        try:
            await lease.close()
        except BrokerError as error:
            log.warning("lease_close_failed", partition=lease.partition, error=str(error))

    async def _idle(self) -> bool:
        quiet_s = asyncio.get_running_loop().time() - self._active_at
        if not self._generation or self._closing:
            return False
        if not self._seats:
            return quiet_s > STANDBY_GRACE_S
        runners = [seat.runner for seat in self._seats.values()]
        if quiet_s < IDLE_GRACE_S or any(runner is None or not runner.idle for runner in runners):
            return False
        return all([await runner.lease.caught_up() for runner in runners if runner is not None])

    async def _shut_down(self, member: GroupMember) -> None:
        """Finish the transaction in hand, free the partitions, leave the group."""
        self._at_stop = _runners_of(self._seats)
        seats, self._seats = self._seats, {}
        self._ended.set()
        for seat in seats.values():
            if seat.task is not None:
                await asyncio.wait({seat.task})
        stops = [runner.stop(drain_s=self.settings.shutdown_timeout_s) for runner in _runners_of(seats)]
        outcomes = await asyncio.gather(*stops, *self._closing.values(), return_exceptions=True)
        await member.leave()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, BrokerError):
                raise outcome


def _runners_of(seats: Mapping[int, _Seat]) -> list[PartitionRunner]:
    return [seat.runner for seat in seats.values() if seat.runner is not None]
