"""Records to a client's producer: split, addressed, sent, and each acknowledgement awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from freezepoint.core.records import OutputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.transport.kafka.client import retrieve
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.splitting import split_record
from freezepoint_schemas.topics import partition_for

WINDOW_BYTES = 16 * 1024 * 1024
"""How much is handed to the client before its acknowledgements are awaited. A broker closes the connection on a request
above ``socket.request.max.bytes`` (100 MiB), and the client would repeat it for ever."""


def split_all(records: Iterable[OutputRecord], cluster: Cluster) -> list[OutputRecord]:
    """The records, those above their topic's limit in parts.

    :raises RecordTooLargeError: key and headers alone leave no room.
    """
    return [
        part for record in records for part in split_record(record, cluster.record_bytes_max(record.topic))
    ]


async def send_all(producer: Any, records: Iterable[OutputRecord], cluster: Cluster) -> None:
    """Send, and return once every record is acknowledged. Raises the first failure, as the client named it."""
    window: list[asyncio.Future[Any]] = []
    size_bytes = 0
    for record in records:
        window.append(await _enqueue(producer, record, cluster))
        size_bytes += record.size
        if size_bytes >= WINDOW_BYTES:
            await _acknowledged(window)
            window, size_bytes = [], 0
    await _acknowledged(window)


async def _enqueue(producer: Any, record: OutputRecord, cluster: Cluster) -> asyncio.Future[Any]:
    name = cluster.names[record.topic]
    value = record.value
    if record.key is None and value is None:
        value = b""  # legal in Kafka, but the client asserts that a record has a key or a value
    future: asyncio.Future[Any] = await producer.send(
        name,
        value,
        record.key,
        partition=await _partition(producer, name, record),
        headers=list(record.headers),
    )
    retrieve(future)
    return future


async def _partition(producer: Any, name: str, record: OutputRecord) -> int | None:
    """By the live metadata, so that a grown topic is noticed as by every other producer. Without a key: any."""
    known = await producer.partitions_for(name)
    if record.partition is not None:
        if record.partition not in known:
            raise ConfigurationError(
                f"topic {name} has {len(known)} partitions, and a record belongs on number {record.partition}: the "
                "tokens and ledger topics need the same count (freezepoint topics check)"
            )
        return record.partition
    return None if record.key is None else partition_for(record.key, len(known))


async def _acknowledged(futures: list[asyncio.Future[Any]]) -> None:
    """Wait for all of them, also past a failure. A transaction commits although one of its records failed, so that
    each must be looked at."""
    if not futures:
        return
    await asyncio.wait(futures)
    for future in futures:
        future.result()
