"""The reader at work, on an event loop of its own: polls, decodes, keeps what is ready, and stores what is acknowledged.

It polls steadily whatever the trainer does, since polls keep the membership: a training step may take minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from freezepoint.errors import (
    BrokerError,
    BrokerUnavailableError,
    FreezepointError,
    OwnershipLostError,
)
from freezepoint.reader.acks import Claim
from freezepoint.reader.book import PartitionBook
from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.desk import Desk
from freezepoint.reader.options import ReadOptions
from freezepoint.reader.results import BadResultError, ReadResult
from freezepoint.reader.seat import Seat
from freezepoint.reader.shelf import GroupShelf, Item, Shelf
from freezepoint.reader.trajectory import RolloutGroup, Trajectory
from freezepoint.settings import ReaderSettings
from freezepoint.training.delivery import view
from freezepoint.transport.ports import Feed, Started, Transport

log = logging.getLogger("freezepoint.reader")

TURN_S_MIN = 0.005
RETRY_S = 1.0


@dataclass(slots=True)
class Slot:
    """Where the engine puts what it hands over, so that nothing is lost when whoever asked is interrupted."""

    item: Item | None = None
    handed: Trajectory | RolloutGroup | None = None
    abandoned: bool = False
    """Nobody looks into it any more. A cancellation may come to the loop before the coroutine has even begun."""


class Engine:
    """Lives on one loop; every method but :meth:`run` is called there by coroutine or ``call_soon_threadsafe``."""

    def __init__(
        self,
        transport: Transport,
        options: ReadOptions,
        settings: ReaderSettings,
        shelf: Shelf,
        clock: Callable[[], float],
    ) -> None:
        self.counts = ReaderCounts()
        self._transport = transport
        self._options = options
        self._settings = settings
        self._shelf = shelf
        self._clock = clock
        self._book = PartitionBook(settings, self.counts)
        self._desk = Desk(options, self._book, self.counts)
        self._committing = asyncio.Lock()
        self._sole = isinstance(shelf, GroupShelf)
        self._seat = Seat(transport, options, settings, sole=self._sole)
        self._failing_since: float | None = None
        self._reading_s = 0.0
        self._looked_at: float | None = None
        self._commit_due = 0.0
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._ended = False
        self._failure: BaseException | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._running = asyncio.create_task(self._run(), name="freezepoint-reader")

    # --------------------------------------------------------------------------------------------------------- reading

    async def _run(self) -> None:
        try:
            await self._seat.take()
            while not self._closing.is_set() and not self._ended:
                try:
                    await self._turn()
                except BrokerError as error:
                    await self._recover(error)
        except Exception as error:  # noqa: BLE001 - it is the trainer's to see, who asks for the next result
            self._failure = error
        finally:
            self._changed.set()
        if self._ended:
            await self._commit_until_closed()

    async def _turn(self) -> None:
        feed = await self._seat.poll(self._turn_s(), self._settings.poll_records_max)
        if feed.assigned:
            self._failing_since = None
        self._read_clock()
        await self._take(feed)
        self._shelf.expire(self._reading_s)
        if not self._options.follow and not feed.records and not self._seat.paused:
            self._ended = await self._seat.at_end()
            if self._ended:
                self._shelf.flush()
        self._balance()
        self._changed.set()
        await self._commit_if_due()

    async def _recover(self, error: BrokerError) -> None:
        """Join anew, for as long as patience lasts: a trainer shall outlive a broker's restart. What was not acknowledged
        comes again."""
        loop = asyncio.get_running_loop()
        if self._failing_since is None:
            self._failing_since = loop.time()
        while not self._closing.is_set():
            if loop.time() - self._failing_since > self._settings.broker_patience_s:
                raise error
            log.warning("group %s: reading begins anew: %s", self._options.group, error)
            try:
                await self._rejoin()
            except BrokerError as again:
                error = again
            else:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), RETRY_S)

    async def _rejoin(self) -> None:
        self.counts.rejoins += 1
        self._drop(self._book.partitions)
        await self._seat.take()

    def _turn_s(self) -> float:
        """How long to wait for records: until the next deadline at most."""
        longest = self._settings.poll_timeout_ms / 1000
        deadline = self._shelf.next_deadline_s()
        if deadline is None or self._seat.paused:
            return longest
        return min(longest, max(TURN_S_MIN, deadline - self._reading_s))

    def _read_clock(self) -> None:
        """Time counts only while reading: a group is not late because this reader itself held back its results."""
        now = self._clock()
        if self._looked_at is not None and not self._seat.paused:
            self._reading_s += now - self._looked_at
        self._looked_at = now

    async def _take(self, feed: Feed) -> None:
        restarted = any(partition in self._book for partition in feed.started)
        if self._seat.is_broken(feed) or (self._sole and restarted):
            # All that was not acknowledged is read again, so that groups come whole.
            log.warning("group %s lost partitions for a while: reading begins anew", self._options.group)
            await self._rejoin()
            return
        self._follow(feed)
        for partition, started in feed.started.items():
            self._begin(partition, started)
        for records in feed.records.values():
            for record in records:
                try:
                    read = self._book.take(record)
                except BadResultError as error:
                    self.counts.undecodable += 1
                    log.warning("skipped: %s", error)
                    continue
                if read is not None:
                    self._add(read)

    def _begin(self, partition: int, started: Started) -> None:
        if partition in self._book:
            self._drop(frozenset({partition}))
        self._book.start(partition, started.offset)
        self.counts.expired_offsets += started.expired
        if started.expired:
            log.warning(
                "partition %d: %d offsets were removed by retention before group %s read them",
                partition,
                started.expired,
                self._options.group,
            )

    def _follow(self, feed: Feed) -> None:
        lost = self._seat.follow(feed)
        if lost:
            self._drop(lost)

    def _drop(self, partitions: frozenset[int]) -> None:
        """Whoever owns them now reads them again from what is stored."""
        self.counts.revoked += self._shelf.drop(partitions)
        self._book.drop(partitions)

    def _add(self, read: ReadResult) -> None:
        self.counts.read += 1
        claim = self._book.open(read)
        seen = view(read.result, self._options.delivery)
        trajectory = Trajectory(read.result, seen, read.partition, read.offset, read.size_bytes, claim)
        why = self._why_skip(trajectory)
        if why is None:
            why = self._shelf.add(trajectory, self._reading_s)
        if why is not None:
            self.counts.skipped[why] += 1
            self._book.ack(claim)

    def _why_skip(self, trajectory: Trajectory) -> str | None:
        if not trajectory.rollout_id.startswith(self._options.prefix):
            return "other_run"
        if self._book.is_repeat(trajectory) or (
            self._options.seen is not None and self._options.seen(trajectory.delivery_id)
        ):
            return "repeated"
        if trajectory.masked:
            self.counts.masked += 1
            self.counts.masked_by_reason.update(reason.value for reason in trajectory.reasons)
            if not self._options.yield_masked and not self._sole:
                return "masked"
        return None

    def _balance(self) -> None:
        results, size_bytes = self._shelf.waiting
        results_max, bytes_max = self._settings.prefetch_results_max, self._settings.prefetch_bytes_max
        self._read_clock()
        self._seat.regulate(
            full=results >= results_max or size_bytes >= bytes_max,
            room=2 * results <= results_max and 2 * size_bytes <= bytes_max,
        )

    # ------------------------------------------------------------------------------------------------- handing over

    async def fill(self, slot: Slot) -> None:
        """Wait for the next item; the slot stays empty when nothing more will come.

        :raises FreezepointError: reading failed; the reader has ended.
        """
        while not slot.abandoned:
            self._changed.clear()
            version = self._options.version_now()
            item = self._shelf.pop()
            if item is not None:
                handed = self._desk.hand_over(item, version)
                self._balance()
                if handed is not None:
                    slot.item, slot.handed = item, handed
                    return
                continue
            if self._failure is not None:
                raise self._failure
            if self._ended or self._closing.is_set():
                return
            await self._changed.wait()

    def give_back(self, slot: Slot) -> None:
        """Whoever asked was interrupted: the item is the next one again."""
        slot.abandoned = True
        if slot.item is None or slot.handed is None:
            return
        self._desk.take_back(slot.handed)
        self._shelf.put_back(slot.item)
        slot.item = slot.handed = None
        self._changed.set()

    # -------------------------------------------------------------------------------------------- acknowledgements

    def ack(self, claims: Iterable[Claim]) -> None:
        """Of partitions that are another reader's by now, nothing."""
        for claim in claims:
            self._book.ack_by_trainer(claim)

    async def commit(self) -> None:
        """Return once everything acknowledged before is stored, of partitions that stay ours.

        :raises BrokerError: they could not be, within the close timeout.
        """
        try:
            async with asyncio.timeout(self._settings.close_timeout_s):
                while not await self._commit_once():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise BrokerUnavailableError(
                f"offsets of group {self._options.group} not stored within {self._settings.close_timeout_s:g} s"
            ) from None

    async def _commit_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._commit_due:
            return
        self._commit_due = now + self._settings.commit_interval_ms / 1000
        try:
            await self._commit_once()
        except BrokerError as error:
            self.counts.failed_commits += 1
            log.warning("offsets not stored, trying again: %s", error)

    async def _commit_once(self) -> bool:
        """False: the assignment is on the move; what stays ours can be stored after it."""
        async with self._committing:  # so that an older offset never lands after a newer one
            offsets = self._book.uncommitted()
            if not offsets:
                return True
            try:
                await self._seat.commit(offsets)
            except OwnershipLostError:
                return self._failure is not None
            self._book.committed(offsets)
            return True

    async def _commit_until_closed(self) -> None:
        """Everything is read: stay in the group for the acknowledgements still to come."""
        self._seat.pause()
        while not self._closing.is_set():
            try:
                await self._follow_assignment()
                await self._commit_if_due()
            except FreezepointError as error:
                log.warning("offsets are not stored any more: %s", error)
                return

    async def _follow_assignment(self) -> None:
        self._follow(await self._seat.poll(self._settings.poll_timeout_ms / 1000, 1))
        self._changed.set()

    async def close(self) -> None:
        """Store what is acknowledged, leave the group, free everything. Fails at nothing, but says what it could not."""
        self._closing.set()
        self._changed.set()
        if self._running is not None:
            done, _ = await asyncio.wait({self._running}, timeout=self._settings.close_timeout_s)
            if not done:
                self._running.cancel()
                await asyncio.wait({self._running})
        try:
            await self._commit_at_last()
        except (FreezepointError, TimeoutError) as error:
            log.warning("acknowledged results were not stored and will be read again: %s", error)
        await self._transport.close()

    async def _commit_at_last(self) -> None:
        async with asyncio.timeout(self._settings.close_timeout_s):
            while not await self._commit_once():
                self._seat.pause()
                await self._follow_assignment()
