"""One consumer of a group over any topic, with the group's own offsets."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freezepoint.core.records import InputRecord
from freezepoint.errors import OwnershipLostError
from freezepoint.transport.ports import Extent, Feed, StartAt, Started
from freezepoint.transport.sqlite import group, log
from freezepoint.transport.sqlite.group import Standing
from freezepoint.transport.sqlite.membership import Membership
from freezepoint.transport.starting import StoredOffsets, resume_at


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a start found: where to go on, and which of the partitions begin anew."""

    cursors: dict[int, log.Cursor]
    started: dict[int, Started]


class SqliteSubscription:
    """See the ``Subscription`` port. ``where`` names group and topic in errors."""

    def __init__(self, membership: Membership, topic: str, start: StartAt, where: str) -> None:
        self._membership = membership
        self._topic = topic
        self._where = where
        self._offsets = StoredOffsets(start)
        self._standing = Standing(0, frozenset())
        self._cursors: dict[int, log.Cursor] = {}
        self._before: dict[int, int] = {}
        """Where the last read of each partition began."""
        self._paused = False

    @property
    def closed(self) -> bool:
        return self._membership.left

    async def poll(self, timeout_s: float, records_max: int) -> Feed:
        """A new generation comes with its starts."""
        standing, records = await self._membership.poll(self, timeout_s, records_max)
        if standing.generation == self._standing.generation:
            return Feed(standing.generation, standing.assigned, self._past_gaps(records), records)
        begun = await self._membership.writer.run(lambda connection: self._begin(connection, standing))
        if begun is None:
            return Feed(self._standing.generation, self._standing.assigned)  # the next poll sees a newer one
        self._standing, self._cursors = standing, begun.cursors
        for partition, start in begun.started.items():
            self._offsets.started(partition, start.offset)
        self._membership.changed()
        return Feed(standing.generation, standing.assigned, begun.started)

    def _past_gaps(self, records: Mapping[int, Sequence[InputRecord]]) -> dict[int, Started]:
        """New starts of partitions that retention shortened ahead of this consumer; the offsets themselves have no gaps."""
        return {
            partition: Started(batch[0].offset, expired=batch[0].offset - self._before[partition])
            for partition, batch in records.items()
            if batch[0].offset > self._before[partition]
        }

    def _begin(self, connection: sqlite3.Connection, standing: Standing) -> _Begun | None:
        """Where each partition goes on; what begins without a stored offset is stored. None: the assignment passed."""
        if group.standing(connection, self._membership.group, self._membership.id) != standing:
            return None
        topic = log.require_topic(connection, self._topic)
        held = group.stored(connection, self._membership.group)
        stored = {partition: offset.committed for partition, offset in held.items()}
        begun = _Begun({}, {})
        for partition in standing.assigned:
            stream = log.require_stream(connection, topic, partition)
            if not self._is_kept(stream, stored.get(partition)):
                begun.started[partition] = self._start(connection, stream, stored.get(partition))
                offset = begun.started[partition].offset
            else:
                offset = self._cursors[partition].offset
            begun.cursors[partition] = log.Cursor(stream.id, partition, offset)
        return begun

    def _is_kept(self, stream: log.Stream, stored: int | None) -> bool:
        cursor = self._cursors.get(stream.partition)
        return (
            cursor is not None
            and cursor.offset >= stream.log_start
            and self._offsets.is_ours(stream.partition, stored)
        )

    def _start(self, connection: sqlite3.Connection, stream: log.Stream, stored: int | None) -> Started:
        if stored is not None and self._offsets.is_honoured(stream.partition):
            extent = Extent(stream.log_start, stream.next_offset)
            return resume_at(stored, extent, f"{self._where}[{stream.partition}]")
        offset = self._beginning(connection, stream)
        group.store(connection, self._membership.group, stream.partition, offset)
        return Started(offset)

    def _beginning(self, connection: sqlite3.Connection, stream: log.Stream) -> int:
        match self._offsets.start.position:
            case "earliest":
                return stream.log_start
            case "latest":
                return stream.next_offset
            case timestamp_ms:
                return log.offset_at_time(connection, stream, timestamp_ms)

    # ------------------------------------------------------------------------------------------------- ``Deliveries``

    def wanted(self, generation: int) -> dict[int, log.Cursor]:
        """Nothing while paused, or before a new generation was begun."""
        if self._paused or generation != self._standing.generation:
            return {}
        return dict(self._cursors)

    def delivered(self, partition: int, cursor: log.Cursor, next_offset: int) -> bool:
        if self._paused or self._cursors.get(partition) != cursor:
            return False
        self._before[partition] = cursor.offset
        self._cursors[partition] = log.Cursor(cursor.stream, partition, next_offset)
        return True

    # ------------------------------------------------------------------------------------------------------ the rest

    async def commit(self, generation: int, offsets: Mapping[int, int]) -> None:
        for partition, offset in offsets.items():
            self._offsets.asked(partition, offset)

        def store(connection: sqlite3.Connection) -> None:
            standing = group.standing(connection, self._membership.group, self._membership.id)
            if standing.generation != generation or not standing.assigned.issuperset(offsets):
                raise OwnershipLostError(f"the assignment of {self._where} has passed")
            for partition, offset in offsets.items():
                group.store(connection, self._membership.group, partition, offset)

        self._membership.require_open()
        await self._membership.writer.run(store)

    async def caught_up(self) -> bool:
        cursors = list(self._cursors.values())
        if not cursors:
            return False
        return await self._membership.reads.run(lambda connection: log.is_at_end(connection, cursors))

    def shared_out(self) -> bool:
        return self._standing == self._membership.standing and self._membership.others_alive

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._membership.changed()

    async def close(self) -> None:
        await self._membership.leave()
