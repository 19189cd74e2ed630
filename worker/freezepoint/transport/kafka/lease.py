"""Exclusive ownership of one token partition: its facts when acquired, its publisher, its delivery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka.structs import TopicPartition

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import FreezepointError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.intake import Delivery, Intake
from freezepoint.transport.kafka.marks import mark
from freezepoint.transport.kafka.publisher import Publisher
from freezepoint.transport.kafka.scan import record_at
from freezepoint_schemas.topics import Topic


@dataclass(frozen=True, slots=True)
class Acquired:
    """What was found when the partition was acquired; see the ``Lease`` port."""

    partition: int
    generation: int
    partition_count: int
    log_start: int
    log_end: int
    committed: int | None
    recorded: int | None
    ledger: Sequence[InputRecord]


class KafkaLease:
    """See the ``Lease`` port. A publication that fails, is cancelled or times out ends the lease."""

    def __init__(self, acquired: Acquired, publisher: Publisher, intake: Intake, cluster: Cluster) -> None:
        self._acquired = acquired
        self._generation = acquired.generation
        self._publisher = publisher
        self._intake = intake
        self._cluster = cluster
        self._delivery: Delivery | None = None

    @property
    def partition(self) -> int:
        return self._acquired.partition

    @property
    def partition_count(self) -> int:
        return self._acquired.partition_count

    @property
    def log_start(self) -> int:
        return self._acquired.log_start

    @property
    def log_end(self) -> int:
        return self._acquired.log_end

    @property
    def committed(self) -> int | None:
        return self._acquired.committed

    @property
    def recorded(self) -> int | None:
        return self._acquired.recorded

    @property
    def ledger(self) -> Sequence[InputRecord]:
        return self._acquired.ledger

    async def record_at(self, offset: int) -> InputRecord | None:
        source = TopicPartition(self._cluster.names[Topic.TOKENS], self.partition)
        return await record_at(self._cluster, source, offset)

    async def first(self) -> int:
        source = TopicPartition(self._cluster.names[Topic.TOKENS], self.partition)
        return (await self._cluster.starts([source]))[source]

    async def start(self, offset: int) -> None:
        """:raises OwnershipLostError: the generation it was acquired in has passed."""
        self._intake.require_generation(self.partition, self._generation)
        self._delivery = self._intake.deliver(self.partition, offset)

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        await self._publisher.publish(records)

    async def renew(self, generation: int, offset: int, records: Sequence[OutputRecord]) -> None:
        """A transaction that commits after the new assignment proves that nobody started in between.

        :raises ValueError: no records, and so no proof.
        """
        if not records:
            raise ValueError("renewing a lease takes a record to publish")
        self._intake.require_generation(self.partition, generation)
        await self._publisher.publish(records)
        self._intake.require_generation(self.partition, generation)
        self._generation = generation
        self._delivery = self._intake.deliver(self.partition, offset)

    async def commit_hint(self, offset: int, recorded: int) -> bool:
        """Only as the partition's owner, and whatever comes of it: the ledger holds what counts."""
        if not self._intake.is_delivered(self._delivery) or self._publisher.ended:
            return False
        try:
            await self._intake.commit({self.partition: offset}, mark(recorded))
        except FreezepointError:
            return False
        return True

    async def caught_up(self) -> bool:
        return self._delivery is not None and await self._intake.caught_up(self._delivery)

    async def end(self) -> int:
        source = TopicPartition(self._cluster.names[Topic.TOKENS], self.partition)
        return (await self._cluster.ends([source]))[source]

    def pause(self) -> None:
        if self._delivery is not None:
            self._intake.pause(self._delivery)

    def resume(self) -> None:
        if self._delivery is not None:
            self._intake.resume(self._delivery)

    async def close(self) -> None:
        if self._delivery is not None:
            self._intake.end_delivery(self._delivery)
        await self._publisher.close()
