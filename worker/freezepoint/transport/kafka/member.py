"""One process in the consumer group: polls, and acquires the partitions it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from aiokafka.structs import TopicPartition

from freezepoint.core.records import InputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.intake import Intake
from freezepoint.transport.kafka.lease import Acquired, KafkaLease
from freezepoint.transport.kafka.marks import recorded_in
from freezepoint.transport.kafka.publisher import Publisher
from freezepoint.transport.kafka.scan import scan
from freezepoint.transport.ports import Poll
from freezepoint.wording import counted
from freezepoint_schemas.topics import Topic


class KafkaMember:
    """See the ``GroupMember`` port."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._topic = cluster.names[Topic.TOKENS]
        self._intake = Intake(cluster, group, self._topic)
        self._reported = 0
        self._publishers: set[Publisher] = set()
        self.closed = False

    @property
    def session_timeout_s(self) -> float:
        return self._cluster.clients.settings.session_timeout_ms / 1000

    async def open(self) -> None:
        await self._cluster.partitions(Topic.TOKENS)
        await self._intake.open()

    async def poll(self, timeout_s: float, records_max: int) -> Poll:
        """A new generation is reported at once, before any record of it."""
        records: dict[int, Sequence[InputRecord]] = {}
        if self._intake.generation == self._reported:
            records = await self._intake.fetch(timeout_s, records_max)
        if self._intake.generation != self._reported:
            self._reported = self._intake.generation
            if not self._intake.assigned:
                await self._cluster.partitions(Topic.TOKENS)  # of a deleted topic nobody has a partition
        return Poll(self._reported, self._intake.assigned, records)

    async def acquire(self, partition: int) -> KafkaLease:
        """The order is what makes it safe: fence first, prove the ownership, and only then read what the predecessor,
        who can add nothing any more, has left."""
        epoch, generation = self._intake.epoch, self._intake.generation
        self._intake.require(partition, epoch)
        publisher = Publisher(
            self._cluster,
            f"{self._cluster.clients.settings.transactional_id_prefix}.{self._topic}.{partition}",
            TopicPartition(self._cluster.names[Topic.LEDGER], partition),
        )
        self._publishers = {known for known in self._publishers if not known.ended} | {publisher}
        try:
            partition_count = await self._partition_count()
            await publisher.start()
            source = TopicPartition(self._topic, partition)
            log_start = (await self._cluster.starts([source]))[source]
            log_end = (await self._cluster.ends([source]))[source]
            committed, text = await self._prove(partition, epoch, log_start)
            ledger = await self._ledger(partition)
            self._intake.require(partition, epoch)
        except BaseException:
            publisher.discard()
            raise
        acquired = Acquired(
            partition, generation, partition_count, log_start, log_end, committed, recorded_in(text), ledger
        )
        return KafkaLease(acquired, publisher, self._intake, self._cluster)

    async def _prove(self, partition: int, epoch: int, log_start: int) -> tuple[int | None, str]:
        """Ownership: the group takes a commit from us, and the assignment is the same after the answer.

        A process that slept through its session may still believe in its assignment and fence the owner by its
        producer; it fails here, since the group has moved on. The epoch is looked at after the commit, because the
        client repeats a commit as whatever generation it has joined meanwhile.

        It changes nothing: what stands beside the offset is committed again, since of the ledger nothing is known here yet.
        """
        committed, text = await self._intake.stored(partition)
        await self._intake.commit({partition: log_start if committed is None else committed}, text)
        self._intake.require(partition, epoch)
        return committed, text

    async def _partition_count(self) -> int:
        """:raises ConfigurationError: the ledger has not the partitions of the tokens topic."""
        names = self._cluster.names
        tokens, ledger = (
            await self._cluster.partitions(Topic.TOKENS),
            await self._cluster.partitions(Topic.LEDGER),
        )
        if tokens != ledger:
            raise ConfigurationError(
                f"topic {names[Topic.TOKENS]} has {counted(tokens, 'partition')} and {names[Topic.LEDGER]} has {ledger}: they need "
                "the same count (freezepoint topics check)"
            )
        return tokens

    async def _ledger(self, partition: int) -> list[InputRecord]:
        """The latest record of each key, in offset order."""
        source = TopicPartition(self._cluster.names[Topic.LEDGER], partition)
        start = (await self._cluster.starts([source]))[source]
        end = (await self._cluster.ends([source]))[source]
        latest: dict[bytes | None, InputRecord] = {}
        async with aclosing(scan(self._cluster, source, start, end)) as batches:
            async for records in batches:
                latest.update((record.key, record) for record in records)
        return sorted(latest.values(), key=lambda record: record.offset)

    async def leave(self) -> None:
        """Frees the producers of leases that were not closed, too."""
        self.closed = True
        await asyncio.gather(*(publisher.close() for publisher in self._publishers))
        self._publishers.clear()
        await self._intake.close()
