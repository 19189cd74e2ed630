"""Committed records of one topic, without a group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiokafka.structs import TopicPartition

from freezepoint.core.records import InputRecord
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate, translated
from freezepoint.transport.kafka.scan import input_record


class KafkaReader:
    """See the ``Reader`` port."""

    def __init__(self, cluster: Cluster, topic: str, partitions: Sequence[int]) -> None:
        self._cluster = cluster
        self._topic = topic
        self._sources = [TopicPartition(topic, partition) for partition in partitions]
        self._next: dict[TopicPartition, int] = {}
        self._consumer: Any = None
        self.closed = False

    async def open(self, start: Mapping[int, int]) -> None:
        """Assigned and positioned in one breath, so that the client never looks for offsets by itself. A start below the
        log's is the log's: what retention has removed cannot be read."""
        consumer = self._cluster.clients.consumer()
        await self._cluster.clients.start(consumer, f"connecting to read {self._topic}")
        self._consumer = consumer
        first = await self._cluster.starts(self._sources)
        consumer.assign(self._sources)
        for source in self._sources:
            self._next[source] = max(start.get(source.partition, 0), first[source])
            consumer.seek(source, self._next[source])

    async def poll(self, timeout_s: float, records_max: int) -> Sequence[InputRecord]:
        try:
            batches = await self._consumer.getmany(
                timeout_ms=max(0, int(timeout_s * 1000)), max_records=records_max
            )
        except CLIENT_ERRORS as error:
            for (
                source,
                offset,
            ) in self._next.items():  # the client may have dropped records it had already drained
                self._consumer.seek(source, offset)
            raise translate(error, f"reading {self._topic}") from error
        records: list[InputRecord] = []
        for source, messages in batches.items():
            records.extend(input_record(message) for message in messages)
            self._next[source] = messages[-1].offset + 1
        return records

    async def at_end(self) -> bool:
        """By position, which passes over markers and aborted records, against the last stable offsets of now."""
        ends = await self._cluster.ends(self._sources)
        with translated(f"reading {self._topic}"):
            positions = await asyncio.gather(*(self._consumer.position(source) for source in self._sources))
        return all(
            position >= ends[source] for source, position in zip(self._sources, positions, strict=True)
        )

    async def close(self) -> None:
        self.closed = True
        if self._consumer is not None:
            await self._cluster.clients.close(self._consumer)
