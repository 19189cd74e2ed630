"""Publication of input events: at least once, in order per key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from aiokafka.errors import ProducerClosed

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerUnavailableError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.faults import CLIENT_ERRORS, translate
from freezepoint.transport.kafka.sending import in_parts, send_all
from freezepoint.transport.ports import Position
from freezepoint_schemas.topics import Topic

LINGER_MS = 0
BATCH_BYTES = 256 * 1024
"""A request has a batch of each partition, and any number of sends may be under way: of 400 partitions it stays within what a
broker takes."""


class KafkaProducer:
    """An idempotent producer that is replaced after any failure.

    Replaced, because the client retries an idempotent batch for ever (a caller's retry would only add a second copy),
    and because a refused batch leaves a gap in the partition's sequence that makes the broker refuse the next ones.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._producer: Any = None
        self._batch_bytes = 0
        self._starting = asyncio.Lock()
        self.closed = False

    async def open(self) -> None:
        """Connect, so that a wrong address shows before the first record."""
        await self._cluster.admin()

    async def send(self, records: Sequence[OutputRecord]) -> Sequence[Position]:
        if not records:
            return []
        topics = {record.topic for record in records}
        timeout_s = self._cluster.clients.timeout_s
        producer = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._cluster.prepare(topics)
                    split = [list(in_parts([record], self._cluster)) for record in records]
                    producer = await self._ready()
                    try:
                        positions = await send_all(producer, chain(*split), self._cluster)
                    except ProducerClosed:
                        if self.closed or producer is self._producer:
                            raise
                        # Replaced after another send's failure, which says nothing about these records: send them anew.
                    else:
                        return [positions[end - 1] for end in accumulate(map(len, split))]
        except TimeoutError as error:
            self._replace(producer)
            raise BrokerUnavailableError(
                f"not acknowledged within {timeout_s:g} s while {self._doing(topics)}"
            ) from error
        except CLIENT_ERRORS as error:
            self._replace(producer)
            raise translate(error, self._doing(topics)) from error

    def _doing(self, topics: Iterable[Topic]) -> str:
        return f"sending to {', '.join(sorted(self._cluster.names[topic] for topic in topics))}"

    async def _ready(self) -> Any:
        async with self._starting:
            if self.closed:
                raise BrokerUnavailableError("the producer is closed")
            batch_bytes = self._cluster.batch_bytes(BATCH_BYTES)
            if self._producer is not None and self._batch_bytes > batch_bytes:
                self._replace(self._producer)
            if self._producer is None:
                self._batch_bytes = batch_bytes
                producer = self._cluster.clients.producer(
                    batch_bytes=self._batch_bytes,
                    record_bytes_max=self._cluster.request_bytes_max,
                    linger_ms=LINGER_MS,
                )
                await self._cluster.clients.start(producer, "connecting a producer")
                self._producer = producer
            return self._producer

    def _replace(self, producer: Any) -> None:
        """Also look anew what the topics are like: one may be gone, or take less than it did."""
        self._cluster.forget()
        if producer is not None and producer is self._producer:
            self._producer = None
            self._cluster.clients.dispose(producer, unflushed=True)

    async def close(self) -> None:
        """Every send that returned is durable already, so there is nothing to flush."""
        self.closed = True
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await self._cluster.clients.close(producer)
