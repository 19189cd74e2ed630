"""Durable, ordered publication of input."""

from __future__ import annotations

import asyncio
import time

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import MissingTopicError, RecordTooLargeError
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.topics import Topic, TopicNames, partition_for, topic_specs
from tests.contract.driving import PARTITIONS, Cluster, key_of, read_all, token

LIMIT = 4_096


async def test_what_was_acknowledged_is_there_for_another_transport(cluster: Cluster) -> None:
    producer = await (await cluster.with_topics()).producer()
    await producer.send([token(b"r-%d" % number, b"%d" % number) for number in range(50)])
    records = await read_all(cluster.transport(), Topic.TOKENS)
    assert sorted(int(record.value or b"") for record in records) == list(range(50))


@pytest.mark.parametrize("size", [10, 3 * LIMIT])
async def test_it_says_where_each_record_lies(cluster: Cluster, size: int) -> None:
    transport = await cluster.with_topics(record_bytes_max=LIMIT)
    producer = await transport.producer()
    values = {b"r-%d" % number: b"%d" % number * size for number in range(8)}
    await producer.send([token(b"r-0", b"before")])
    positions = await producer.send([token(key, value) for key, value in values.items()])
    stored = {(record.partition, record.offset): record for record in await read_all(transport, Topic.TOKENS)}
    for (key, value), position in zip(values.items(), positions, strict=True):
        record = stored[position.partition, position.offset]
        assert record.key == key
        assert record.value is not None
        assert value.endswith(record.value)
        part = header(record.headers, PART)
        assert (part is None) == (size < LIMIT)
        if part is not None:
            assert PartHeader.parse(part).index == PartHeader.parse(part).count - 1
    assert await producer.send([]) == []


async def test_records_of_a_key_keep_their_order(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    for start in range(0, 300, 30):
        await producer.send([token(b"r-%d" % (n % 7), b"%d" % n) for n in range(start, start + 30)])
    records = await read_all(transport, Topic.TOKENS)
    for key in range(7):
        values = [int(record.value or b"") for record in records if record.key == b"r-%d" % key]
        assert values == list(range(key, 300, 7))


async def test_offsets_count_up_from_zero_and_times_do_not_step_back(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    producer = await transport.producer()
    before_ms = time.time() * 1000
    for number in range(5):
        await producer.send([token(b"r", b"%d" % number)])
    records = await read_all(transport, Topic.TOKENS)
    times = [record.timestamp_ms for record in records]
    assert [record.offset for record in records] == list(range(5))
    assert times == sorted(times)
    assert (
        abs(times[0] - before_ms) < 3_600_000
    )  # milliseconds since the epoch, of a clock that may be another's


async def test_the_key_decides_the_partition_as_on_kafka(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    keys = [b"rollout-%d" % number for number in range(40)]
    await producer.send([token(key, b"") for key in keys])
    records = await read_all(transport, Topic.TOKENS)
    assert {record.key: record.partition for record in records} == {
        key: partition_for(key, PARTITIONS) for key in keys
    }


async def test_an_explicit_partition_wins(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    elsewhere = (partition_for(b"r", PARTITIONS) + 1) % PARTITIONS
    await producer.send([token(b"r", b"v", partition=elsewhere)])
    (record,) = await read_all(transport, Topic.TOKENS)
    assert record.partition == elsewhere


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"v"),
        (b"", b"v"),
        (b"\x00\xff", b"\x00\xff"),
        (b"r", None),
        (b"r", b""),
        (None, b""),
        (b"", None),
    ],
)
async def test_keys_and_values_come_back_as_they_were(
    cluster: Cluster, key: bytes | None, value: bytes | None
) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await producer.send([token(key, value)])
    (record,) = await read_all(transport, Topic.TOKENS)
    assert (record.key, record.value, record.headers) == (key, value, ())


async def test_headers_come_back_in_order_with_repeats(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    headers = (("a", b"1"), ("b", b"\x00\xff"), ("a", b"2"), ("ü", b""))
    await producer.send([token(b"r", b"v", headers=headers)])
    (record,) = await read_all(transport, Topic.TOKENS)
    assert record.headers == headers


async def test_values_above_the_limit_are_split_and_come_back_whole(cluster: Cluster) -> None:
    transport = await cluster.with_topics(record_bytes_max=LIMIT)
    producer = await transport.producer()
    large = {b"r-%d" % number: bytes([number]) * (LIMIT * 5 + number) for number in range(3)}
    await producer.send([token(key, value, headers=(("h", b"x"),)) for key, value in large.items()])
    assembler = PartAssembler(value_bytes_max=LIMIT * 10)
    whole: dict[bytes | None, bytes] = {}
    for record in await read_all(transport, Topic.TOKENS):
        part, value = header(record.headers, PART), record.value or b""
        assert part is not None
        assert len(value) < LIMIT
        assert header(record.headers, "h") == b"x"
        if (joined := assembler.add(PartHeader.parse(part), value, record.offset)) is not None:
            whole[record.key] = joined
    assert whole == large


async def test_a_value_at_the_limit_of_one_record_is_not_split(cluster: Cluster) -> None:
    transport = await cluster.with_topics(record_bytes_max=LIMIT)
    producer = await transport.producer()
    await producer.send([token(b"r", b"x" * (LIMIT - 513))])
    (record,) = await read_all(transport, Topic.TOKENS)
    assert record.headers == ()


async def test_a_record_that_cannot_be_split_is_refused_and_nothing_else_suffers(cluster: Cluster) -> None:
    transport = await cluster.with_topics(record_bytes_max=LIMIT)
    producer = await transport.producer()
    with pytest.raises(RecordTooLargeError):
        await producer.send([token(b"k" * LIMIT, b"v" * LIMIT)])
    await producer.send([token(b"r", b"next")])
    assert [record.value for record in await read_all(transport, Topic.TOKENS)] == [b"next"]


async def test_many_sends_at_once(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await asyncio.gather(*(producer.send([token(b"r-%d" % n, b"%d" % n)]) for n in range(200)))
    records = await read_all(transport, Topic.TOKENS)
    assert sorted(int(record.value or b"") for record in records) == list(range(200))


async def test_sending_nothing_is_no_error(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await producer.send([])
    assert await read_all(transport, Topic.TOKENS) == []


async def test_a_producer_writes_to_every_topic(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await producer.send([OutputRecord(topic, key_of(2), topic.encode()) for topic in Topic])
    for topic in Topic:
        (record,) = await read_all(transport, topic)
        assert (record.partition, record.value) == (2, topic.encode())


async def test_a_missing_topic_is_named_with_the_command_that_creates_it(cluster: Cluster) -> None:
    transport = cluster.transport()
    await transport.admin().apply(topic_specs(TopicNames(f"{cluster.names.prefix}others."), 1))
    with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
        await (await transport.producer()).send([token(b"r", b"v")])
