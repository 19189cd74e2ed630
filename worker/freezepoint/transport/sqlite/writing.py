"""Preparing records for a write transaction, and the producer."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from itertools import accumulate, chain

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.ports import Position
from freezepoint.transport.splitting import RECORD_OVERHEAD_BYTES, split_record
from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.database import WriteConnection
from freezepoint_schemas.topics import TopicNames


def now_ms() -> int:
    """The append time of records; per partition it never steps back (``log.append``)."""
    return time.time_ns() // 1_000_000


async def split_all(
    records: Sequence[OutputRecord], record_bytes_max: int
) -> Sequence[Sequence[OutputRecord]]:
    """Each record, or its parts where it is above the limit, cut before the write lock is held and off the event loop.

    :raises RecordTooLargeError: one cannot be split.
    """
    if all(record.size + RECORD_OVERHEAD_BYTES <= record_bytes_max for record in records):
        return [(record,) for record in records]
    return await asyncio.to_thread(
        lambda: [tuple(split_record(record, record_bytes_max)) for record in records]
    )


class SqliteProducer:
    """Appends records; ``send`` calls that wait at the same time share one transaction and its fsync."""

    def __init__(self, writer: WriteConnection, names: TopicNames, settings: SqliteSettings) -> None:
        self._writer = writer
        self._names = names
        self._settings = settings
        self._closed = False

    async def send(self, records: Sequence[OutputRecord]) -> Sequence[Position]:
        if self._closed:
            raise BrokerError("the producer is closed")
        split = await split_all(records, self._settings.record_bytes_max)

        def append(connection: sqlite3.Connection) -> list[Position]:
            return log.append(connection, self._names, chain(*split), now_ms())

        positions = await self._writer.run(append)
        return [positions[end - 1] for end in accumulate(map(len, split))]

    async def close(self) -> None:
        self._closed = True
