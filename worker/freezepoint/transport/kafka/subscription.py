"""One consumer of a group over any topic: the group's own offsets, and positions kept across rebalances."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from aiokafka.structs import TopicPartition

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError, OwnershipLostError
from freezepoint.transport.kafka.client import retrieve
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.intake import Delivery, Intake
from freezepoint.transport.ports import Extent, Feed, StartAt, Started
from freezepoint.transport.starting import StoredOffsets, resume_at
from freezepoint_schemas.topics import Topic

RETRY_S = 0.5


class KafkaSubscription:
    """See the ``Subscription`` port.

    The client's assignors are eager: every rebalance takes all positions away. They are kept here, so that a partition
    that stays goes on where it was instead of at the stored offset.
    """

    def __init__(self, cluster: Cluster, topic: Topic, group: str, start: StartAt) -> None:
        self._cluster = cluster
        self._logical = topic
        self._topic = cluster.names[topic]
        self._group = group
        self._intake = Intake(cluster, group, self._topic)
        self._offsets = StoredOffsets(start)
        self._generation = 0
        self._assigned: frozenset[int] = frozenset()
        self._next: dict[int, int] = {}
        """After the last record handed out, of partitions whose start was reported."""
        self._deliveries: dict[int, Delivery] = {}
        self._started: dict[int, Started] = {}
        self._starting: asyncio.Task[None] | None = None
        self._paused = False
        self.closed = False

    async def open(self) -> None:
        """:raises MissingTopicError: the topic does not exist."""
        await self._cluster.partitions(self._logical)
        await self._intake.open()

    async def poll(self, timeout_s: float, records_max: int) -> Feed:
        """A new generation is reported at once; its partitions are looked up and started meanwhile."""
        if self._intake.generation == self._generation:
            self._raise_if_not_started()
            records = await self._intake.fetch(timeout_s, records_max)
            if self._intake.generation == self._generation:
                return self._feed(records)
        self._begin()
        return Feed(self._generation, self._assigned)

    def _feed(self, records: Mapping[int, Sequence[InputRecord]]) -> Feed:
        started, self._started = self._started, {}
        for partition, start in started.items():
            self._next[partition] = start.offset
        for partition, batch in records.items():
            self._next[partition] = batch[-1].offset + 1
        return Feed(self._generation, self._assigned, started, records)

    # -------------------------------------------------------------------------------------------------------- starting

    def _begin(self) -> None:
        """The task of the generation before ends by itself: it looks at the generation after every wait."""
        self._generation, self._assigned = self._intake.generation, self._intake.assigned
        self._deliveries.clear()
        self._started.clear()
        self._next = {
            partition: offset for partition, offset in self._next.items() if partition in self._assigned
        }
        self._starting = asyncio.create_task(self._start_patiently(self._generation, sorted(self._assigned)))
        retrieve(self._starting)

    def _raise_if_not_started(self) -> None:
        if self._starting is not None and self._starting.done():
            task, self._starting = self._starting, None
            task.result()

    async def _start_patiently(self, generation: int, partitions: Sequence[int]) -> None:
        """Also through a broker's restart, for as long as the intake would wait for an answer."""
        give_up_at = time.monotonic() + 2 * self._cluster.clients.timeout_s
        while True:
            try:
                await self._start(generation, partitions)
            except OwnershipLostError:
                return  # a new assignment is coming
            except BrokerError:
                if time.monotonic() > give_up_at:
                    raise
            else:
                return
            await asyncio.sleep(RETRY_S)

    async def _start(self, generation: int, partitions: Sequence[int]) -> None:
        if not partitions:
            return
        sources = [TopicPartition(self._topic, partition) for partition in partitions]
        stored = await asyncio.gather(*(self._intake.committed(partition) for partition in partitions))
        firsts, ends = await asyncio.gather(self._cluster.starts(sources), self._cluster.ends(sources))
        starts: dict[int, Started] = {}
        unstored: dict[int, Extent] = {}
        for source, offset in zip(sources, stored, strict=True):
            extent = Extent(firsts[source], ends[source])
            if self._is_kept(source.partition, offset, extent):
                continue
            if offset is not None and self._offsets.is_honoured(source.partition):
                where = f"group {self._group}, {self._topic}[{source.partition}]"
                starts[source.partition] = resume_at(offset, extent, where)
            else:
                unstored[source.partition] = extent
        if unstored:
            begins = await self._beginnings(unstored)
            self._require(generation)
            await self._intake.commit(begins)
            starts |= {partition: Started(offset) for partition, offset in begins.items()}
        self._require(generation)
        for partition in partitions:
            self._deliver(partition, starts.get(partition))

    def _is_kept(self, partition: int, stored: int | None, extent: Extent) -> bool:
        position = self._next.get(partition)
        return position is not None and position >= extent.first and self._offsets.is_ours(partition, stored)

    async def _beginnings(self, extents: Mapping[int, Extent]) -> dict[int, int]:
        """Where to begin without a stored offset."""
        position = self._offsets.start.position
        if position == "earliest":
            return {partition: extent.first for partition, extent in extents.items()}
        if position == "latest":
            return {partition: extent.end for partition, extent in extents.items()}
        sources = [TopicPartition(self._topic, partition) for partition in extents]
        found = await self._cluster.at_time(sources, position)
        ends = {partition: extent.end for partition, extent in extents.items()}
        return {source.partition: min(found[source], ends[source.partition]) for source in sources}

    def _require(self, generation: int) -> None:
        if self._intake.generation != generation or self._intake.rebalancing:
            raise OwnershipLostError(f"the assignment of {self._topic} has passed")

    def _deliver(self, partition: int, start: Started | None) -> None:
        if start is not None:
            self._offsets.started(partition, start.offset)
            self._started[partition] = start
        offset = self._next[partition] if start is None else start.offset
        delivery = self._deliveries[partition] = self._intake.deliver(partition, offset)
        if self._paused:
            self._intake.pause(delivery)

    # ------------------------------------------------------------------------------------------------------ the rest

    async def commit(self, generation: int, offsets: Mapping[int, int]) -> None:
        self._require(generation)
        for partition, offset in offsets.items():
            self._offsets.asked(partition, offset)
        await self._intake.commit(offsets)

    async def caught_up(self) -> bool:
        if not self._assigned or self._started or self._assigned != self._deliveries.keys():
            return False
        found = await asyncio.gather(
            *(self._intake.caught_up(delivery) for delivery in self._deliveries.values())
        )
        return all(found)

    def shared_out(self) -> bool:
        """The coordinator assigns nothing before every member has joined, or was silent for its session timeout."""
        return self._generation == self._intake.generation

    def pause(self) -> None:
        self._paused = True
        for delivery in self._deliveries.values():
            self._intake.pause(delivery)

    def resume(self) -> None:
        self._paused = False
        for delivery in self._deliveries.values():
            self._intake.resume(delivery)

    async def close(self) -> None:
        self.closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
            self._starting = None
        await self._intake.close()
