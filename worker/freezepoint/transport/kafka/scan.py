"""Reads a stretch of one partition, for the ledger and single records, by a consumer of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiokafka.structs import TopicPartition

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerUnavailableError
from freezepoint.transport.kafka.cluster import Cluster
from freezepoint.transport.kafka.faults import translated

STEP_MS = 100


def input_record(message: Any) -> InputRecord:
    """A client's record as ours; Kafka allows a header without a value, which reads as an empty one."""
    return InputRecord(
        message.partition,
        message.offset,
        message.timestamp,
        message.key,
        message.value,
        tuple([(name, value or b"") for name, value in message.headers]) if message.headers else (),
    )


async def scan(
    cluster: Cluster, source: TopicPartition, start: int, end: int, *, fetch_bytes: int | None = None
) -> AsyncGenerator[list[InputRecord]]:
    """The committed records from ``start`` until the position has passed ``end``.

    Never until a fetch comes back empty: commit and abort markers, aborted records and what compaction removed take
    offsets but yield no record, and a fetch may hold nothing else.
    """
    if start >= end:
        return
    clients, where = cluster.clients, f"reading {source.topic}[{source.partition}]"
    consumer = clients.consumer(partition_fetch_bytes=fetch_bytes)
    await clients.start(consumer, f"{where}, connecting")
    try:
        consumer.assign([source])
        consumer.seek(source, start)
        position, moved_at = start, time.monotonic()
        while position < end:
            with translated(where):
                batches = await consumer.getmany(timeout_ms=STEP_MS)
                reached = await consumer.position(source)
            if batches:
                yield [input_record(message) for message in batches[source]]
            if reached > position:
                position, moved_at = reached, time.monotonic()
            elif time.monotonic() - moved_at > clients.timeout_s:
                raise BrokerUnavailableError(f"no answer from the broker while {where} at offset {position}")
    finally:
        clients.dispose(consumer)


async def record_at(cluster: Cluster, source: TopicPartition, offset: int) -> InputRecord | None:
    """The committed record at exactly that offset; None where there is none (any more, or yet)."""
    start, end = (await cluster.starts([source]))[source], (await cluster.ends([source]))[source]
    if not start <= offset < end:
        return None
    # The broker sends at least one whole batch, however small the limit.
    async with aclosing(scan(cluster, source, offset, offset + 1, fetch_bytes=64 * 1024)) as batches:
        async for records in batches:
            for record in records:
                if record.offset >= offset:
                    return record if record.offset == offset else None
    return None
