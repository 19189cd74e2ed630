"""The Kafka transport. Reading guide: ``member`` (acquiring a partition), ``publisher`` (transactions), ``intake`` (a
group's consumer), ``subscription`` (a group that stores its own offsets), ``client`` (how clients are set up and
closed), ``cluster`` and ``admin`` (topics), ``examine`` (what ``freezepoint doctor`` asks of the cluster)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka.admin import KafkaTopicAdmin
from freezepoint.transport.kafka.client import Clients
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.examine import clock_ahead_s, examine, offsets
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint.transport.kafka.producer import KafkaProducer
from freezepoint.transport.kafka.reader import KafkaReader
from freezepoint.transport.kafka.subscription import KafkaSubscription
from freezepoint.transport.ports import FROM_THE_BEGINNING, Examined, Extent, GroupOffset, StartAt
from freezepoint_schemas.topics import Topic, TopicNames

__all__ = ["KafkaTransport"]


class KafkaTransport:
    """A Kafka cluster, reached on first use. ``bootstrap``: ``host:port`` of some brokers, with commas between them."""

    def __init__(self, bootstrap: str, names: TopicNames, settings: KafkaSettings) -> None:
        self.names = names
        self._clients = Clients(bootstrap, settings)
        self._cluster = Cluster(self._clients, names)
        self._made: list[KafkaProducer | KafkaMember | KafkaReader | KafkaSubscription] = []

    async def producer(self) -> KafkaProducer:
        producer = KafkaProducer(self._cluster)
        await producer.open()
        self._keep(producer)
        return producer

    async def join(self, group: str) -> KafkaMember:
        """:raises MissingTopicError: there is no tokens topic."""
        member = KafkaMember(self._cluster, group)
        await member.open()
        self._keep(member)
        return member

    async def subscribe(
        self, topic: Topic, group: str, start: StartAt = FROM_THE_BEGINNING
    ) -> KafkaSubscription:
        """:raises MissingTopicError: the topic does not exist."""
        subscription = KafkaSubscription(self._cluster, topic, group, start)
        self._keep(subscription)
        await subscription.open()
        return subscription

    async def reader(
        self, topic: Topic, *, partitions: Sequence[int] | None = None, start: Mapping[int, int] | None = None
    ) -> KafkaReader:
        """:raises MissingTopicError: the topic does not exist."""
        count = await self._cluster.partitions(topic)
        reader = KafkaReader(
            self._cluster, self.names[topic], range(count) if partitions is None else partitions
        )
        self._keep(reader)
        await reader.open(start or {})
        return reader

    def _keep(self, made: KafkaProducer | KafkaMember | KafkaReader | KafkaSubscription) -> None:
        self._made = [*(other for other in self._made if not other.closed), made]

    def admin(self) -> KafkaTopicAdmin:
        return KafkaTopicAdmin(self._cluster)

    async def examine(self, group: str) -> Examined:
        return await examine(self._cluster, group)

    async def offsets(self, group: str) -> dict[int, GroupOffset]:
        return await offsets(self._cluster, group)

    async def clock_ahead_s(self) -> tuple[float, float]:
        return await clock_ahead_s(self._cluster)

    async def extents(self, topic: Topic) -> dict[int, Extent]:
        return await self._cluster.extents(topic)

    async def close(self) -> None:
        """Close whatever this transport made and wait until every connection is gone."""
        await asyncio.gather(
            *(made.leave() if isinstance(made, KafkaMember) else made.close() for made in self._made)
        )
        self._made.clear()
        await self._cluster.close()
        await self._clients.drain()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
