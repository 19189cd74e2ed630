"""Exclusive ownership of one tokens partition."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError, OwnershipLostError, PublishError, StorageFullError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import log, ownership
from freezepoint.transport.sqlite.database import Job, ReadConnection, WriteConnection
from freezepoint.transport.sqlite.ownership import Claim, Grant
from freezepoint.transport.sqlite.writing import now_ms, split_all
from freezepoint_schemas.topics import TopicNames


@dataclass(frozen=True, slots=True)
class LeaseContext:
    """What a lease needs of its member: connections, names, limits, and whom to tell that delivery changed."""

    writer: WriteConnection
    reads: ReadConnection
    names: TopicNames
    settings: SqliteSettings
    changed: Callable[[], None]


class SqliteLease:
    """Dead after the first publication that failed or was cancelled: its outcome is the ledger's to tell."""

    def __init__(
        self, context: LeaseContext, claim: Claim, grant: Grant, ledger: Sequence[InputRecord]
    ) -> None:
        self._context = context
        self._claim = claim
        self._grant = grant
        self._ledger = ledger
        self._next_offset: int | None = None
        self._paused = False
        self._dead = False

    @property
    def partition(self) -> int:
        return self._claim.partition

    @property
    def partition_count(self) -> int:
        return self._grant.partition_count

    @property
    def log_start(self) -> int:
        return self._grant.stream.log_start

    @property
    def log_end(self) -> int:
        return self._grant.stream.next_offset

    @property
    def committed(self) -> int | None:
        return None if self._grant.held is None else self._grant.held.committed

    @property
    def recorded(self) -> int | None:
        return None if self._grant.held is None else self._grant.held.recorded

    @property
    def ledger(self) -> Sequence[InputRecord]:
        return self._ledger

    def wanted(self, generation: int) -> log.Cursor | None:
        """Where the member's poll shall go on in that generation; None: nothing is to be delivered."""
        if self._next_offset is None or self._paused or self._claim.generation != generation:
            return None
        return self._cursor(self._next_offset)

    def delivered(self, cursor: log.Cursor, next_offset: int) -> bool:
        """Take note of records read from ``cursor`` on; False: delivery has changed meanwhile, hand them to nobody."""
        if self.wanted(self._claim.generation) != cursor:
            return False
        self._next_offset = next_offset
        return True

    def _cursor(self, offset: int) -> log.Cursor:
        return log.Cursor(self._grant.stream.id, self.partition, offset)

    async def record_at(self, offset: int) -> InputRecord | None:
        if offset < 0:
            return None
        cursor = self._cursor(offset)
        return await self._context.reads.run(lambda connection: log.record_at(connection, cursor))

    async def start(self, offset: int) -> None:
        self._next_offset = offset
        self._context.changed()

    async def publish(self, records: Sequence[OutputRecord]) -> None:
        await self._publish(records, proving=None)

    async def renew(self, generation: int, offset: int, records: Sequence[OutputRecord]) -> None:
        claim = replace(self._claim, generation=generation)
        await self._publish(records, proving=claim)
        self._claim = claim
        await self.start(offset)

    async def _publish(self, records: Sequence[OutputRecord], proving: Claim | None) -> None:
        if self._dead:
            raise PublishError(f"the lease on partition {self.partition} has ended; acquire it anew")
        split = await split_all(records, self._context.settings.record_bytes_max)
        parts = [part for record_parts in split for part in record_parts]

        def publish(connection: sqlite3.Connection) -> None:
            ownership.publish(connection, self._context.names, self._grant, parts, now_ms())
            if proving is not None:
                ownership.prove(connection, proving)

        await self._last_if_it_fails(publish)

    async def _last_if_it_fails(self, job: Job[None]) -> None:
        try:
            await self._context.writer.run(job)
        except OwnershipLostError:
            raise  # nothing was written, and a later generation may give the partition back
        except BaseException as error:
            self._end()
            if isinstance(error, BrokerError) and not isinstance(error, (PublishError, StorageFullError)):
                raise PublishError(f"partition {self.partition}: {error}") from error
            raise

    async def commit_hint(self, offset: int, recorded: int) -> bool:
        try:
            await self._context.writer.run(
                lambda connection: ownership.commit(
                    connection, self._grant, self._claim.group, offset, recorded
                )
            )
        except BrokerError:  # whatever comes of it: the ledger holds what counts
            return False
        return True

    async def caught_up(self) -> bool:
        if self._next_offset is None:
            return False
        cursor = self._cursor(self._next_offset)
        return await self._context.reads.run(lambda connection: log.is_at_end(connection, [cursor]))

    async def first(self) -> int:
        return (await self._extent())[0]

    async def end(self) -> int:
        return (await self._extent())[1]

    async def _extent(self) -> tuple[int, int]:
        def look(connection: sqlite3.Connection) -> tuple[int, int]:
            first, end = connection.execute(
                "SELECT log_start, next_offset FROM stream WHERE id = ?", (self._grant.stream.id,)
            ).fetchone()
            return int(first), int(end)

        return await self._context.reads.run(look)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._context.changed()

    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._dead = True
        self._next_offset = None
