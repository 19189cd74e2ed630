"""Topics and records in the file: the parts that the ports do not show."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import ConfigurationError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import log
from freezepoint.transport.sqlite.database import open_database
from freezepoint_schemas.topics import Topic, TopicNames

NAMES = TopicNames()


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = open_database(tmp_path / "f.db", SqliteSettings())
    log.create_default_topics(opened, NAMES, 4)
    yield opened
    opened.close()


def put(connection: sqlite3.Connection, partition: int, *values: bytes, topic: Topic = Topic.TOKENS) -> None:
    log.append(
        connection, NAMES, [OutputRecord(topic, b"k", value, (), partition) for value in values], 1_000
    )


def stream(connection: sqlite3.Connection, partition: int, topic: Topic = Topic.TOKENS) -> log.Stream:
    return log.require_stream(connection, log.require_topic(connection, NAMES[topic]), partition)


def cursors(connection: sqlite3.Connection) -> list[log.Cursor]:
    return [log.Cursor(stream(connection, partition).id, partition, 0) for partition in range(4)]


def test_append_time_never_steps_back_within_a_partition(connection: sqlite3.Connection) -> None:
    for now_ms in (5_000, 4_000, 6_000):
        log.append(connection, NAMES, [OutputRecord(Topic.TOKENS, b"k", b"v", (), 0)], now_ms)
    found = log.fetch(connection, cursors(connection), 10, 10_000)
    assert [record.timestamp_ms for record in found[0]] == [5_000, 5_000, 6_000]


def test_a_fetch_is_shared_out_evenly(connection: sqlite3.Connection) -> None:
    put(connection, 0, *[b"v"] * 100)
    for partition in (1, 2, 3):
        put(connection, partition, *[b"v"] * 2)
    found = log.fetch(connection, cursors(connection), 20, 10_000)
    assert {partition: len(records) for partition, records in found.items()} == {0: 5, 1: 2, 2: 2, 3: 2}
    found = log.fetch(connection, cursors(connection)[::-1], 20, 10_000)
    assert {partition: len(records) for partition, records in found.items()} == {3: 2, 2: 2, 1: 2, 0: 14}


def test_a_fetch_is_bounded_in_bytes_and_always_gets_on(connection: sqlite3.Connection) -> None:
    for partition in range(4):
        put(connection, partition, *[b"v" * 1_000] * 10)
    found = log.fetch(connection, cursors(connection), 100, 8_000)
    assert sum(map(len, found.values())) == 8
    found = log.fetch(connection, cursors(connection), 100, 1)
    assert sum(map(len, found.values())) == 1


def test_the_ledger_keeps_one_record_of_each_key(connection: sqlite3.Connection) -> None:
    put(connection, 1, b"1", b"2", topic=Topic.LEDGER)
    put(connection, 1, b"3", topic=Topic.LEDGER)
    put(connection, 2, b"other", topic=Topic.LEDGER)
    (record,) = log.latest_by_key(connection, stream(connection, 1, Topic.LEDGER))
    assert (record.offset, record.value) == (2, b"3")
    assert connection.execute("SELECT count(*) FROM record").fetchone() == (2,)
    assert stream(connection, 1, Topic.LEDGER).next_offset == 3


def test_the_end_is_known_behind_compacted_offsets(connection: sqlite3.Connection) -> None:
    put(connection, 0, b"1", b"2", topic=Topic.LEDGER)
    ledger = stream(connection, 0, Topic.LEDGER)
    assert not log.is_at_end(connection, [log.Cursor(ledger.id, 0, 0)])
    assert log.is_at_end(connection, [log.Cursor(ledger.id, 0, 2)])


def test_other_topics_keep_all_records_of_a_key(connection: sqlite3.Connection) -> None:
    put(connection, 0, b"1", b"2", b"3")
    assert len(log.fetch(connection, cursors(connection), 10, 1_000)[0]) == 3


def test_a_partition_that_does_not_exist_is_named(connection: sqlite3.Connection) -> None:
    with pytest.raises(ConfigurationError, match="has 4 partitions, no number 9"):
        put(connection, 9, b"v")
