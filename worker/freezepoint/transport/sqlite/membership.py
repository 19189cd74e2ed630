"""Membership in a consumer group over one topic: beats, assignments, and the records that a consumer wants."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import group, log
from freezepoint.transport.sqlite.database import ReadConnection, WriteConnection, snapshot
from freezepoint.transport.sqlite.group import Standing, Watch
from freezepoint.transport.sqlite.reading import Rotation, data_version
from freezepoint.transport.sqlite.waiting import Pace


class Deliveries(Protocol):
    """What a consumer wants of the partitions it was assigned."""

    def wanted(self, generation: int) -> dict[int, log.Cursor]:
        """Where to go on, by partition, in that generation."""
        ...

    def delivered(self, partition: int, cursor: log.Cursor, next_offset: int) -> bool:
        """Take note of records read from ``cursor`` on; False: delivery has changed meanwhile, hand them to nobody."""
        ...


@dataclass(frozen=True, slots=True)
class _Look:
    version: int
    standing: Standing | None
    found: dict[int, list[InputRecord]]


class Membership:
    """Beats within its polls, so that a consumer that hangs loses its partitions to one that does not.

    ``writer`` is the transport's, ``reads`` is this membership's own connection and closed with it. ``clean_up`` runs in
    the transaction of each beat, with the assigned partitions.
    """

    def __init__(
        self,
        writer: WriteConnection,
        reads: ReadConnection,
        settings: SqliteSettings,
        group_id: int,
        member_id: str,
    ) -> None:
        self.clean_up: Callable[[sqlite3.Connection, frozenset[int]], None] | None = None
        self.writer = writer
        self.reads = reads
        self.settings = settings
        self.group = group_id
        self.id = member_id
        self.standing = Standing(0, frozenset())
        self.left = False
        self._watch = Watch(settings.session_timeout_ms / 1000, 2 * settings.heartbeat_interval_ms / 1000)
        self._next_beat = 0.0
        self._pace = Pace(settings)
        self._rotation = Rotation()
        self._exhausted_at: int | None = None

    async def poll(
        self, deliveries: Deliveries, timeout_s: float, records_max: int
    ) -> tuple[Standing, Mapping[int, Sequence[InputRecord]]]:
        """Wait for a new generation, which comes without records, or for records; neither at the timeout."""
        self.require_open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            await self._beat_when_due(loop.time())
            generation = self.standing.generation
            records = await self._look(deliveries, records_max)
            now = loop.time()
            if records or self.standing.generation != generation or now >= deadline:
                return self.standing, records
            await self._pace.wait(min(deadline, self._next_beat) - now)

    @property
    def others_alive(self) -> bool:
        """Whether each other member has shown just now that it lives. A dead one is removed a session timeout after we met
        it, by our own clock: only who stays that long in the group takes its partitions over."""
        return self._watch.all_alive()

    def require_open(self) -> None:
        """:raises BrokerError: it has left."""
        if self.left:
            raise BrokerError("the member has left its group; join again")

    async def _beat_when_due(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + self.settings.heartbeat_interval_ms / 1000
        beats = await self.writer.run(self._beat)
        silent = self._watch.silent(
            {member: seen for member, seen in beats.items() if member != self.id}, now
        )
        if silent:
            await self.writer.run(lambda connection: group.remove(connection, self.group, silent))

    def _beat(self, connection: sqlite3.Connection) -> dict[str, int]:
        if self.clean_up is not None:
            self.clean_up(connection, self.standing.assigned)
        return group.beat(connection, self.group, self.id)

    async def _look(self, deliveries: Deliveries, records_max: int) -> dict[int, Sequence[InputRecord]]:
        """Records; none where the standing is new."""
        generation = self.standing.generation
        cursors = deliveries.wanted(generation)
        look = await self.reads.run(self._looking(cursors, records_max))
        if look.standing is not None and look.standing.generation != generation:
            self.standing = look.standing
            self._exhausted_at = None
            self._pace.reset()
            return {}
        if look.found:
            self._pace.reset()
        elif cursors == deliveries.wanted(generation):
            self._exhausted_at = look.version
        return {
            partition: found
            for partition, found in look.found.items()
            if deliveries.delivered(partition, cursors[partition], found[-1].offset + 1)
        }

    def _looking(
        self, cursors: dict[int, log.Cursor], records_max: int
    ) -> Callable[[sqlite3.Connection], _Look]:
        """Generation and records of one snapshot, so that no record outlives the assignment it was read under."""
        exhausted_at = self._exhausted_at
        generation = self.standing.generation
        ordered = self._rotation.next(list(cursors.values()))

        def look(connection: sqlite3.Connection) -> _Look:
            version = data_version(connection)  # first: what is committed after it shows in the next look
            if version == exhausted_at:
                return _Look(version, None, {})
            with snapshot(connection):
                standing = group.standing(connection, self.group, self.id)
                if standing.generation != generation:
                    return _Look(version, standing, {})
                found = log.fetch(connection, ordered, records_max, self.settings.poll_bytes_max)
                return _Look(version, standing, found)

        return look

    def changed(self) -> None:
        """Look at once, since more is wanted than before."""
        self._exhausted_at = None
        self._pace.wake()

    async def leave(self) -> None:
        """Leave the group and release the connection."""
        if self.left:
            return
        self.left = True
        try:
            await self.writer.run(lambda connection: group.remove(connection, self.group, {self.id: None}))
        finally:
            await self.reads.close()
