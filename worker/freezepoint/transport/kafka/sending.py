"""Records to a client's producer: split, addressed, sent, and each acknowledgement awaited."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from freezepoint.core.records import OutputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.transport.kafka.client import retrieve
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.ports import Position
from freezepoint.transport.splitting import measured
from freezepoint.wording import counted
from freezepoint_schemas.topics import partition_for

WINDOW_BYTES = 16 * 1024 * 1024
"""How much is handed to the client before its acknowledgements are awaited. A broker closes the connection on a request
above ``socket.request.max.bytes`` (100 MiB), and the client would repeat it for ever."""


def in_parts(records: Sequence[OutputRecord], cluster: Cluster) -> Iterator[OutputRecord]:
    """The records, those above their topic's limit in parts. All are looked at now, and each is cut only when its turn
    comes: the parts of a large transaction would double it.

    :raises RecordTooLargeError: key and headers alone leave no room.
    """
    found = [measured(record, cluster.record_bytes_max(record.topic)) for record in records]
    return (part for record in found for part in record.parts())


async def send_all(producer: Any, records: Iterable[OutputRecord], cluster: Cluster) -> list[Position]:
    """Send, and return where each record lies, once all are acknowledged. Raises the first failure, as the client named
    it."""
    positions: list[Position] = []
    window: list[asyncio.Future[Any]] = []
    size_bytes = 0
    for record in records:
        window.append(await _enqueue(producer, record, cluster))
        size_bytes += record.size
        if size_bytes >= WINDOW_BYTES:
            positions += await _acknowledged(window)
            window, size_bytes = [], 0
    return positions + await _acknowledged(window)


async def _enqueue(producer: Any, record: OutputRecord, cluster: Cluster) -> asyncio.Future[Any]:
    name = cluster.names[record.topic]
    partition = _partition(name, record, await producer.partitions_for(name))
    headers = list(record.headers)
    future: asyncio.Future[Any]
    if record.key is None and record.value is None:
        # Legal in Kafka, but the client's send asserts that there is a key or a value; its batches do not.
        batch = producer.create_batch()
        batch.append(key=None, value=None, timestamp=None, headers=headers)
        future = await producer.send_batch(batch, name, partition=partition)
    else:
        future = await producer.send(name, record.value, record.key, partition=partition, headers=headers)
    retrieve(future)
    return future


def _partition(name: str, record: OutputRecord, known: Collection[int]) -> int:
    """By the live metadata, so that a grown topic is noticed as by every other producer. Without a key: any."""
    if record.partition is None:
        return (
            partition_for(record.key, len(known)) if record.key is not None else random.choice(sorted(known))
        )
    if record.partition not in known:
        raise ConfigurationError(
            f"topic {name} has {counted(len(known), 'partition')}, and a record belongs on number {record.partition}: the tokens and "
            "ledger topics need the same count (freezepoint topics check)"
        )
    return record.partition


async def _acknowledged(futures: list[asyncio.Future[Any]]) -> list[Position]:
    """Wait for all of them, also past a failure. A transaction commits although one of its records failed, so that
    each must be looked at. One by one, which costs a turn of the event loop less than waiting for all at once."""
    stored: list[Any] = []
    failures: list[Exception] = []
    for future in futures:
        try:
            stored.append(await future)
        except Exception as error:  # noqa: BLE001 - the first one is raised, whatever it is
            failures.append(error)
    if failures:
        raise failures[0]
    return [Position(metadata.partition, metadata.offset) for metadata in stored]
