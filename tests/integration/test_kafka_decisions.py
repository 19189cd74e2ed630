"""A coordinator that decides and tells no partition, as Kafka 4.3 does to partitions without a leader after a crash: the next owner
tells them what was decided, and nothing is published twice, lost, or half."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka.conn import CloseReason
from aiokafka.structs import TopicPartition

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerUnavailableError, PublishError
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.client import Clients
from freezepoint.transport.kafka.lease import KafkaLease
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint.transport.kafka.publisher import Publisher
from freezepoint_schemas.topics import Topic
from tests.chaos.broker import ChaosBroker
from tests.chaos.proxy import END_TXN, Request, Verdict
from tests.integration.kafka_kit import (
    SETTINGS,
    assigned,
    join,
    owner,
    progress,
    read_all,
    result,
    transport,
)
from tests.polling import poll_until_async

PARTITIONS = 2
OWN = 0
PROMPTLY_S = 10.0
"""Well below what a transaction may take until it is given up."""
NOTED = [result(f"r{number}", "first") for number in range(20)]


@pytest.fixture(scope="module")
def careless_broker(kafka_jars: Path) -> Iterator[ChaosBroker]:
    """It takes records of a transaction for partitions that its coordinator knows nothing of, so that it will not tell them."""
    broker = ChaosBroker({"transaction.partition.verification.enable": "false"})
    with broker.kafka:
        yield broker


@pytest.fixture
async def made(careless_broker: ChaosBroker, unique_prefix: str) -> AsyncIterator[KafkaTransport]:
    async with transport(careless_broker.direct, unique_prefix, SETTINGS, PARTITIONS) as opened:
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


async def left_open(made: KafkaTransport, unique_prefix: str) -> KafkaMember:
    """A member whose lease was lost in a transaction that the coordinator will abort and tell nobody."""
    member, lease = await owner(made, unique_prefix, OWN)
    await lease.publish([result("r", "before"), progress("1", OWN)])
    await send_untold(lease, [*NOTED, progress("2", OWN)])
    lease._publisher.discard()
    return member


async def assert_aborted(made: KafkaTransport, lease: KafkaLease) -> None:
    """What was left open is nowhere, and what is published now is there."""
    assert [record.value for record in lease.ledger] == [b"1"]
    await lease.publish([*[result(f"{number}", "after") for number in range(20)], progress("3", OWN)])
    assert sorted(map(str, await values(made, Topic.TRAJECTORIES))) == sorted(
        [*[str(b"after")] * 20, str(b"before")]
    )
    await lease.close()


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
    member = await left_open(made, unique_prefix)
    await assert_aborted(made, await member.acquire(OWN))
    await member.leave()


async def test_what_was_aborted_is_aborted_everywhere_though_the_first_who_tries_fails(
    made: KafkaTransport, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a partition has no leader yet. The coordinator knows of no transaction any more once a producer has started."""
    member = await left_open(made, unique_prefix)

    async def unknown(_: Publisher) -> Any:
        raise BrokerUnavailableError("no leader yet")

    with monkeypatch.context() as failing:
        failing.setattr(Publisher, "_written", unknown)
        for _ in range(2):
            with pytest.raises(BrokerUnavailableError):
                await member.acquire(OWN)
    await assert_aborted(made, await member.acquire(OWN))
    await member.leave()


async def test_a_commit_that_overtakes_the_next_owner_is_a_commit_everywhere(
    made: KafkaTransport, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was open when it was asked for, and committed when it was fenced."""
    member, lease = await owner(made, unique_prefix, OWN)
    await send_untold(lease, [*NOTED, progress("2", OWN)])
    start, old = Clients.start, lease._publisher._producer

    async def overtaken(clients: Clients, client: Any, doing: str) -> None:
        if doing.startswith("starting the producer"):
            await old.commit_transaction()
        await start(clients, client, doing)

    monkeypatch.setattr(Clients, "start", overtaken)
    await take_over(made, member)


async def test_a_connection_that_breaks_before_the_mending_does_not_end_it(
    made: KafkaTransport, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await left_open(made, unique_prefix)
    written = Publisher._written

    async def cut_off_first(publisher: Publisher) -> Any:
        cut_off(publisher._producer)
        return await written(publisher)

    with monkeypatch.context() as cutting:
        cutting.setattr(Publisher, "_written", cut_off_first)
        async with asyncio.timeout(PROMPTLY_S):
            again = await member.acquire(OWN)
    await assert_aborted(made, again)
    await member.leave()


async def test_a_mending_whose_end_may_still_be_on_its_way_is_followed_by_a_new_producer(
    careless_broker: ChaosBroker, made: KafkaTransport, unique_prefix: str
) -> None:
    """Else it would end the first half of what is published next."""
    await (await left_open(made, unique_prefix)).leave()
    held = 0

    async def hold_the_first_end(request: Request) -> Verdict:
        nonlocal held
        held += request.api_key == END_TXN
        return Verdict.LATE if request.api_key == END_TXN and held == 1 else Verdict.PASS

    proxy = careless_broker.proxy()
    proxy.hook = hold_the_first_end
    async with proxy, transport(careless_broker.proxied, unique_prefix, SETTINGS, 0) as behind:
        member = await join(behind, unique_prefix)
        await assigned(member, set(range(PARTITIONS)))
        with pytest.raises(PublishError, match="while settling"):
            await member.acquire(OWN)
        assert held >= 2, "the client repeated it"
        await assert_aborted(made, await member.acquire(OWN))
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
