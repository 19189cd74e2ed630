"""Closing releases everything (a leak is a ResourceWarning, which fails the test), and wrong addresses say so."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from freezepoint.errors import ConfigurationError, FreezepointError
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint_schemas.topics import Topic
from tests.contract.driving import Cluster, own_all, share, token


async def test_close_releases_everything_that_was_left_open(cluster: Cluster) -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    transport = await cluster.with_topics(partitions=1)
    await (await transport.producer()).send([token(b"r", b"v")])
    await own_all(await cluster.member(transport), 1)
    await (await transport.reader(Topic.TOKENS)).poll(0.1, 1)
    await transport.close()
    gc.collect()
    assert asyncio.all_tasks() <= tasks
    left = {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")} - threads
    for thread in left:
        thread.join(timeout=10)
        assert not thread.is_alive(), thread


async def test_close_leaves_the_group(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await own_all(await cluster.member(transport), 1)
    await transport.close()
    await share([await cluster.member()], 1)


async def test_closing_twice_and_unused_is_no_error(cluster: Cluster) -> None:
    transport = cluster.transport()
    await transport.close()
    await transport.close()


async def test_leaving_the_context_closes(cluster: Cluster) -> None:
    async with await cluster.with_topics(partitions=1) as transport:
        producer = await transport.producer()
    with pytest.raises(FreezepointError):
        await producer.send([token(b"r", b"v")])


async def test_a_closed_transport_makes_nothing_more(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await transport.close()
    with pytest.raises(FreezepointError):
        await (await transport.producer()).send([token(b"r", b"v")])


async def test_closing_each_part_by_itself(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    producer, reader = await transport.producer(), await transport.reader(Topic.TOKENS)
    await producer.send([token(b"r", b"v")])
    for part in (producer, reader):
        await part.close()
        await part.close()
    with pytest.raises(FreezepointError):
        await producer.send([token(b"r", b"v")])


@pytest.mark.parametrize(
    "broker", ["", "kafka://", "sqlite:///", "redis://localhost", "sqlite://relative.db"]
)
def test_an_address_of_no_known_kind_is_refused(broker: str) -> None:
    with pytest.raises(ConfigurationError, match="FREEZEPOINT_BROKER"):
        connect(Settings(broker=broker))
