"""Retention: plain functions on a connection, each inside the caller's write transaction.

The topics' ``retention.ms`` holds here as on Kafka, with two reservations that a single file can afford: tokens stay
until every group has committed past them, and a ledger record stays while a token as old as it is left, since a replay
of that token would need it. The file does not shrink; what is freed is used again.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from contextlib import closing

from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.layout import OFFSET_MASK
from freezepoint_schemas.topics import Topic, TopicNames

RECORDS_MAX = 1_000
BYTES_MAX = 32 * 1024 * 1024
"""Of one partition in one transaction: expiring must not hold the write lock for long."""


def expire(connection: sqlite3.Connection, names: TopicNames, partitions: Iterable[int], now_ms: int) -> None:
    """Delete the next few records of these partitions, in all topics, that are past their retention."""
    topics = {topic: log.find_topic(connection, names[topic]) for topic in Topic}
    for partition in partitions:
        for topic, row in topics.items():
            if row is not None and partition < row.partitions:
                stream = log.require_stream(connection, row, partition)
                _expire(connection, row, stream, _bounds(connection, names, topic, stream, now_ms))


def _bounds(
    connection: sqlite3.Connection, names: TopicNames, topic: Topic, stream: log.Stream, now_ms: int
) -> tuple[float, float]:
    """Only what is older than the time and below the offset may go."""
    row = log.require_topic(connection, names[topic])
    retention_ms = int(row.config.get("retention.ms", "-1"))
    before_ms = now_ms - retention_ms if retention_ms >= 0 else -math.inf
    if topic is Topic.TOKENS:
        return before_ms, _committed_by_all(connection, row, stream.partition)
    if topic is Topic.LEDGER:
        tokens = log.require_stream(
            connection, log.require_topic(connection, names[Topic.TOKENS]), stream.partition
        )
        return min(before_ms, _oldest_ms(connection, tokens)), math.inf
    return before_ms, math.inf


def _committed_by_all(connection: sqlite3.Connection, topic: log.TopicRow, partition: int) -> int:
    row = connection.execute(
        "SELECT min(offset) FROM committed JOIN consumer_group ON consumer_group.id = committed.consumer_group"
        " WHERE topic = ? AND partition = ?",
        (topic.id, partition),
    ).fetchone()
    return row[0] or 0


def _oldest_ms(connection: sqlite3.Connection, stream: log.Stream) -> float:
    row = connection.execute(
        "SELECT timestamp_ms FROM record WHERE position >= ? AND position < ? ORDER BY position LIMIT 1",
        stream.positions,
    ).fetchone()
    return math.inf if row is None else row[0]


def _expire(
    connection: sqlite3.Connection, topic: log.TopicRow, stream: log.Stream, bounds: tuple[float, float]
) -> None:
    expired = _expired(connection, stream, bounds)
    if not expired:
        return
    next_offset = (expired[-1][0] & OFFSET_MASK) + 1
    connection.execute(
        "DELETE FROM record WHERE position >= ? AND position < ?",
        (stream.position(0), stream.position(next_offset)),
    )
    connection.execute("UPDATE stream SET log_start = ? WHERE id = ?", (next_offset, stream.id))
    if topic.compacted:
        connection.executemany(
            "DELETE FROM latest WHERE stream = ? AND key = ?", ((stream.id, key) for _, key in expired)
        )


def _expired(
    connection: sqlite3.Connection, stream: log.Stream, bounds: tuple[float, float]
) -> list[tuple[int, bytes | None]]:
    """Positions and keys of what is to go now: from the log's start to the first that stays, or to the limits."""
    before_ms, before_offset = bounds
    expired: list[tuple[int, bytes | None]] = []
    left = BYTES_MAX
    with closing(
        connection.execute(
            "SELECT position, timestamp_ms, key, length(value) FROM record"
            " WHERE position >= ? AND position < ? ORDER BY position LIMIT ?",
            (*stream.positions, RECORDS_MAX),
        )
    ) as rows:
        for position, timestamp_ms, key, size in rows:
            if timestamp_ms >= before_ms or position & OFFSET_MASK >= before_offset or left <= 0:
                break
            expired.append((position, key))
            left -= size or 0
    return expired
