"""Where a subscription begins, and whether somebody else had the partition in between."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from freezepoint.errors import ConfigurationError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.ports import FROM_THE_BEGINNING, Extent, Feed, StartAt, Started, Subscription
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint.transport.starting import StoredOffsets, resume_at
from freezepoint_schemas.topics import Topic, TopicNames
from tests.results import publish_results, result


def test_from_a_stored_offset() -> None:
    assert resume_at(5, Extent(0, 9), "g") == Started(5)
    assert resume_at(9, Extent(0, 9), "g") == Started(9)
    assert resume_at(2, Extent(7, 9), "g") == Started(7, expired=5)
    with pytest.raises(ConfigurationError, match="g: the stored offset 10 lies beyond the end 9"):
        resume_at(10, Extent(0, 9), "g")


def test_only_an_offset_that_was_never_asked_for_is_somebody_elses() -> None:
    offsets = StoredOffsets(FROM_THE_BEGINNING)
    assert offsets.is_ours(0, None)
    assert not offsets.is_ours(0, 0)
    offsets.started(0, 5)
    offsets.asked(0, 9)
    offsets.asked(0, 7)
    assert [offsets.is_ours(0, stored) for stored in (5, 9, 10)] == [True, True, False]
    offsets.started(0, 3)
    assert not offsets.is_ours(0, 9)


def test_a_stored_offset_is_ignored_once() -> None:
    offsets = StoredOffsets(StartAt("latest", ignore_stored=True))
    assert not offsets.is_honoured(0)
    offsets.started(0, 5)
    assert offsets.is_honoured(0)
    assert not offsets.is_honoured(1)
    assert StoredOffsets(FROM_THE_BEGINNING).is_honoured(0)


async def next_feed(subscription: Subscription) -> Feed:
    while not (feed := await subscription.poll(0.1, 2)).records:
        pass
    return feed


async def test_what_retention_removed_ahead_of_a_consumer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    async with SqliteTransport(path, TopicNames(), SqliteSettings(partitions=1)) as transport:
        await publish_results(transport, [result(f"r{n}") for n in range(6)])
        subscription = await transport.subscribe(Topic.TRAJECTORIES, "trainer")
        assert [record.offset for record in (await next_feed(subscription)).records[0]] == [0, 1]
        expire_below(path, 5)
        feed = await next_feed(subscription)
        assert feed.started == {0: Started(5, expired=3)}
        assert [record.offset for record in feed.records[0]] == [5]
        await subscription.close()
        again = await transport.subscribe(Topic.TRAJECTORIES, "trainer")
        while not (feed := await again.poll(0.1, 2)).started:
            pass
        assert feed.started == {0: Started(5, expired=5)}


def expire_below(path: Path, offset: int) -> None:
    """As retention does it in a worker's beat."""
    connection = sqlite3.connect(path)
    with connection:
        (stream,) = connection.execute(
            "SELECT stream.id FROM stream JOIN topic ON topic.id = topic WHERE name = 'rollout-trajectories'"
        ).fetchone()
        connection.execute(
            "DELETE FROM record WHERE position < ? AND position >> 40 = ?", (stream << 40 | offset, stream)
        )
        connection.execute("UPDATE stream SET log_start = ? WHERE id = ?", (offset, stream))
    connection.close()
