"""The reader at work, on an event loop of its own: polls, decodes, keeps what is ready, and stores what is acknowledged.

It polls steadily whatever the trainer does, since polls keep the membership: a training step may take minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from freezepoint.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    FreezepointError,
    OwnershipLostError,
)
from freezepoint.reader.acks import Claim
from freezepoint.reader.book import PartitionBook
from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.desk import Desk
from freezepoint.reader.options import ReadOptions
from freezepoint.reader.results import BadResultError, ReadResult
from freezepoint.reader.shelf import GroupShelf, Item, Shelf
from freezepoint.reader.trajectory import RolloutGroup, Trajectory
from freezepoint.settings import ReaderSettings
from freezepoint.training.delivery import view
from freezepoint.transport.ports import Feed, Started, Subscription, Transport
from freezepoint_schemas.topics import Topic

log = logging.getLogger("freezepoint.reader")

TURN_S_MIN = 0.005


@dataclass(slots=True)
class Slot:
    """Where the engine puts what it hands over, so that nothing is lost when whoever asked is interrupted."""

    item: Item | None = None
    handed: Trajectory | RolloutGroup | None = None


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
        self._subscription: Subscription | None = None
        self._generation = 0
        self._assigned: frozenset[int] = frozenset()
        self._sole = isinstance(shelf, GroupShelf)
        self._partition_count = 0
        self._paused = False
        self._reading_s = 0.0
        self._looked_at: float | None = None
        self._commit_due = 0.0
        self._lacking_since: float | None = None
        """Since when partitions are missing, of a reader that needs all; None while it has them."""
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
            if self._sole:
                self._partition_count = await self._transport.admin().partitions(Topic.TRAJECTORIES)
            await self._subscribe()
            while not self._closing.is_set() and not self._ended:
                await self._turn()
        except Exception as error:  # noqa: BLE001 - it is the trainer's to see, who asks for the next result
            self._failure = error
        finally:
            self._changed.set()
        if self._ended:
            await self._commit_until_closed()

    async def _subscribe(self) -> None:
        self._subscription = await self._transport.subscribe(
            Topic.TRAJECTORIES, self._options.group, self._options.start
        )
        self._generation, self._assigned = 0, frozenset()
        self._lacking_since = asyncio.get_running_loop().time()
        if self._sole:
            self._pause()

    async def _turn(self) -> None:
        assert self._subscription is not None
        feed = await self._subscription.poll(self._turn_s(), self._settings.poll_records_max)
        self._read_clock()
        await self._take(feed)
        self._shelf.expire(self._reading_s)
        if not self._options.follow and not feed.records and not self._paused:
            self._ended = await self._subscription.caught_up()
            if self._ended:
                self._shelf.flush()
        self._balance()
        self._changed.set()
        await self._commit_if_due()

    def _turn_s(self) -> float:
        """How long to wait for records: until the next deadline at most."""
        longest = self._settings.poll_timeout_ms / 1000
        deadline = self._shelf.next_deadline_s()
        if deadline is None or self._paused:
            return longest
        return min(longest, max(TURN_S_MIN, deadline - self._reading_s))

    def _read_clock(self) -> None:
        """Time counts only while reading: a group is not late because this reader itself held back its results."""
        now = self._clock()
        if self._looked_at is not None and not self._paused:
            self._reading_s += now - self._looked_at
        self._looked_at = now

    async def _take(self, feed: Feed) -> None:
        if self._sole and await self._is_broken(feed):
            return
        if feed.generation != self._generation:
            self._reassigned(feed)
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

    def _reassigned(self, feed: Feed) -> None:
        lost = self._assigned - feed.assigned
        self._generation, self._assigned = feed.generation, feed.assigned
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

    # --------------------------------------------------------------------------------------- pace, and the sole reader

    def _balance(self) -> None:
        """Pause when enough is ready, go on when half of it is taken: a pause discards what was fetched ahead."""
        if self._sole and len(self._assigned) < self._partition_count:
            return
        results, size_bytes = self._shelf.waiting
        limits = self._settings
        if results >= limits.prefetch_results_max or size_bytes >= limits.prefetch_bytes_max:
            self._pause()
        elif 2 * results <= limits.prefetch_results_max and 2 * size_bytes <= limits.prefetch_bytes_max:
            self._resume()

    def _pause(self) -> None:
        if not self._paused and self._subscription is not None:
            self._paused = True
            self._subscription.pause()

    def _resume(self) -> None:
        if self._paused and self._subscription is not None:
            self._read_clock()
            self._paused = False
            self._subscription.resume()

    async def _is_broken(self, feed: Feed) -> bool:
        """Whether groups cannot be read on from here. A group's rollouts lie on all partitions, so that its reader needs
        every one of them, and in one piece.

        A reader that loses some joins anew: all it had not acknowledged is then read again, and groups come whole.

        :raises ConfigurationError: another reader of the consumer group stays.
        """
        now = asyncio.get_running_loop().time()
        has_all = len(feed.assigned) == self._partition_count
        restarted = any(partition in self._book for partition in feed.started)
        if restarted or (not has_all and self._lacking_since is None):
            log.warning("group %s lost partitions for a while and joins anew", self._options.group)
            await self._rejoin()
            return True
        if has_all:
            self._lacking_since = None
        elif (
            self._lacking_since is not None
            and now - self._lacking_since > self._settings.sole_reader_timeout_s
        ):
            raise ConfigurationError(
                f"groups() needs every partition of the topic, and {len(feed.assigned)} of {self._partition_count} are "
                f"assigned here: another reader of consumer group {self._options.group!r} is running; give this one another "
                "group, or end the other"
            )
        return False

    async def _rejoin(self) -> None:
        assert self._subscription is not None
        self._drop(frozenset(range(self._partition_count)))
        await self._subscription.close()
        self._paused = False
        await self._subscribe()

    # ------------------------------------------------------------------------------------------------- handing over

    async def fill(self, slot: Slot) -> None:
        """Wait for the next item; the slot stays empty when nothing more will come.

        :raises FreezepointError: reading failed; the reader has ended.
        """
        while True:
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
            if not offsets or self._subscription is None:
                return True
            try:
                await self._subscription.commit(self._generation, offsets)
            except OwnershipLostError:
                return self._failure is not None
            self._book.committed(offsets)
            return True

    async def _commit_until_closed(self) -> None:
        """Everything is read: stay in the group for the acknowledgements still to come."""
        assert self._subscription is not None
        self._subscription.pause()
        while not self._closing.is_set():
            try:
                await self._follow_assignment()
                await self._commit_if_due()
            except FreezepointError as error:
                log.warning("offsets are not stored any more: %s", error)
                return

    async def _follow_assignment(self) -> None:
        assert self._subscription is not None
        feed = await self._subscription.poll(self._settings.poll_timeout_ms / 1000, 1)
        if feed.generation != self._generation:
            self._reassigned(feed)
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
                assert self._subscription is not None
                self._subscription.pause()
                await self._follow_assignment()
