"""Topics and their records: plain functions on a connection, each inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import orjson

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import ConfigurationError, MissingTopicError
from freezepoint.transport.ports import Position
from freezepoint.transport.sqlite.layout import OFFSET_BITS, OFFSET_MASK
from freezepoint.wording import counted
from freezepoint_schemas.headers import Headers
from freezepoint_schemas.topics import Topic, TopicNames, TopicSpec, partition_for, topic_specs

_partition_for = lru_cache(maxsize=16_384)(partition_for)
"""A rollout's records share one key, and the hash in Python costs more than the insert."""


@dataclass(frozen=True, slots=True)
class TopicRow:
    id: int
    name: str
    partitions: int
    config: dict[str, str]

    @property
    def compacted(self) -> bool:
        return "compact" in self.config.get("cleanup.policy", "")


@dataclass(frozen=True, slots=True)
class Stream:
    """One partition of a topic."""

    id: int
    partition: int
    log_start: int
    next_offset: int
    timestamp_ms: int
    epoch: int

    def position(self, offset: int) -> int:
        return self.id << OFFSET_BITS | offset

    @property
    def positions(self) -> tuple[int, int]:
        """The first one, and the one after the last that is possible."""
        return self.id << OFFSET_BITS, (self.id + 1) << OFFSET_BITS


def create_default_topics(connection: sqlite3.Connection, names: TopicNames, partitions: int) -> None:
    """Give a file without any topic the four it needs."""
    if not has_topics(connection):
        for spec in topic_specs(names, partitions):
            create_topic(connection, spec)


