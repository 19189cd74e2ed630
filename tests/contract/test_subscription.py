"""A consumer group over the trajectories topic: sharing, stored offsets, takeovers, where it begins."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError, ConfigurationError, MissingTopicError, OwnershipLostError
from freezepoint.transport.ports import FROM_THE_BEGINNING, StartAt, Started, Subscription, Transport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.contract.driving import PARTITIONS, POLL_S, RECORDS_MAX, WAIT_S, Cluster, deadline

PROGRAM = Path(__file__).with_name("subscriber_process.py")


class Driven:
    """A subscription and all it has been told so far."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.generation = 0
        self.assigned: frozenset[int] = frozenset()
        self.started: list[tuple[int, Started]] = []
        self.records: list[InputRecord] = []

    async def poll(self) -> None:
        feed = await self.subscription.poll(POLL_S, RECORDS_MAX)
        assert feed.generation >= self.generation
        assert set(feed.records) | set(feed.started) <= feed.assigned
        self.generation, self.assigned = feed.generation, feed.assigned
        self.started += feed.started.items()
        for partition, records in feed.records.items():
            assert partition in {number for number, _ in self.started}, "records before their start"
            self.records += records

    async def commit(self, offsets: dict[int, int]) -> None:
        await self.subscription.commit(self.generation, offsets)

    @property
    def values(self) -> list[bytes]:
        return sorted(record.value or b"" for record in self.records)


async def drive(members: Sequence[Driven], until: Callable[[], bool], what: str) -> None:
    in_time = deadline()
    while not until():
        assert in_time(), f"not within {WAIT_S:g} s: {what}; {[(m.assigned, m.values) for m in members]}"
        await asyncio.gather(*(member.poll() for member in members))


async def started(
    transport: Transport, group: str, start: StartAt = FROM_THE_BEGINNING, partitions: int = PARTITIONS
) -> Driven:
    """The group's only consumer, with every partition started."""
    member = Driven(await transport.subscribe(Topic.TRAJECTORIES, group, start))
    await drive([member], lambda: len(member.started) >= partitions, "every partition started")
    return member


async def send(transport: Transport, *values: bytes, partition: int = 0) -> None:
    producer = await transport.producer()
    try:
        await producer.send(
            [OutputRecord(Topic.TRAJECTORIES, b"r", value, partition=partition) for value in values]
        )
    finally:
        await producer.close()


async def everything_of(member: Driven) -> list[bytes]:
    """What it has been given, once it has been given all there is."""
    in_time = deadline()
    while not await member.subscription.caught_up():
        assert in_time(), "not caught up"
        await member.poll()
    await member.poll()
    return member.values


