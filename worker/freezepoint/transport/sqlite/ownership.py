"""Who may publish under a tokens partition: plain functions on a connection, each inside the caller's write transaction.

The epoch counts the owners. It is raised by an owner that proves its assignment in the same transaction, and checked
in the same transaction as everything that is published: between the check and the commit nobody can come.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from freezepoint.core.records import OutputRecord
from freezepoint.errors import FencedError, OwnershipLostError
from freezepoint.transport.ports import GroupOffset
from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.group import standing, store, stored
from freezepoint_schemas.topics import Topic, TopicNames


@dataclass(frozen=True, slots=True)
class Claim:
    """A member's claim to a partition in a generation of its group."""

    group: int
    member: str
    generation: int
    partition: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What an owner gets: its epoch, and the partition as it was then."""

    epoch: int
    stream: log.Stream
    partition_count: int
    held: GroupOffset | None


def take(connection: sqlite3.Connection, names: TopicNames, claim: Claim) -> Grant:
    """Prove the claim, then fence the previous owner.

    :raises OwnershipLostError: the assignment has changed.
    """
    prove(connection, claim)
    topic = log.require_topic(connection, names[Topic.TOKENS])
    stream = log.require_stream(connection, topic, claim.partition)
    connection.execute("UPDATE stream SET epoch = epoch + 1 WHERE id = ?", (stream.id,))
    held = stored(connection, claim.group).get(claim.partition)
    return Grant(stream.epoch + 1, stream, topic.partitions, held)


def prove(connection: sqlite3.Connection, claim: Claim) -> None:
    """:raises OwnershipLostError: the generation has passed, or gives the partition to somebody else."""
    current = standing(connection, claim.group, claim.member)
    if current.generation != claim.generation or claim.partition not in current.assigned:
        raise OwnershipLostError(
            f"partition {claim.partition} is not this member's in generation {current.generation} "
            f"(it was assigned in {claim.generation})"
        )


def is_owner(connection: sqlite3.Connection, grant: Grant) -> bool:
    (epoch,) = connection.execute("SELECT epoch FROM stream WHERE id = ?", (grant.stream.id,)).fetchone()
    return bool(epoch == grant.epoch)


def publish(
    connection: sqlite3.Connection,
    names: TopicNames,
    grant: Grant,
    records: Sequence[OutputRecord],
    now_ms: int,
) -> None:
    """:raises FencedError: another owner came."""
    if not is_owner(connection, grant):
        raise FencedError(f"partition {grant.stream.partition} has a newer owner; acquire it anew")
    log.append(connection, names, records, now_ms)


def commit(connection: sqlite3.Connection, grant: Grant, group: int, offset: int, recorded: int) -> None:
    """Note the offset, unless a newer owner notes its own by now."""
    if is_owner(connection, grant):
        store(connection, group, grant.stream.partition, offset, recorded)
