"""One process in a consumer group."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError, OwnershipLostError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.ports import Poll
from freezepoint.transport.sqlite import group, log, ownership, retention
from freezepoint.transport.sqlite.database import ReadConnection, WriteConnection, snapshot
from freezepoint.transport.sqlite.group import Standing, Watch
from freezepoint.transport.sqlite.lease import LeaseContext, SqliteLease
from freezepoint.transport.sqlite.ownership import Claim
from freezepoint.transport.sqlite.reading import Rotation, data_version
from freezepoint.transport.sqlite.waiting import Pace
from freezepoint.transport.sqlite.writing import now_ms
from freezepoint_schemas.topics import Topic, TopicNames


@dataclass(frozen=True, slots=True)
class Links:
    """A member's connections: the transport's writer, its own for polls, and one for long ledger reads."""

    writer: WriteConnection
    reads: ReadConnection
    ledger_reads: ReadConnection


@dataclass(frozen=True, slots=True)
class _Look:
    version: int
    standing: Standing | None
    found: dict[int, list[InputRecord]]


class SqliteMember:
    """Beats within its polls, so that a worker that hangs loses its partitions to one that does not."""

    def __init__(
        self, links: Links, names: TopicNames, settings: SqliteSettings, group_id: int, member_id: str
    ) -> None:
        self._links = links
        self._names = names
        self._settings = settings
        self._group = group_id
        self._id = member_id
        self._standing = Standing(0, frozenset())
        self._leases: dict[int, SqliteLease] = {}
        self._watch = Watch(settings.session_timeout_ms / 1000, 2 * settings.heartbeat_interval_ms / 1000)
        self._next_beat = 0.0
        self._pace = Pace(settings)
        self._rotation = Rotation()
        self._exhausted_at: int | None = None
        self.left = False

    async def poll(self, timeout_s: float, records_max: int) -> Poll:
        self._check_member()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            await self._beat_when_due(loop.time())
            polled = await self._look(records_max)
            now = loop.time()
            if polled is not None or now >= deadline:
                return polled or Poll(self._standing.generation, self._standing.assigned)
            await self._pace.wait(min(deadline, self._next_beat) - now)

    def _check_member(self) -> None:
        if self.left:
            raise BrokerError("the member has left its group; join again")

    async def _beat_when_due(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + self._settings.heartbeat_interval_ms / 1000
        beats = await self._links.writer.run(self._beat)
        silent = self._watch.silent(
            {member: seen for member, seen in beats.items() if member != self._id}, now
        )
        if silent:
            await self._links.writer.run(lambda connection: group.remove(connection, self._group, silent))

    def _beat(self, connection: sqlite3.Connection) -> dict[str, int]:
        """Each member also clears away what is past its retention in its own partitions."""
        retention.expire(connection, self._names, self._standing.assigned, now_ms())
        return group.beat(connection, self._group, self._id)

    async def _look(self, records_max: int) -> Poll | None:
        """A new assignment, else records, else None."""
        cursors = self._wanted()
        look = await self._links.reads.run(self._looking(cursors, records_max))
        if look.standing is not None and look.standing.generation != self._standing.generation:
            self._standing = look.standing
            self._exhausted_at = None
            self._pace.reset()
            return Poll(self._standing.generation, self._standing.assigned)
        records = {
            partition: found
            for partition, found in look.found.items()
            if self._leases[partition].delivered(cursors[partition], found[-1].offset + 1)
        }
        if look.found:
            self._pace.reset()
        elif cursors == self._wanted():
            self._exhausted_at = look.version
        return Poll(self._standing.generation, self._standing.assigned, records) if records else None

    def _wanted(self) -> dict[int, log.Cursor]:
        cursors = (
            (partition, lease.wanted(self._standing.generation)) for partition, lease in self._leases.items()
        )
        return {partition: cursor for partition, cursor in cursors if cursor is not None}

    def _looking(
        self, cursors: dict[int, log.Cursor], records_max: int
    ) -> Callable[[sqlite3.Connection], _Look]:
        """Generation and records of one snapshot, so that no record outlives the assignment it was read under."""
        exhausted_at = self._exhausted_at
        generation = self._standing.generation
        ordered = self._rotation.next(list(cursors.values()))

        def look(connection: sqlite3.Connection) -> _Look:
            version = data_version(connection)  # first: what is committed after it shows in the next look
            if version == exhausted_at:
                return _Look(version, None, {})
            with snapshot(connection):
                standing = group.standing(connection, self._group, self._id)
                if standing.generation != generation:
                    return _Look(version, standing, {})
                found = log.fetch(connection, ordered, records_max, self._settings.poll_bytes_max)
                return _Look(version, standing, found)

        return look

    async def acquire(self, partition: int) -> SqliteLease:
        self._check_member()
        claim = Claim(self._group, self._id, self._standing.generation, partition)
        grant = await self._links.writer.run(
            lambda connection: ownership.take(connection, self._names, claim)
        )
        ledger = await self._links.ledger_reads.run(
            lambda connection: self._read_ledger(connection, partition)
        )
        if self.left or self._standing.generation != claim.generation:
            raise OwnershipLostError(f"partition {partition} was assigned anew while its ledger was read")
        context = LeaseContext(
            self._links.writer, self._links.reads, self._names, self._settings, self._changed
        )
        lease = self._leases[partition] = SqliteLease(context, claim, grant, ledger)
        return lease

    def _read_ledger(self, connection: sqlite3.Connection, partition: int) -> list[InputRecord]:
        topic = log.require_topic(connection, self._names[Topic.LEDGER])
        return log.latest_by_key(connection, log.require_stream(connection, topic, partition))

    def _changed(self) -> None:
        self._exhausted_at = None
        self._pace.wake()

    async def leave(self) -> None:
        if self.left:
            return
        self.left = True
        for lease in self._leases.values():
            await lease.close()
        try:
            await self._links.writer.run(
                lambda connection: group.remove(connection, self._group, {self._id: None})
            )
        finally:
            await self._links.reads.close()
