"""A coordinator that decides and tells no partition, as Kafka 4.3 does to partitions without a leader after a crash: the next owner
tells them what was decided, and nothing is published twice, lost, or half."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka.conn import CloseReason
from aiokafka.structs import TopicPartition

from freezepoint.core.records import OutputRecord
from freezepoint.errors import PublishError
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.lease import KafkaLease
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint_schemas.topics import Topic
from kafka_local import LocalKafka
from tests.integration.kafka_kit import SETTINGS, owner, progress, read_all, result, transport
from tests.polling import poll_until_async

PARTITIONS = 2
OWN = 0
NOTED = [result(f"r{number}", "first") for number in range(20)]


@pytest.fixture(scope="module")
def careless_broker(kafka_jars: Path) -> Iterator[str]:
    """It takes records of a transaction for partitions that its coordinator knows nothing of, so that it will not tell them."""
    with LocalKafka(extra_properties={"transaction.partition.verification.enable": "false"}) as kafka:
        yield kafka.bootstrap


@pytest.fixture
async def made(careless_broker: str, unique_prefix: str) -> AsyncIterator[KafkaTransport]:
    async with transport(careless_broker, unique_prefix, SETTINGS, PARTITIONS) as opened:
        yield opened


async def send_untold(lease: KafkaLease, records: Sequence[OutputRecord]) -> None:
    """Send in a transaction of which the coordinator knows one partition only, which holds no record of it."""
    producer, names = lease._publisher._producer, lease._cluster.names
    await producer.begin_transaction()
    manager = producer._txn_manager
    manager.maybe_add_partition_to_txn(TopicPartition(names[Topic.DEAD_LETTERS], PARTITIONS - 1))
    for topic in (Topic.TRAJECTORIES, Topic.LEDGER):
        manager._txn_partitions.update(TopicPartition(names[topic], number) for number in range(PARTITIONS))
    for record in records:
        partition = record.partition if record.partition is not None else len(record.key or b"") % PARTITIONS
        await producer.send_and_wait(names[record.topic], record.value, record.key, partition=partition)

    async def is_begun() -> bool:
        return not manager.partitions_to_add()

    await poll_until_async(is_begun, 10.0, "the coordinator knows of the transaction")


async def values(made: KafkaTransport, topic: Topic) -> list[bytes | None]:
    return [record.value for record in await read_all(made, topic)]


def cut_off(producer: Any) -> None:
    for connection in list(producer.client._conns.values()):
        connection.close(reason=CloseReason.CONNECTION_BROKEN)


async def take_over(made: KafkaTransport, member: KafkaMember) -> None:
    """What was committed without being told is there, and nothing else."""
    again = await member.acquire(OWN)
    assert [record.value for record in again.ledger] == [b"2"]
    assert await values(made, Topic.TRAJECTORIES) == [b"first"] * 20
    await again.close()
    await member.leave()


async def test_what_was_committed_is_committed_everywhere(made: KafkaTransport, unique_prefix: str) -> None:
    member, lease = await owner(made, unique_prefix, OWN)
    await lease.publish([result("r", "before"), progress("1", OWN)])
    await send_untold(lease, [*NOTED, progress("2", OWN)])
    await lease._publisher._producer.commit_transaction()
    assert await values(made, Topic.LEDGER) == [b"1"]
    lease._publisher.discard()
    again = await member.acquire(OWN)
    assert [record.value for record in again.ledger] == [b"2"]
    assert sorted(map(str, await values(made, Topic.TRAJECTORIES))) == sorted(
        [str(b"before"), *[str(b"first")] * 20]
    )
    await again.publish([result("r", "after"), progress("3", OWN)])
    await again.close()
    await member.leave()


async def test_what_was_aborted_is_aborted_everywhere(made: KafkaTransport, unique_prefix: str) -> None:
    member, lease = await owner(made, unique_prefix, OWN)
    await lease.publish([result("r", "before"), progress("1", OWN)])
    await send_untold(lease, [*NOTED, progress("2", OWN)])
    lease._publisher.discard()
    again = await member.acquire(OWN)
    assert [record.value for record in again.ledger] == [b"1"]
    await again.publish([*[result(f"{number}", "after") for number in range(20)], progress("3", OWN)])
    assert sorted(map(str, await values(made, Topic.TRAJECTORIES))) == sorted(
        [*[str(b"after")] * 20, str(b"before")]
    )
    await again.close()
    await member.leave()


async def test_a_producer_that_was_cut_off_begins_no_transaction_behind_an_undecided_one(
    made: KafkaTransport, unique_prefix: str
) -> None:
    """Its abort would undo what was committed."""
    member, lease = await owner(made, unique_prefix, OWN)
    await send_untold(lease, [*NOTED, progress("2", OWN)])
    producer = lease._publisher._producer
    await producer.commit_transaction()
    cut_off(producer)
    with pytest.raises(PublishError, match="left undecided"):
        await lease.publish([result("r", "next"), progress("3", OWN)])
    await take_over(made, member)


async def test_a_transaction_that_is_cut_off_as_it_begins_is_given_up(
    made: KafkaTransport, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client does by itself is to begin it again on a new connection."""
    member, lease = await owner(made, unique_prefix, OWN)
    await send_untold(lease, [*NOTED, progress("2", OWN)])
    producer = lease._publisher._producer
    await producer.commit_transaction()
    begin = producer.begin_transaction

    async def begun_and_cut_off() -> None:
        await begin()
        cut_off(producer)

    monkeypatch.setattr(producer, "begin_transaction", begun_and_cut_off)
    with pytest.raises(PublishError, match="while publishing"):
        await lease.publish([result("r", "next"), progress("3", OWN)])
    await take_over(made, member)


async def test_a_producer_that_was_cut_off_goes_on_where_all_is_decided(
    made: KafkaTransport, unique_prefix: str
) -> None:
    member, lease = await owner(made, unique_prefix, OWN)
    await lease.publish([result("r", "one"), progress("1", OWN)])
    cut_off(lease._publisher._producer)
    await lease.publish([result("r", "two"), progress("2", OWN)])
    assert await values(made, Topic.TRAJECTORIES) == [b"one", b"two"]
    await lease.close()
    await member.leave()
