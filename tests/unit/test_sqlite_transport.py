"""What only the embedded transport promises: no set-up, one snapshot across topics, quick notice at little cost."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import MissingTopicError
from freezepoint.settings import SqliteSettings
from freezepoint.transport.sqlite import SqliteTransport
from freezepoint.transport.sqlite.database import WAL_BYTES_MAX, open_database
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.contract.driving import Driven, acquire, read_all, share, token

NAMES = TopicNames()


def at(path: Path, names: TopicNames = NAMES, **settings: int) -> SqliteTransport:
    return SqliteTransport(path, names, SqliteSettings.model_validate(settings))


async def test_the_first_use_creates_the_topics(tmp_path: Path) -> None:
    async with at(tmp_path / "f.db") as transport:
        findings = await transport.admin().check(topic_specs(NAMES, 4))
        assert all(finding.ok and "first use" in finding.message for finding in findings)
        assert await read_all(transport, Topic.TRAJECTORIES) == []
        assert [await transport.admin().partitions(topic) for topic in Topic] == [4] * 4
        assert all(finding.ok for finding in await transport.admin().check(topic_specs(NAMES, 4)))


async def test_apply_before_the_first_use_decides_how_many_partitions(tmp_path: Path) -> None:
    async with at(tmp_path / "f.db") as transport:
        await transport.admin().apply(topic_specs(NAMES, 7))
        await (await transport.producer()).send([token(b"r", b"v")])
        assert await transport.admin().partitions(Topic.TOKENS) == 7


async def test_the_setting_decides_how_many_partitions_the_first_use_creates(tmp_path: Path) -> None:
    async with at(tmp_path / "f.db", partitions=2) as transport:
        assert await transport.admin().partitions(Topic.TOKENS) == 2
        await transport.producer()
        assert await transport.admin().partitions(Topic.TOKENS) == 2


async def test_a_second_prefix_in_a_used_file_is_no_first_use(tmp_path: Path) -> None:
    async with at(tmp_path / "f.db") as transport, at(tmp_path / "f.db", TopicNames("b.")) as other:
        await transport.producer()
        with pytest.raises(MissingTopicError):
            await (await other.producer()).send([token(b"r", b"v")])


async def test_two_prefixes_share_a_file_and_nothing_else(tmp_path: Path) -> None:
    async with at(tmp_path / "f.db") as transport, at(tmp_path / "f.db", TopicNames("b.")) as other:
        await (await transport.producer()).send([token(b"r", b"v")])
        await other.admin().apply(topic_specs(other.names, 2))
        assert await read_all(other, Topic.TOKENS) == []
        members = [Driven(await one.join("g")) for one in (transport, other)]
        await share(members[:1], 4)
        await share(members[1:], 2)


async def test_a_publication_is_seen_in_all_its_topics_at_once(tmp_path: Path) -> None:
    topics = (Topic.TRAJECTORIES, Topic.DEAD_LETTERS)
    async with at(tmp_path / "f.db", partitions=1) as transport, at(tmp_path / "f.db") as watching:
        member = Driven(await transport.join("g"))
        await share([member], 1)
        lease = await acquire(member, 0)

        async def publish() -> None:
            for number in range(40):
                await lease.publish(
                    [OutputRecord(t, b"r", b"%d" % number) for t in topics for _ in range(20)]
                )

        publishing = asyncio.create_task(publish())
        while not publishing.done():
            first = len(await read_all(watching, Topic.TRAJECTORIES))
            second = len(await read_all(watching, Topic.DEAD_LETTERS))
            assert first % 20 == second % 20 == 0
            assert second >= first, "what is visible in the topic read first is visible in the other one"
        await publishing


async def test_waiting_costs_next_to_nothing(tmp_path: Path) -> None:
    async with at(tmp_path / "f.db") as transport:
        member = await transport.join("g")
        reader = await transport.reader(Topic.TRAJECTORIES)
        await member.poll(0.1, 1)
        before = time.process_time()
        await asyncio.gather(member.poll(2.0, 1), reader.poll(2.0, 1))
        assert (time.process_time() - before) / 2.0 < 0.25


async def test_a_member_whose_process_slept_joins_again_by_itself(tmp_path: Path) -> None:
    def sleepy() -> SqliteTransport:
        return at(tmp_path / "f.db", session_timeout_ms=300, heartbeat_interval_ms=50)

    async with sleepy() as transport, sleepy() as other:
        sleeper, watcher = Driven(await transport.join("g")), Driven(await other.join("g"))
        await share([sleeper, watcher], 4)
        lease = await acquire(sleeper, next(iter(sleeper.assigned)), watcher)
        generation = sleeper.generation
        await share([watcher], 4)
        assert watcher.generation > generation
        await share([sleeper, watcher], 4)
        await lease.publish([OutputRecord(Topic.TRAJECTORIES, b"r", b"nobody acquired it meanwhile")])


async def test_the_write_ahead_log_stays_small_while_others_read(tmp_path: Path) -> None:
    path, total = tmp_path / "f.db", 60
    async with at(path) as transport, at(path) as watching:
        producer, reader = await transport.producer(), await watching.reader(Topic.TOKENS)

        async def write() -> None:
            for number in range(total):
                await producer.send([token(b"%d" % number, b"x" * 1_000_000)])

        writing = asyncio.create_task(write())
        largest = count = 0
        while count < total:
            count += len(await reader.poll(1.0, 10))
            largest = max(largest, path.with_name("f.db-wal").stat().st_size)
        await writing
        assert largest < 4 * WAL_BYTES_MAX


async def test_no_checkpoint_happens_by_itself(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "f.db", SqliteSettings())) as connection:
        assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
