"""The producer and the reader, against a real broker."""

import asyncio

import pytest

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError, ConfigurationError, MissingTopicError
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.topics import Topic, partition_for
from kafka_local import LocalKafka
from tests.integration.kafka_kit import (
    JOIN_S,
    SETTINGS,
    open_transaction,
    owner,
    read_all,
    read_count,
    result,
    set_config,
    token,
    transport,
)
from tests.polling import poll_until_async


async def test_the_producer_sends_in_order_to_the_default_partition(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=3) as made:
        producer = await made.producer()
        keys = [f"r{number}" for number in range(20)]
        for text in ("first", "second"):
            await asyncio.gather(*(producer.send([token(key, text)]) for key in keys))
        records = await read_all(made, Topic.TOKENS)
        assert len(records) == 40
        for key in keys:
            mine = [record for record in records if record.key == key.encode()]
            assert [record.value for record in mine] == [b"first", b"second"]
            assert {record.partition for record in mine} == {partition_for(key.encode(), 3)}


async def test_the_producer_splits_by_the_limit_of_each_topic(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await set_config(made, Topic.TOKENS, {"max.message.bytes": "3000"})
        producer = await made.producer()
        small = [token(f"r{number}", "x" * 100) for number in range(200)]
        await producer.send([token("big", "y" * 20_000), *small, result("whole", "z" * 20_000)])
        tokens = await read_all(made, Topic.TOKENS)
        parts = [record for record in tokens if header(record.headers, PART)]
        assert b"".join(record.value or b"" for record in parts) == b"y" * 20_000
        assert len(tokens) - len(parts) == 200
        assert [len(record.value or b"") for record in await read_all(made, Topic.TRAJECTORIES)] == [20_000]


async def test_the_producer_recovers_from_a_refused_record(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        producer = await made.producer()
        await producer.send([token("a", "x" * 5_000)])
        await set_config(made, Topic.TOKENS, {"max.message.bytes": "3000"})

        async def refused() -> bool:
            try:
                await producer.send([token("b", "x" * 5_000)])
            except BrokerError as error:
                return "MessageSizeTooLarge" in str(error)
            return False

        await poll_until_async(refused, JOIN_S, "a record above the new limit")
        await producer.send([token("c", "x" * 5_000)])
        values = [
            len(record.value or b"") for record in await read_all(made, Topic.TOKENS) if record.key == b"c"
        ]
        assert len(values) == 3
        assert sum(values) == 5_000


async def test_records_without_a_key_or_a_value(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        headers = (("name", b"value"), ("name", b""))
        await (await made.producer()).send(
            [
                OutputRecord(Topic.TOKENS, b"tombstone", None),
                OutputRecord(Topic.DEAD_LETTERS, None, b"no key", headers),
                OutputRecord(Topic.DEAD_LETTERS, None, None),
            ]
        )
        (tombstone,) = await read_all(made, Topic.TOKENS)
        assert (tombstone.key, tombstone.value) == (b"tombstone", None)
        letters = await read_all(made, Topic.DEAD_LETTERS)
        assert [(letter.key, letter.value, letter.headers) for letter in letters] == [
            (None, b"no key", headers),
            (None, None, ()),
        ]


async def test_an_explicit_partition_that_does_not_exist_is_refused(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        with pytest.raises(ConfigurationError, match="has 1 partition, and a record belongs on number 4"):
            await (await made.producer()).send([token("a", partition=4)])


async def test_sending_needs_the_topic_and_creates_none(kafka_jars: object, unique_prefix: str) -> None:
    with LocalKafka(extra_properties={"auto.create.topics.enable": "true"}) as kafka:
        async with transport(kafka.bootstrap, unique_prefix, partitions=0) as made:
            producer = await made.producer()
            for _ in range(2):
                with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
                    await producer.send([token("a")])
            with pytest.raises(MissingTopicError):
                await made.reader(Topic.TRAJECTORIES)
            admin = await made._cluster.admin()
            assert made.names[Topic.TOKENS] not in await admin.list_topics()


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_are_read_back(
    kafka_bootstrap: str, unique_prefix: str, compression: str
) -> None:
    settings = SETTINGS.model_copy(update={"compression": compression})
    async with transport(kafka_bootstrap, unique_prefix, settings) as made:
        await (await made.producer()).send([token("a", "x" * 2_000_000)])
        records = await read_all(made, Topic.TOKENS)
        assert sum(len(record.value or b"") for record in records) == 2_000_000


async def test_a_reader_starts_where_it_is_told_and_ends_at_what_is_committed(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        producer = await made.producer()
        await producer.send([token(f"r{number}", partition=number % 2) for number in range(10)])
        reader = await made.reader(Topic.TOKENS, start={0: 3})
        records: list[InputRecord] = []
        while not await reader.at_end():
            records += await reader.poll(0.1, 2)
        assert sorted((record.partition, record.offset) for record in records) == [
            (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4),
        ]  # fmt: skip
        assert list(await reader.poll(0, 10)) == []
        await producer.send([token("later", partition=1)])
        assert not await reader.at_end()
        one = await made.reader(Topic.TOKENS, partitions=[1], start={1: 5})
        assert [record.key for record in await one.poll(5.0, 10)] == [b"later"]
        assert await one.at_end()


async def test_a_reader_sees_no_uncommitted_record(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member, lease = await owner(made, unique_prefix)
        await open_transaction(lease, [result("never")])
        reader = await made.reader(Topic.TRAJECTORIES)
        assert await reader.at_end()
        assert list(await reader.poll(0.2, 10)) == []
        lease._publisher.discard()
        again = await member.acquire(0)
        await again.publish([result("a")])
        assert [record.key for record in await read_count(made, Topic.TRAJECTORIES, 1)] == [b"a"]
