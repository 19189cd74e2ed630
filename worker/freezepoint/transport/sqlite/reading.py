"""The reader of one topic, and the look at the database that it shares with group members."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.database import ReadConnection
from freezepoint.transport.sqlite.waiting import Pace


def data_version(connection: sqlite3.Connection) -> int:
    """A number that changes when anybody else commits; asking costs microseconds and reads no page."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


class Rotation:
    """Lets each partition be the first in turn, so that a full one cannot hold the others back."""

    def __init__(self) -> None:
        self._turn = 0

    def next(self, cursors: Sequence[log.Cursor]) -> list[log.Cursor]:
        self._turn += 1
        cut = self._turn % len(cursors) if cursors else 0
        return [*cursors[cut:], *cursors[:cut]]


class SqliteReader:
    """Reads some partitions of a topic from given offsets on."""

    def __init__(
        self, connection: ReadConnection, cursors: Sequence[log.Cursor], settings: SqliteSettings
    ) -> None:
        self._connection = connection
        self._cursors = {cursor.partition: cursor for cursor in cursors}
        self._settings = settings
        self._rotation = Rotation()
        self._pace = Pace(settings)
        self._exhausted_at: int | None = None
        self.closed = False

    async def poll(self, timeout_s: float, records_max: int) -> Sequence[InputRecord]:
        if self.closed:
            raise BrokerError("the reader is closed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (records := await self._look(records_max)):
            left_s = deadline - loop.time()
            if left_s <= 0:
                return []
            await self._pace.wait(left_s)
        self._pace.reset()
        return records

    async def _look(self, records_max: int) -> list[InputRecord]:
        """The next records; nothing where nobody has committed since a look that found nothing."""
        exhausted_at = self._exhausted_at
        cursors = self._rotation.next(list(self._cursors.values()))

        def look(connection: sqlite3.Connection) -> tuple[int, dict[int, list[InputRecord]]]:
            version = data_version(connection)  # first: what is committed after it shows in the next look
            if version == exhausted_at:
                return version, {}
            return version, log.fetch(connection, cursors, records_max, self._settings.poll_bytes_max)

        version, found = await self._connection.run(look)
        self._exhausted_at = None if found else version
        for partition, records in found.items():
            self._cursors[partition] = log.Cursor(
                self._cursors[partition].stream, partition, records[-1].offset + 1
            )
        return [record for records in found.values() for record in records]

    async def at_end(self) -> bool:
        cursors = list(self._cursors.values())
        return await self._connection.run(lambda connection: log.is_at_end(connection, cursors))

    async def close(self) -> None:
        self.closed = True
        await self._connection.close()
