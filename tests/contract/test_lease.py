"""Exclusive, atomic publication under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import (
    FencedError,
    FreezepointError,
    OwnershipLostError,
    PublishError,
    RecordTooLargeError,
)
from freezepoint.transport.ports import Transport
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.topics import Topic
from tests.contract.driving import (
    PARTITIONS,
    Cluster,
    acquire,
    drive,
    own_all,
    read_all,
    read_until,
    share,
    token,
)

LIMIT = 4_096
OUTPUT = (Topic.TRAJECTORIES, Topic.LEDGER, Topic.DEAD_LETTERS)


def result(key: bytes, value: bytes, partition: int | None = None) -> OutputRecord:
    return OutputRecord(Topic.TRAJECTORIES, key, value, partition=partition)


def ledger(key: bytes, value: bytes | None, partition: int) -> OutputRecord:
    return OutputRecord(Topic.LEDGER, key, value, partition=partition)


def one_to_each(value: bytes) -> list[OutputRecord]:
    return [OutputRecord(topic, b"r-%d" % number, value) for topic in OUTPUT for number in range(8)]


async def values(transport: Transport, topic: Topic) -> list[bytes | None]:
    return [record.value for record in await read_all(transport, topic)]


async def assert_nothing_but(transport: Transport, published: Sequence[bytes]) -> None:
    """No topic holds a record with any other value."""
    for topic in OUTPUT:
        assert set(await values(transport, topic)) <= set(published)


async def test_a_publication_reaches_all_its_topics_and_partitions(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await cluster.member(transport)
    await share([member])
    lease = await acquire(member, 0)
    await lease.publish(one_to_each(b"v"))
    for topic in OUTPUT:
        records = await read_until(cluster.transport(), topic, 8)
        assert sorted(record.key or b"" for record in records) == [b"r-%d" % number for number in range(8)]


async def test_publications_keep_their_order(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await cluster.member(transport)
    await share([member])
    lease = await acquire(member, 0)
    for number in range(10):
        await lease.publish([result(b"r", b"%d-%d" % (number, index)) for index in range(3)])
    records = await read_until(transport, Topic.TRAJECTORIES, 30)
    assert [record.value for record in records] == [b"%d-%d" % (n, i) for n in range(10) for i in range(3)]


async def test_a_result_above_the_limit_is_split(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1, record_bytes_max=LIMIT)
    member = await cluster.member(transport)
    await share([member], 1)
    lease = await acquire(member, 0)
    large = bytes(range(256)) * 100
    await lease.publish([result(b"r", large)])
    assembler = PartAssembler(len(large))
    joined = []
    for record in await read_until(transport, Topic.TRAJECTORIES, len(large) // LIMIT):
        part = header(record.headers, PART)
        assert part is not None
        joined.append(assembler.add(PartHeader.parse(part), record.value or b"", record.offset))
    assert joined[-1] == large


async def test_a_failed_publication_leaves_nothing_and_ends_the_lease(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await cluster.member(transport)
    await share([member])
    lease = await acquire(member, 0)
    with pytest.raises(FreezepointError):
        await lease.publish([*one_to_each(b"lost"), result(b"r", b"lost", partition=99)])
    with pytest.raises(PublishError):
        await lease.publish(one_to_each(b"lost"))
    again = await acquire(member, 0)
    await again.publish(one_to_each(b"kept"))
    for topic in OUTPUT:
        await read_until(transport, topic, 8)
    await assert_nothing_but(transport, [b"kept"])


async def test_a_record_too_large_publishes_nothing(cluster: Cluster) -> None:
    transport = await cluster.with_topics(record_bytes_max=LIMIT)
    member = await cluster.member(transport)
    await share([member])
    lease = await acquire(member, 0)
    with pytest.raises(RecordTooLargeError):
        await lease.publish([*one_to_each(b"lost"), result(b"k" * LIMIT, b"v" * LIMIT)])
    await (await acquire(member, 0)).publish(one_to_each(b"kept"))
    for topic in OUTPUT:
        await read_until(transport, topic, 8)
    await assert_nothing_but(transport, [b"kept"])


async def test_a_cancelled_publication_is_whole_or_absent_and_the_next_owner_knows(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await cluster.member(transport)
    await share([member])
    counts = []
    for number in range(1, 7):
        lease = await acquire(member, 0)
        batch = [ledger(b"%d-%d" % (number, index), b"v", 0) for index in range(50)]
        publishing = asyncio.create_task(lease.publish(batch))
        for _ in range(number):
            await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait([publishing])
        with pytest.raises(PublishError):
            await lease.publish([result(b"r", b"after")])
        keys = {record.key for record in (await acquire(member, 0)).ledger}
        counts.append(len([key for key in keys if key and key.startswith(b"%d-" % number)]))
    assert set(counts) <= {0, 50}


async def test_a_new_owner_fences_the_old_one(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    member = await cluster.member(transport)
    await share([member], 1)
    old = await acquire(member, 0)
    await old.publish(one_to_each(b"old"))
    new = await acquire(member, 0)
    with pytest.raises(FencedError):
        await old.publish(one_to_each(b"zombie"))
    with pytest.raises(PublishError):
        await old.publish(one_to_each(b"zombie"))
    await new.publish(one_to_each(b"new"))
    for topic in OUTPUT:
        await read_until(transport, topic, 16 if topic is not Topic.LEDGER else 8)
    await assert_nothing_but(transport, [b"old", b"new"])


async def test_another_member_that_takes_over_fences_the_old_owner(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    first = await cluster.member(transport)
    leases = await own_all(first, 2)
    second = await cluster.member()
    await share([first, second], 2)
    (moved,) = second.assigned
    taken = await acquire(second, moved, first)
    with pytest.raises(FencedError):
        await leases[moved].publish([result(b"r", b"zombie")])
    await taken.publish([result(b"r", b"owner")])
    (kept,) = first.assigned
    await leases[kept].publish([result(b"r", b"kept")])
    records = await read_until(transport, Topic.TRAJECTORIES, 2)
    assert sorted(record.value or b"" for record in records) == [b"kept", b"owner"]


async def test_partitions_are_fenced_one_by_one(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await cluster.member(transport)
    leases = await own_all(member)
    await acquire(member, 1)
    for partition in (0, 2, 3):
        await leases[partition].publish([result(b"r", b"v")])
    with pytest.raises(FencedError):
        await leases[1].publish([result(b"r", b"v")])
    assert len(await read_until(transport, Topic.TRAJECTORIES, 3)) == 3


async def test_the_ledger_is_read_to_its_end_with_the_latest_record_of_each_key(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    member = await cluster.member(transport)
    await share([member])
    lease = await acquire(member, 2)
    assert list(lease.ledger) == []
    await lease.publish([ledger(b"a", b"1", 2), ledger(b"b", b"1", 2), ledger(b"a", b"2", 2)])
    await lease.publish([ledger(b"!progress", b"p", 2), ledger(b"b", b"3", 2), ledger(b"c", b"3", 2)])
    await lease.publish([ledger(b"elsewhere", b"1", 1)])
    found = (await acquire(member, 2)).ledger
    assert {record.key: record.value for record in found} == {
        b"a": b"2",
        b"b": b"3",
        b"c": b"3",
        b"!progress": b"p",
    }
    assert len(found) == 4
    assert {record.partition for record in found} == {2}


async def test_what_the_predecessor_published_last_is_in_the_ledger(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    member = await cluster.member(transport)
    await share([member], 1)
    for number in range(5):
        lease = await acquire(member, 0)
        assert [record.value for record in lease.ledger] == ([] if not number else [b"%d" % (number - 1)])
        await lease.publish([ledger(b"r", b"%d" % number, 0)])


async def test_renewed_after_the_partition_stayed_through_a_rebalance(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    producer = await transport.producer()
    await producer.send([token(b"r", b"%d" % p, partition=p) for p in range(2)])
    first = await cluster.member(transport)
    leases = await own_all(first, 2)
    await drive([first], lambda: len(first.records) == 2, "both records")
    second = await cluster.member()
    await share([first, second], 2)
    (kept,) = first.assigned
    await leases[kept].renew(first.generation, 0, [ledger(b"!progress", b"renewed", kept)])
    first.records.clear()
    await drive([first, second], lambda: bool(first.records), "delivery from the renewed offset on")
    assert first.values == [b"%d" % kept]
    (record,) = await read_until(transport, Topic.LEDGER, 1)
    assert (record.partition, record.value) == (kept, b"renewed")


async def test_without_renewal_nothing_is_delivered_after_a_rebalance(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    first = await cluster.member(transport)
    await own_all(first, 2)
    second = await cluster.member()
    await share([first, second], 2)
    await (await transport.producer()).send([token(b"r", b"v", partition=p) for p in range(2)])
    for _ in range(5):
        await asyncio.gather(first.poll(), second.poll())
    assert not first.records
    assert not second.records


async def test_renewed_after_it_went_to_somebody_who_never_took_it(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    first = await cluster.member(transport)
    leases = await own_all(first, 2)
    second = await cluster.member()
    await share([first, second], 2)
    (moved,) = second.assigned
    await second.member.leave()
    await share([first], 2)
    await leases[moved].renew(first.generation, 0, [ledger(b"!progress", b"renewed", moved)])
    await leases[moved].publish([result(b"r", b"v")])
    assert len(await read_until(transport, Topic.TRAJECTORIES, 1)) == 1


async def test_not_renewed_after_somebody_owned_it_in_between(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    first = await cluster.member(transport)
    leases = await own_all(first, 2)
    second = await cluster.member()
    await share([first, second], 2)
    (moved,) = second.assigned
    await acquire(second, moved, first)
    await second.member.leave()
    await share([first], 2)
    with pytest.raises(FencedError):
        await leases[moved].renew(first.generation, 0, [ledger(b"!progress", b"zombie", moved)])
    assert await values(transport, Topic.LEDGER) == []


async def test_not_renewed_in_a_generation_that_has_passed(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    first = await cluster.member(transport)
    leases = await own_all(first, 2)
    passed = first.generation
    second = await cluster.member()
    await share([first, second], 2)
    (kept,) = first.assigned
    with pytest.raises(OwnershipLostError):
        await leases[kept].renew(passed, 0, [ledger(b"!progress", b"zombie", kept)])


async def test_a_closed_lease_delivers_and_publishes_nothing(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    member = await cluster.member(transport)
    leases = await own_all(member, 2)
    await leases[0].publish([result(b"r", b"before")])
    await leases[0].close()
    await leases[0].close()
    with pytest.raises(PublishError):
        await leases[0].publish([result(b"r", b"after")])
    await (await transport.producer()).send([token(b"r", b"%d" % p, partition=p) for p in range(2)])
    await drive([member], lambda: bool(member.records), "the other partition's record")
    await member.poll()
    assert member.values == [b"1"]
    assert [r.value for r in await read_until(transport, Topic.TRAJECTORIES, 1)] == [b"before"]


async def test_partition_count_is_the_tokens_topics(cluster: Cluster) -> None:
    member = await cluster.member(await cluster.with_topics())
    await share([member])
    assert (await acquire(member, 3)).partition_count == PARTITIONS
