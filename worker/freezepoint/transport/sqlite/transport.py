"""The embedded transport: topics, partitions, groups, atomic publication and fencing in one SQLite file."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from freezepoint.errors import BrokerError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.ports import FROM_THE_BEGINNING, Examined, Extent, GroupOffset, StartAt
from freezepoint.transport.sqlite import group, log
from freezepoint.transport.sqlite.admin import SqliteAdmin
from freezepoint.transport.sqlite.database import ReadConnection, WriteConnection
from freezepoint.transport.sqlite.examine import examine
from freezepoint.transport.sqlite.member import SqliteMember
from freezepoint.transport.sqlite.membership import Membership
from freezepoint.transport.sqlite.reading import SqliteReader
from freezepoint.transport.sqlite.subscription import SqliteSubscription
from freezepoint.transport.sqlite.writing import SqliteProducer
from freezepoint_schemas.topics import Topic, TopicNames


class SqliteTransport:
    """Any number of processes of one machine share the file; it must lie on a local disk.

    A new file gets the four topics on first use, with ``settings.partitions`` partitions, unless
    ``freezepoint topics apply --partitions N`` came first; the count never changes. Acknowledged is durable: every
    commit is synced (``settings.synchronous`` FULL) before it is answered. Writers exclude each other for
    milliseconds; a process that is stopped (not killed) within them holds the others up until it goes on or ends, and
    after ``settings.busy_timeout_ms`` they report it.

    ``only_reading``: the file has to be there and nothing of it is changed, so that it may lie where this user cannot write.
    """

    def __init__(
        self, path: Path, names: TopicNames, settings: SqliteSettings, *, only_reading: bool = False
    ) -> None:
        self.names = names
        self._path = path
        self._settings = settings
        self._writer = WriteConnection(path, settings)
        self._only_reading = only_reading
        self._lookups = self._reads()
        self._members: list[SqliteMember] = []
        self._subscriptions: list[SqliteSubscription] = []
        self._readers: list[SqliteReader] = []
        self._used = False

    async def producer(self) -> SqliteProducer:
        await self._first_use()
        return SqliteProducer(self._writer, self.names, self._settings)

    async def join(self, group: str) -> SqliteMember:
        membership = await self._membership(self.names[Topic.TOKENS], group)
        member = SqliteMember(membership, self.names, self._lookups)
        self._members = [*(known for known in self._members if not known.left), member]
        return member

    async def subscribe(
        self, topic: Topic, group: str, start: StartAt = FROM_THE_BEGINNING
    ) -> SqliteSubscription:
        name = self.names[topic]
        subscription = SqliteSubscription(
            await self._membership(name, group), name, start, f"group {group}, {name}"
        )
        self._subscriptions = [*(known for known in self._subscriptions if not known.closed), subscription]
        return subscription

    async def _membership(self, topic: str, name: str) -> Membership:
        await self._first_use()
        member_id = uuid.uuid4().hex

        def join(connection: sqlite3.Connection) -> int:
            group_id = group.find_group(connection, name, log.require_topic(connection, topic))
            group.beat(connection, group_id, member_id)
            return group_id

        group_id = await self._writer.run(join)
        return Membership(self._writer, self._reads(), self._settings, group_id, member_id)

    async def reader(
        self, topic: Topic, *, partitions: Sequence[int] | None = None, start: Mapping[int, int] | None = None
    ) -> SqliteReader:
        await self._before_reading()
        cursors = await self._lookups.run(
            lambda connection: self._cursors(connection, topic, partitions, start or {})
        )
        reader = SqliteReader(self._reads(), cursors, self._settings)
        self._readers = [*(known for known in self._readers if not known.closed), reader]
        return reader

    def _cursors(
        self,
        connection: sqlite3.Connection,
        topic: Topic,
        partitions: Sequence[int] | None,
        start: Mapping[int, int],
    ) -> list[log.Cursor]:
        row = log.require_topic(connection, self.names[topic])
        chosen = range(row.partitions) if partitions is None else partitions
        streams = [log.require_stream(connection, row, partition) for partition in chosen]
        return [log.Cursor(stream.id, stream.partition, start.get(stream.partition, 0)) for stream in streams]

    def admin(self) -> SqliteAdmin:
        return SqliteAdmin(self._path, self._writer, self._lookups, self.names, self._settings.partitions)

    async def examine(self, group: str) -> Examined:
        return await examine(self._path, self._lookups, self.names, self._settings, group)

    async def offsets(self, name: str) -> dict[int, GroupOffset]:
        await self._before_reading()

        def look(connection: sqlite3.Connection) -> dict[int, GroupOffset]:
            topic = log.require_topic(connection, self.names[Topic.TOKENS])
            known = group.known_group(connection, name, topic)
            return {} if known is None else group.stored(connection, known)

        return await self._lookups.run(look)

    async def clock_ahead_s(self) -> tuple[float, float]:
        """Append time is this machine's own."""
        return 0.0, 0.0

    async def extents(self, topic: Topic) -> dict[int, Extent]:
        await self._before_reading()

        def look(connection: sqlite3.Connection) -> dict[int, Extent]:
            row = log.require_topic(connection, self.names[topic])
            return {
                stream.partition: Extent(stream.log_start, stream.next_offset)
                for stream in log.streams_of(connection, row)
            }

        return await self._lookups.run(look)

    def _reads(self) -> ReadConnection:
        return ReadConnection(self._path, self._settings, only_reading=self._only_reading)

    async def _before_reading(self) -> None:
        if not self._only_reading:
            await self._first_use()

    async def _first_use(self) -> None:
        if self._only_reading:
            raise BrokerError(f"{self._path} was opened for reading")
        if not self._used:
            await self._writer.run(
                lambda connection: log.create_default_topics(
                    connection, self.names, self._settings.partitions
                )
            )
            self._used = True

    async def close(self) -> None:
        """Leave the groups, so that others take over at once, and release every connection and thread."""
        async with AsyncExitStack() as stack:  # goes on to the end whatever fails, and last in, first out
            for close in (
                self._writer.close,
                self._lookups.close,
                *(reader.close for reader in self._readers),
            ):
                stack.push_async_callback(close)
            for subscription in self._subscriptions:
                stack.push_async_callback(subscription.close)
            for member in self._members:
                stack.push_async_callback(member.leave)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
