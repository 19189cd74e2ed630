"""The broker every other integration test relies on does what they rely on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kafka_local import LocalKafka


async def create_topic(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
        assert [code for _topic, code, *_rest in answer.topic_errors] == [0]
    finally:
        await admin.close()


@asynccontextmanager
async def transactional_producer(bootstrap: str, transactional_id: str) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=transactional_id)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def commit_one(bootstrap: str, topic: str, value: bytes) -> None:
    async with transactional_producer(bootstrap, f"{topic}.producer") as producer, producer.transaction():
        await producer.send_and_wait(topic, value)


async def committed_values(bootstrap: str, topic: str) -> list[bytes | None]:
    """Every committed record of partition 0, up to the end offset of this moment."""
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
    )
    await consumer.start()
    try:
        consumer.assign([partition])
        consumer.seek(partition, 0)
        end = (await consumer.end_offsets([partition]))[partition]
        values: list[bytes | None] = []
        async with asyncio.timeout(30):
            # Up to the position, not the count: transaction markers take offsets too.
            while await consumer.position(partition) < end:
                batches = await consumer.getmany(partition, timeout_ms=200)
                values += [record.value for records in batches.values() for record in records]
        return values
    finally:
        await consumer.stop()


async def test_read_committed_sees_the_committed_transaction_only(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    topic = f"{unique_prefix}.results"
    await create_topic(kafka_bootstrap, topic)
    async with transactional_producer(kafka_bootstrap, f"{unique_prefix}.producer") as producer:
        async with producer.transaction():
            await producer.send_and_wait(topic, b"committed", key=b"rollout-1")
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted", key=b"rollout-1")
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"committed too", key=b"rollout-1")

    assert await committed_values(kafka_bootstrap, topic) == [b"committed", b"committed too"]


async def test_kill_and_restart_keep_records_and_address(local_kafka: LocalKafka, unique_prefix: str) -> None:
    topic, bootstrap, first_pid = f"{unique_prefix}.tokens", local_kafka.bootstrap, local_kafka.pid
    await create_topic(bootstrap, topic)
    await commit_one(bootstrap, topic, b"before the crash")

    local_kafka.kill()
    # A pool thread that ends before the broker must not take the broker with it.
    await asyncio.to_thread(local_kafka.restart)

    assert local_kafka.bootstrap == bootstrap
    assert local_kafka.pid not in {None, first_pid}
    await commit_one(bootstrap, topic, b"after the crash")
    assert await committed_values(bootstrap, topic) == [b"before the crash", b"after the crash"]
