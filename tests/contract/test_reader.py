"""Reading a topic's committed records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from freezepoint.core.records import InputRecord
from freezepoint.errors import MissingTopicError
from freezepoint.transport.ports import Reader, Transport
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.contract.driving import (
    PARTITIONS,
    POLL_S,
    WAIT_S,
    Cluster,
    deadline,
    read_to_end,
    token,
)

PER_PARTITION = 10


async def filled(cluster: Cluster) -> Transport:
    """A transport with ten records in each partition of the tokens topic."""
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await producer.send(
        [
            token(b"r", b"%d" % number, partition=partition)
            for number in range(PER_PARTITION)
            for partition in range(PARTITIONS)
        ]
    )
    return transport


def offsets(records: Sequence[InputRecord]) -> dict[int, list[int]]:
    """Offsets by partition, in the order they came."""
    found: dict[int, list[int]] = {}
    for record in records:
        found.setdefault(record.partition, []).append(record.offset)
    return found


async def test_from_the_beginning_in_offset_order(cluster: Cluster) -> None:
    reader = await (await filled(cluster)).reader(Topic.TOKENS)
    assert offsets(await read_to_end(reader)) == {
        partition: list(range(PER_PARTITION)) for partition in range(PARTITIONS)
    }
    await reader.close()


async def test_some_partitions(cluster: Cluster) -> None:
    reader = await (await filled(cluster)).reader(Topic.TOKENS, partitions=[1, 3])
    assert offsets(await read_to_end(reader)) == {
        1: list(range(PER_PARTITION)),
        3: list(range(PER_PARTITION)),
    }
    await reader.close()


async def test_from_given_offsets_and_the_rest_from_the_beginning(cluster: Cluster) -> None:
    reader = await (await filled(cluster)).reader(Topic.TOKENS, start={0: 7, 1: PER_PARTITION, 2: 0})
    assert offsets(await read_to_end(reader)) == {
        0: [7, 8, 9],
        2: list(range(PER_PARTITION)),
        3: list(range(PER_PARTITION)),
    }
    await reader.close()


async def test_no_poll_returns_more_than_asked(cluster: Cluster) -> None:
    reader = await (await filled(cluster)).reader(Topic.TOKENS)
    in_time = deadline()
    count = 0
    while count < PARTITIONS * PER_PARTITION:
        records = await reader.poll(POLL_S, 3)
        assert len(records) <= 3
        count += len(records)
        assert in_time(), f"{count} records in {WAIT_S:g} s"
    assert not await reader.poll(POLL_S, 3)
    await reader.close()


async def test_at_end_turns_when_something_is_added_and_back_when_it_was_read(cluster: Cluster) -> None:
    transport = await filled(cluster)
    reader = await transport.reader(Topic.TOKENS)
    assert not await reader.at_end()
    await read_to_end(reader)
    assert await reader.at_end()
    await (await transport.producer()).send([token(b"r", b"more")])
    assert not await reader.at_end()
    assert [record.value for record in await read_to_end(reader)] == [b"more"]
    assert await reader.at_end()
    await reader.close()


async def test_an_empty_topic_is_at_its_end(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    reader = await transport.reader(Topic.TRAJECTORIES)
    assert await reader.at_end()
    assert not await reader.poll(0.0, 10)
    await reader.close()


async def test_a_waiting_poll_returns_soon_after_a_record_came(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    reader = await transport.reader(Topic.TOKENS)
    producer = await transport.producer()
    waiting = asyncio.create_task(reader.poll(WAIT_S, 10))
    await producer.send([token(b"r", b"v")])
    async with asyncio.timeout(WAIT_S / 2):
        (record,) = await waiting
    assert record.value == b"v"
    await reader.close()


async def test_readers_do_not_take_from_each_other(cluster: Cluster) -> None:
    transport = await filled(cluster)
    readers: list[Reader] = [
        await transport.reader(Topic.TOKENS),
        await cluster.transport().reader(Topic.TOKENS),
    ]
    for reader in readers:
        assert len(await read_to_end(reader)) == PARTITIONS * PER_PARTITION
        await reader.close()


async def test_a_missing_topic(cluster: Cluster) -> None:
    transport = cluster.transport()
    await transport.admin().apply(topic_specs(TopicNames(f"{cluster.names.prefix}others."), 1))
    with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
        await (await transport.reader(Topic.TRAJECTORIES)).poll(POLL_S, 1)
