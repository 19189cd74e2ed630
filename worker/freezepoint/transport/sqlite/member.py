"""One process in the group of workers over the tokens topic: polls, and acquires the partitions it is given."""

from __future__ import annotations

import sqlite3

from freezepoint.core.records import InputRecord
from freezepoint.errors import OwnershipLostError
from freezepoint.transport.ports import Poll
from freezepoint.transport.sqlite import log, ownership, retention
from freezepoint.transport.sqlite.database import ReadConnection
from freezepoint.transport.sqlite.lease import LeaseContext, SqliteLease
from freezepoint.transport.sqlite.membership import Membership
from freezepoint.transport.sqlite.ownership import Claim
from freezepoint.transport.sqlite.writing import now_ms
from freezepoint_schemas.topics import Topic, TopicNames


class SqliteMember:
    """See the ``GroupMember`` port. ``ledger_reads``: a connection for long ledger reads."""

    def __init__(self, membership: Membership, names: TopicNames, ledger_reads: ReadConnection) -> None:
        self._membership = membership
        self._names = names
        self._ledger_reads = ledger_reads
        self._leases: dict[int, SqliteLease] = {}
        membership.clean_up = self._expire

    @property
    def left(self) -> bool:
        return self._membership.left

    def _expire(self, connection: sqlite3.Connection, assigned: frozenset[int]) -> None:
        """Each member clears away what is past its retention in its own partitions."""
        retention.expire(connection, self._names, assigned, now_ms())

    async def poll(self, timeout_s: float, records_max: int) -> Poll:
        standing, records = await self._membership.poll(self, timeout_s, records_max)
        return Poll(standing.generation, standing.assigned, records)

    def wanted(self, generation: int) -> dict[int, log.Cursor]:
        """What the leases want delivered; see ``Deliveries``."""
        cursors = ((partition, lease.wanted(generation)) for partition, lease in self._leases.items())
        return {partition: cursor for partition, cursor in cursors if cursor is not None}

    def delivered(self, partition: int, cursor: log.Cursor, next_offset: int) -> bool:
        return self._leases[partition].delivered(cursor, next_offset)

    async def acquire(self, partition: int) -> SqliteLease:
        membership = self._membership
        membership.require_open()
        claim = Claim(membership.group, membership.id, membership.standing.generation, partition)
        grant = await membership.writer.run(lambda connection: ownership.take(connection, self._names, claim))
        ledger = await self._ledger_reads.run(lambda connection: self._read_ledger(connection, partition))
        if membership.left or membership.standing.generation != claim.generation:
            raise OwnershipLostError(f"partition {partition} was assigned anew while its ledger was read")
        context = LeaseContext(
            membership.writer, membership.reads, self._names, membership.settings, membership.changed
        )
        lease = self._leases[partition] = SqliteLease(context, claim, grant, ledger)
        return lease

    def _read_ledger(self, connection: sqlite3.Connection, partition: int) -> list[InputRecord]:
        topic = log.require_topic(connection, self._names[Topic.LEDGER])
        return log.latest_by_key(connection, log.require_stream(connection, topic, partition))

    async def leave(self) -> None:
        for lease in self._leases.values():
            await lease.close()
        await self._membership.leave()
