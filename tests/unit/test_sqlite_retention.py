"""What is past its retention goes, but nothing that a replay could need."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import group, log, ownership, retention
from freezepoint.transport.sqlite.database import open_database
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs

NAMES = TopicNames()
DAY_MS = 24 * 60 * 60 * 1000
LONG_MS = 100 * DAY_MS


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = open_database(tmp_path / "f.db", SqliteSettings())
    log.create_default_topics(opened, NAMES, 1)
    yield opened
    opened.close()


def put(connection: sqlite3.Connection, topic: Topic, key: bytes, now_ms: int, value: bytes = b"v") -> None:
    log.append(connection, NAMES, [OutputRecord(topic, key, value)], now_ms)


def keys(connection: sqlite3.Connection, topic: Topic) -> list[bytes | None]:
    cursor = log.Cursor(stream(connection, topic).id, 0, 0)
    found = log.fetch(connection, [cursor], 10_000, 1_000_000_000)
    return [record.key for record in found.get(0, [])]


def stream(connection: sqlite3.Connection, topic: Topic) -> log.Stream:
    return log.require_stream(connection, log.require_topic(connection, NAMES[topic]), 0)


def commit(connection: sqlite3.Connection, name: str, offset: int) -> None:
    topic = log.require_topic(connection, NAMES[Topic.TOKENS])
    number = group.find_group(connection, name, topic)
    group.beat(connection, number, name)
    claim = ownership.Claim(number, name, group.standing(connection, number, name).generation, 0)
    ownership.commit(connection, ownership.take(connection, NAMES, claim), number, offset, offset)


def expire(connection: sqlite3.Connection, now_ms: int = LONG_MS) -> None:
    retention.expire(connection, NAMES, [0], now_ms)


def test_results_go_after_their_retention(connection: sqlite3.Connection) -> None:
    for key, day in ((b"a", 1), (b"b", 2), (b"c", 3)):
        put(connection, Topic.TRAJECTORIES, key, day * DAY_MS)
    expire(connection, 8 * DAY_MS)
    assert keys(connection, Topic.TRAJECTORIES) == [b"a", b"b", b"c"]
    expire(connection, 9 * DAY_MS)
    assert keys(connection, Topic.TRAJECTORIES) == [b"b", b"c"]
    assert (
        stream(connection, Topic.TRAJECTORIES).log_start,
        stream(connection, Topic.TRAJECTORIES).next_offset,
    ) == (1, 3)


def test_tokens_stay_until_every_group_has_committed_past_them(connection: sqlite3.Connection) -> None:
    for key in (b"a", b"b", b"c"):
        put(connection, Topic.TOKENS, key, 1)
    expire(connection)
    assert keys(connection, Topic.TOKENS) == [b"a", b"b", b"c"]
    commit(connection, "one", 3)
    commit(connection, "two", 2)
    expire(connection)
    assert keys(connection, Topic.TOKENS) == [b"c"]
    assert stream(connection, Topic.TOKENS).log_start == 2


def test_committed_tokens_stay_for_their_retention(connection: sqlite3.Connection) -> None:
    put(connection, Topic.TOKENS, b"a", 1)
    commit(connection, "one", 1)
    expire(connection, 6 * DAY_MS)
    assert keys(connection, Topic.TOKENS) == [b"a"]


def test_the_ledger_outlives_the_tokens_it_speaks_of(connection: sqlite3.Connection) -> None:
    put(connection, Topic.TOKENS, b"a", 1)
    put(connection, Topic.LEDGER, b"a", 2)
    expire(connection)
    assert keys(connection, Topic.LEDGER) == [b"a"]
    commit(connection, "one", 1)
    expire(connection)  # the tokens, then, for want of any, their ledger record
    assert keys(connection, Topic.TOKENS) == []
    assert keys(connection, Topic.LEDGER) == []
    put(connection, Topic.LEDGER, b"a", LONG_MS)
    assert keys(connection, Topic.LEDGER) == [b"a"]


def test_one_transaction_takes_a_limited_number(connection: sqlite3.Connection) -> None:
    count = retention.RECORDS_MAX + 500
    log.append(connection, NAMES, [OutputRecord(Topic.DEAD_LETTERS, None, b"v")] * count, 1)
    expire(connection)
    assert len(keys(connection, Topic.DEAD_LETTERS)) == 500
    expire(connection)
    assert keys(connection, Topic.DEAD_LETTERS) == []


def test_one_transaction_takes_a_limited_number_of_bytes(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BYTES_MAX", 2_000)
    for number in range(5):
        put(connection, Topic.DEAD_LETTERS, b"%d" % number, 1, b"v" * 1_000)
    expire(connection)
    assert keys(connection, Topic.DEAD_LETTERS) == [b"2", b"3", b"4"]


def test_without_a_retention_everything_stays(connection: sqlite3.Connection) -> None:
    (spec,) = [spec for spec in topic_specs(NAMES, 1) if spec.topic is Topic.TRAJECTORIES]
    topic = log.require_topic(connection, spec.name)
    log.configure_topic(connection, topic, {**spec.config, "retention.ms": "-1"})
    put(connection, Topic.TRAJECTORIES, b"a", 1)
    expire(connection)
    assert keys(connection, Topic.TRAJECTORIES) == [b"a"]