async def test_the_only_consumer_reads_everything_in_order(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    for partition in range(PARTITIONS):
        await send(transport, *(b"%d-%d" % (partition, n) for n in range(5)), partition=partition)
    member = await started(transport, cluster.group)
    assert sorted(member.started) == [(partition, Started(0)) for partition in range(PARTITIONS)]
    assert len(await everything_of(member)) == 5 * PARTITIONS
    for partition in range(PARTITIONS):
        offsets = [record.offset for record in member.records if record.partition == partition]
        assert offsets == sorted(offsets)


async def test_two_consumers_share_and_nothing_is_lost(cluster: Cluster) -> None:
    first = await started(await cluster.with_topics(), cluster.group)
    transport = cluster.transport()
    second = Driven(await transport.subscribe(Topic.TRAJECTORIES, cluster.group))
    both = [first, second]

    def shared() -> bool:
        return first.assigned.isdisjoint(second.assigned) and len(first.assigned) == len(second.assigned) == 2

    await drive(both, shared, "two partitions each")
    for partition in range(PARTITIONS):
        await send(transport, b"%d" % partition, partition=partition)
    await drive(both, lambda: len(first.records + second.records) >= PARTITIONS, "all records")
    assert len(first.records) == len(second.records) == 2
    assert sorted(first.values + second.values) == [b"0", b"1", b"2", b"3"]


async def test_a_partition_that_is_kept_goes_on_where_it_was(cluster: Cluster) -> None:
    """Nothing was committed, and yet a rebalance repeats nothing of what stays."""
    transport = await cluster.with_topics()
    for partition in range(PARTITIONS):
        await send(transport, b"%d" % partition, partition=partition)
    first = await started(transport, cluster.group)
    assert len(await everything_of(first)) == PARTITIONS
    second = Driven(await cluster.transport().subscribe(Topic.TRAJECTORIES, cluster.group))
    await drive([first, second], lambda: len(second.started) >= 2, "the second has its share")
    await drive([first, second], lambda: len(second.records) >= 2, "what was not committed comes again")
    assert {record.partition for record in second.records} == second.assigned
    for partition in first.assigned:
        await send(transport, b"more", partition=partition)
    await drive([first, second], lambda: first.values.count(b"more") == 2, "more in what stayed")
    assert len(first.started) == PARTITIONS, "no new start of a kept partition"
    assert len(first.records) == PARTITIONS + 2


async def test_what_was_committed_is_not_read_again_and_the_rest_is(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await send(transport, b"0", b"1", b"2")
    first = await started(transport, cluster.group, partitions=1)
    await everything_of(first)
    await first.commit({0: first.records[0].offset + 1})
    await first.subscription.close()
    second = await started(cluster.transport(), cluster.group, partitions=1)
    assert second.started == [(0, Started(first.records[1].offset))]
    assert await everything_of(second) == [b"1", b"2"]


async def test_groups_do_not_know_of_each_other(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await send(transport, b"0")
    one = await started(transport, cluster.group, partitions=1)
    await everything_of(one)
    await one.commit({0: one.records[0].offset + 1})
    other = await started(transport, f"{cluster.group}-other", partitions=1)
    assert await everything_of(other) == [b"0"]


async def test_latest_is_stored_so_that_a_takeover_goes_on_from_there(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await send(transport, b"before")
    first = await started(transport, cluster.group, StartAt("latest"), partitions=1)
    assert first.started[0][1].offset > 0
    await send(transport, b"after")
    await first.subscription.close()
    second = await started(cluster.transport(), cluster.group, StartAt("latest"), partitions=1)
    assert await everything_of(second) == [b"after"]


async def test_from_a_time(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    await send(transport, b"old")
    reader = await started(transport, f"{cluster.group}-clock", partitions=2)
    await everything_of(reader)
    since_ms = reader.records[0].timestamp_ms + 1
    while time.time_ns() // 1_000_000 <= since_ms:
        await reader.poll()
    await send(transport, b"new")
    member = await started(transport, cluster.group, StartAt(since_ms), partitions=2)
    assert await everything_of(member) == [b"new"]
    later = await started(transport, f"{cluster.group}-later", StartAt(since_ms + 10**9), partitions=2)
    assert await everything_of(later) == []


async def test_stored_offsets_win_unless_they_are_to_be_ignored(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await send(transport, b"0", b"1")
    first = await started(transport, cluster.group, partitions=1)
    await everything_of(first)
    await first.commit({0: first.records[0].offset + 1})
    await first.subscription.close()
    stored = await started(cluster.transport(), cluster.group, StartAt("latest"), partitions=1)
    assert await everything_of(stored) == [b"1"]
    await stored.subscription.close()
    again = await started(
        cluster.transport(), cluster.group, StartAt("earliest", ignore_stored=True), partitions=1
    )
    assert await everything_of(again) == [b"0", b"1"]


async def test_a_stored_offset_beyond_the_end_is_refused(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    first = await started(transport, cluster.group, partitions=1)
    await first.commit({0: 1_000})
    await first.subscription.close()
    with pytest.raises(ConfigurationError, match="lies beyond the end 0"):
        await started(cluster.transport(), cluster.group, partitions=1)


async def test_a_commit_of_a_past_assignment_is_refused(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    first = await started(transport, cluster.group)
    generation = first.generation
    second = Driven(await cluster.transport().subscribe(Topic.TRAJECTORIES, cluster.group))
    await drive([first, second], lambda: len(second.started) >= 2, "the second has its share")
    with pytest.raises(OwnershipLostError):
        await first.subscription.commit(generation, dict.fromkeys(range(PARTITIONS), 0))


async def test_only_what_is_committed_by_a_transaction_is_read(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    member = await started(transport, cluster.group, partitions=1)
    worker = await transport.join(f"{cluster.group}-worker")
    while not (await worker.poll(POLL_S, 1)).assigned:
        pass
    lease = await worker.acquire(0)
    output = [OutputRecord(Topic.TRAJECTORIES, b"r", b"%d" % n, partition=0) for n in range(3)]
    publishing = asyncio.create_task(lease.publish(output))
    await drive([member], publishing.done, "published")
    await publishing
    assert await everything_of(member) == [b"0", b"1", b"2"]


async def test_pause_holds_back_and_resume_goes_on_where_it_was(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    member = await started(transport, cluster.group, partitions=1)
    member.subscription.pause()
    await send(transport, b"0")
    for _ in range(5):
        await member.poll()
    assert not member.records
    assert not await member.subscription.caught_up()
    member.subscription.resume()
    await drive([member], lambda: member.values == [b"0"], "the held record")


async def test_a_pause_outlives_a_rebalance(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await started(transport, cluster.group)
    member.subscription.pause()
    second = Driven(await cluster.transport().subscribe(Topic.TRAJECTORIES, cluster.group))
    await drive([member, second], lambda: len(second.started) >= 2, "the second has its share")
    kept = min(member.assigned)
    await send(transport, b"0", partition=kept)
    for _ in range(5):
        await asyncio.gather(member.poll(), second.poll())
    assert not member.records
    member.subscription.resume()
    await drive([member, second], lambda: member.values == [b"0"], "the held record")


async def test_a_missing_topic(cluster: Cluster) -> None:
    transport = cluster.transport()
    await transport.admin().apply(topic_specs(TopicNames(f"{cluster.names.prefix}others."), 1))
    with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
        await transport.subscribe(Topic.TRAJECTORIES, cluster.group)


async def test_after_close_nothing_is_polled(cluster: Cluster) -> None:
    member = await started(await cluster.with_topics(), cluster.group)
    await member.subscription.close()
    with pytest.raises(BrokerError):
        await member.subscription.poll(POLL_S, 1)


class SubscriberProcess:
    """Runs ``subscriber_process.py``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    @classmethod
    @asynccontextmanager
    async def started(cls, cluster: Cluster, *options: str) -> AsyncIterator[Self]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAM),
            cluster.group,
            *options,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **cluster.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def until(self, *lines: str) -> None:
        """Until it has printed all of these."""
        assert self._process.stdout is not None
        while not set(lines) <= set(self.lines):
            async with asyncio.timeout(WAIT_S):
                line = await self._process.stdout.readline()
            assert line, f"the process ended: {self._process.returncode}, {self.lines}"
            self.lines.append(line.decode().strip())

    def kill(self) -> None:
        self._process.kill()


async def test_takeover_after_a_death(cluster: Cluster) -> None:
    """What the dead one had committed is not read again; what it had only read is."""
    transport = await cluster.with_topics(partitions=1)
    await send(transport, b"0", b"1")
    async with SubscriberProcess.started(cluster) as first:
        await first.until("committed 0", "committed 1")
        first.kill()
    await send(transport, b"2")
    async with SubscriberProcess.started(cluster, "keep") as second:
        await second.until("read 2")
        assert "read 0" not in second.lines
        second.kill()
    third = await started(cluster.transport(), cluster.group, partitions=1)
    assert await everything_of(third) == [b"2"]