def has_topics(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM topic LIMIT 1").fetchone() is not None


def create_topic(connection: sqlite3.Connection, spec: TopicSpec) -> None:
    cursor = connection.execute(
        "INSERT INTO topic (name, partitions, config) VALUES (?, ?, ?)",
        (spec.name, spec.partitions, orjson.dumps(dict(spec.config)).decode()),
    )
    connection.executemany(
        "INSERT INTO stream (topic, partition) VALUES (?, ?)",
        ((cursor.lastrowid, partition) for partition in range(spec.partitions)),
    )


def configure_topic(connection: sqlite3.Connection, topic: TopicRow, config: dict[str, str]) -> None:
    connection.execute("UPDATE topic SET config = ? WHERE id = ?", (orjson.dumps(config).decode(), topic.id))


def find_topic(connection: sqlite3.Connection, name: str) -> TopicRow | None:
    row = connection.execute(
        "SELECT id, name, partitions, config FROM topic WHERE name = ?", (name,)
    ).fetchone()
    return None if row is None else TopicRow(row[0], row[1], row[2], orjson.loads(row[3]))


def require_topic(connection: sqlite3.Connection, name: str) -> TopicRow:
    """:raises MissingTopicError: there is none of that name."""
    topic = find_topic(connection, name)
    if topic is None:
        raise MissingTopicError(f"topic {name!r} does not exist; create it with: freezepoint topics apply")
    return topic


def streams_of(connection: sqlite3.Connection, topic: TopicRow) -> list[Stream]:
    rows = connection.execute(
        "SELECT id, partition, log_start, next_offset, timestamp_ms, epoch FROM stream"
        " WHERE topic = ? ORDER BY partition",
        (topic.id,),
    )
    return [Stream(*row) for row in rows.fetchall()]


def require_stream(connection: sqlite3.Connection, topic: TopicRow, partition: int) -> Stream:
    """:raises ConfigurationError: the topic has no such partition."""
    row = connection.execute(
        "SELECT id, partition, log_start, next_offset, timestamp_ms, epoch FROM stream"
        " WHERE topic = ? AND partition = ?",
        (topic.id, partition),
    ).fetchone()
    if row is None:
        raise ConfigurationError(
            f"topic {topic.name!r} has {counted(topic.partitions, 'partition')}, no number {partition}; "
            "all four topics need the same count: freezepoint topics apply"
        )
    return Stream(*row)


def append(
    connection: sqlite3.Connection, names: TopicNames, records: Iterable[OutputRecord], now_ms: int
) -> list[Position]:
    """Add records to their partitions, in order, and say where each of them lies.

    :raises MissingTopicError: a topic does not exist.
    :raises ConfigurationError: a partition does not exist.
    """
    topics: dict[Topic, TopicRow] = {}
    chosen: dict[tuple[Topic, int], list[tuple[int, OutputRecord]]] = {}
    for number, record in enumerate(records):
        topic = topics.get(record.topic)
        if topic is None:
            topic = topics[record.topic] = require_topic(connection, names[record.topic])
        chosen.setdefault((record.topic, _partition_of(record, topic)), []).append((number, record))
    positions: dict[int, Position] = {}
    for (name, partition), group in chosen.items():
        numbers, own = zip(*group, strict=True)
        first = _append_to_stream(connection, topics[name], partition, own, now_ms)
        positions |= {number: Position(partition, offset) for offset, number in enumerate(numbers, first)}
    return [positions[number] for number in range(len(positions))]


def _partition_of(record: OutputRecord, topic: TopicRow) -> int:
    if record.partition is not None:
        return record.partition
    return 0 if record.key is None else _partition_for(record.key, topic.partitions)


def _append_to_stream(
    connection: sqlite3.Connection,
    topic: TopicRow,
    partition: int,
    records: Sequence[OutputRecord],
    now_ms: int,
) -> int:
    """The first offset they got."""
    stream = require_stream(connection, topic, partition)
    timestamp_ms = max(now_ms, stream.timestamp_ms)
    first = stream.position(stream.next_offset)
    connection.executemany(
        "INSERT INTO record (position, timestamp_ms, key, value, headers) VALUES (?, ?, ?, ?, ?)",
        (
            (position, timestamp_ms, record.key, record.value, _encode_headers(record.headers))
            for position, record in enumerate(records, first)
        ),
    )
    connection.execute(
        "UPDATE stream SET next_offset = ?, timestamp_ms = ? WHERE id = ?",
        (stream.next_offset + len(records), timestamp_ms, stream.id),
    )
    if topic.compacted:
        for position, record in enumerate(records, first):
            _supersede(connection, stream, record.key, position)
    return stream.next_offset


def _supersede(connection: sqlite3.Connection, stream: Stream, key: bytes | None, position: int) -> None:
    """Compact at once: delete the key's earlier record. Cheaper than a cleaner, and the topic stays bounded by its keys."""
    if key is None:
        return
    row = connection.execute(
        "SELECT position FROM latest WHERE stream = ? AND key = ?", (stream.id, key)
    ).fetchone()
    if row is not None:
        connection.execute("DELETE FROM record WHERE position = ?", row)
    connection.execute(
        "INSERT INTO latest (stream, key, position) VALUES (?, ?, ?)"
        " ON CONFLICT (stream, key) DO UPDATE SET position = excluded.position",
        (stream.id, key, position),
    )


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where to go on in a stream."""

    stream: int
    partition: int
    offset: int


def fetch(
    connection: sqlite3.Connection, cursors: Sequence[Cursor], records_max: int, bytes_max: int
) -> dict[int, list[InputRecord]]:
    """The next records by partition, shared out evenly; what one leaves of its share the later ones get.

    More than ``bytes_max`` only by the one record that crosses it.
    """
    found: dict[int, list[InputRecord]] = {}
    for index, cursor in enumerate(cursors):
        if records_max <= 0 or bytes_max <= 0:
            break
        left = len(cursors) - index
        records = _fetch_from(connection, cursor, -(-records_max // left), -(-bytes_max // left))
        if records:
            found[cursor.partition] = records
            records_max -= len(records)
            bytes_max -= sum(map(_size, records))
    return found


def _fetch_from(
    connection: sqlite3.Connection, cursor: Cursor, records_max: int, bytes_max: int
) -> list[InputRecord]:
    records: list[InputRecord] = []
    for record in _records(connection, cursor, records_max):
        records.append(record)
        bytes_max -= _size(record)
        if bytes_max <= 0:
            break
    return records


def _size(record: InputRecord) -> int:
    return len(record.value or b"") + len(record.key or b"")


def _records(connection: sqlite3.Connection, cursor: Cursor, records_max: int) -> Iterator[InputRecord]:
    """Lazily, so that a limit of bytes can stop before the rest is read."""
    rows = connection.execute(
        "SELECT position, timestamp_ms, key, value, headers FROM record"
        " WHERE position >= ? AND position < ? ORDER BY position LIMIT ?",
        (cursor.stream << OFFSET_BITS | cursor.offset, (cursor.stream + 1) << OFFSET_BITS, records_max),
    )
    try:
        for position, timestamp_ms, key, value, headers in rows:
            yield InputRecord(
                cursor.partition, position & OFFSET_MASK, timestamp_ms, key, value, _decode_headers(headers)
            )
    finally:
        rows.close()


def record_at(connection: sqlite3.Connection, cursor: Cursor) -> InputRecord | None:
    """The record exactly there."""
    for record in _records(connection, cursor, 1):
        return record if record.offset == cursor.offset else None
    return None


def offset_at_time(connection: sqlite3.Connection, stream: Stream, timestamp_ms: int) -> int:
    """The offset of the first record stamped then or later; the end where there is none. Reads no value: a row's time
    stands before it."""
    row = connection.execute(
        "SELECT position FROM record WHERE position >= ? AND position < ? AND timestamp_ms >= ?"
        " ORDER BY position LIMIT 1",
        (stream.position(0), (stream.id + 1) << OFFSET_BITS, timestamp_ms),
    ).fetchone()
    return stream.next_offset if row is None else int(row[0]) & OFFSET_MASK


def is_at_end(connection: sqlite3.Connection, cursors: Iterable[Cursor]) -> bool:
    """Whether nothing follows. Looks for records, since compaction leaves offsets without any."""
    return not any(
        connection.execute(
            "SELECT 1 FROM record WHERE position >= ? AND position < ? LIMIT 1",
            (cursor.stream << OFFSET_BITS | cursor.offset, (cursor.stream + 1) << OFFSET_BITS),
        ).fetchone()
        for cursor in cursors
    )


def latest_by_key(connection: sqlite3.Connection, stream: Stream) -> list[InputRecord]:
    """The latest record of each key, in offset order."""
    records = _records(connection, Cursor(stream.id, stream.partition, 0), -1)
    latest = {record.key: record for record in records}
    return sorted(latest.values(), key=lambda record: record.offset)


def _encode_headers(headers: Headers) -> str | None:
    if not headers:
        return None
    return orjson.dumps([(name, value.hex()) for name, value in headers]).decode()


def _decode_headers(text: str | None) -> Headers:
    if text is None:
        return ()
    return tuple((name, bytes.fromhex(value)) for name, value in orjson.loads(text))
