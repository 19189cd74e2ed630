"""What the tests of the Kafka transport share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.settings import KafkaSettings
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.lease import KafkaLease
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.polling import poll_until_async

GROUP = "workers"
SETTINGS = KafkaSettings(session_timeout_ms=6_000, heartbeat_interval_ms=300, request_timeout_ms=10_000)
FAST = SETTINGS.model_copy(update={"request_timeout_ms": 1_000, "transaction_timeout_ms": 5_000})
JOIN_S = 20.0


def varied(**given: Any) -> KafkaSettings:
    """``SETTINGS`` but for what is given."""
    return KafkaSettings.model_validate(SETTINGS.model_dump() | given)


def environment(settings: KafkaSettings) -> dict[str, str]:
    """The variables of what differs from the defaults."""
    return {
        f"FREEZEPOINT_KAFKA__{name.upper()}": value.get_secret_value()
        if hasattr(value, "get_secret_value")
        else str(value)
        for name, value in settings
        if value != KafkaSettings.model_fields[name].default
    }


def worker_variables(address: str, prefix: str, settings: KafkaSettings) -> dict[str, str]:
    """A worker's environment: topics that begin with the prefix and a dot, and a group that is named after it."""
    return {
        "FREEZEPOINT_BROKER": f"kafka://{address}",
        "FREEZEPOINT_TOPIC_PREFIX": f"{prefix}.",
        "FREEZEPOINT_WORKER__GROUP": f"{prefix}-workers",
        **environment(settings),
    }


def progress(text: str, partition: int = 0) -> OutputRecord:
    return OutputRecord(Topic.LEDGER, b"!progress", text.encode(), (), partition)


def result(key: str, text: str = "result") -> OutputRecord:
    return OutputRecord(Topic.TRAJECTORIES, key.encode(), text.encode())


def token(key: str, text: str = "token", partition: int | None = None) -> OutputRecord:
    return OutputRecord(Topic.TOKENS, key.encode(), text.encode(), (), partition)


@asynccontextmanager
async def transport(
    bootstrap: str, prefix: str, settings: KafkaSettings = SETTINGS, partitions: int = 1
) -> AsyncIterator[KafkaTransport]:
    """A transport whose topics exist; ``partitions=0`` creates none."""
    names = TopicNames(prefix + "-")
    async with KafkaTransport(bootstrap, names, settings) as made:
        if partitions:
            findings = await made.admin().apply(topic_specs(names, partitions))
            assert all(finding.ok for finding in findings), findings
        yield made


def group_of(prefix: str) -> str:
    return f"{prefix}-{GROUP}"


async def join(made: KafkaTransport, prefix: str) -> KafkaMember:
    return await made.join(group_of(prefix))


async def assigned(member: KafkaMember, partitions: set[int], timeout_s: float = JOIN_S) -> int:
    """Poll until exactly these partitions are assigned; the generation that assigned them."""

    async def settled() -> int:
        poll = await member.poll(0.1, 100)
        return poll.generation if poll.assigned == partitions else 0

    return await poll_until_async(settled, timeout_s, f"assigned {partitions}")


async def owner(made: KafkaTransport, prefix: str, partition: int = 0) -> tuple[KafkaMember, KafkaLease]:
    member = await join(made, prefix)
    count = await made.admin().partitions(Topic.TOKENS)
    await assigned(member, set(range(count)))
    return member, await member.acquire(partition)


async def read_all(made: KafkaTransport, topic: Topic) -> list[InputRecord]:
    """Everything that is committed by now."""
    reader = await made.reader(topic)
    records: list[InputRecord] = []
    try:
        while not await reader.at_end():
            records += await reader.poll(0.1, 1_000)
    finally:
        await reader.close()
    return records


async def read_count(made: KafkaTransport, topic: Topic, count: int) -> list[InputRecord]:
    """Everything, once it is so much: a commit returns when it is decided, and its markers are written after that."""
    records: list[InputRecord] = []

    async def enough() -> bool:
        records[:] = await read_all(made, topic)
        return len(records) >= count

    await poll_until_async(enough, JOIN_S, f"{count} records in {topic}")
    return records


async def receive(
    member: KafkaMember, count: int, partition: int = 0, timeout_s: float = JOIN_S
) -> list[InputRecord]:
    """Poll until that many records of the partition came."""
    records: list[InputRecord] = []

    async def enough() -> bool:
        poll = await member.poll(0.1, 100)
        records.extend(poll.records.get(partition, ()))
        return len(records) >= count

    await poll_until_async(enough, timeout_s, f"{count} records")
    return records


async def leave_group_silently(member: KafkaMember) -> None:
    """The member's consumer is gone, as after a crash, but its producers are not."""
    await member._intake.close()


async def open_transaction(lease: KafkaLease, records: Sequence[OutputRecord]) -> None:
    """Send records in a transaction and leave it open, as a process does that stops in the middle."""
    producer = lease._publisher._producer
    await producer.begin_transaction()
    for record in records:
        name = lease._cluster.names[record.topic]
        await producer.send_and_wait(name, record.value, record.key, partition=record.partition)


async def set_config(made: KafkaTransport, topic: Topic, values: dict[str, str]) -> None:
    """Set, and wait until the broker shows it; its log may follow a moment later."""
    await made.admin()._set(made.names[topic], values)


async def config(made: KafkaTransport, topic: Topic) -> dict[str, str]:
    name = made.names[topic]
    return (await made._cluster.configs([name]))[name]


async def recreate(made: KafkaTransport, topic: Topic, partitions: int = 1) -> None:
    """Delete a topic, and create one with its name."""
    admin, client = made.admin(), await made._cluster.admin()
    await client.delete_topics([made.names[topic]])

    async def gone() -> bool:
        return await admin.identity(topic) is None

    await poll_until_async(gone, 30.0, "the topic is deleted")
    await admin.apply(topic_specs(made.names, partitions))


async def cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
