"""Membership: who has which partition, and what a member's polls deliver."""

from __future__ import annotations

import asyncio

import pytest

from freezepoint.errors import (
    FencedError,
    FreezepointError,
    MissingTopicError,
    OwnershipLostError,
    PublishError,
)
from freezepoint.transport.ports import GroupOffset
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from tests.contract.driving import (
    PARTITIONS,
    Cluster,
    acquire,
    deadline,
    drive,
    key_of,
    own_all,
    read_all,
    share,
    token,
)
from tests.contract.processes import MemberProcess


async def test_the_only_member_gets_every_partition(cluster: Cluster) -> None:
    member = await cluster.member(await cluster.with_topics())
    await share([member])
    assert member.assigned == frozenset(range(PARTITIONS))
    assert member.generation > 0


async def test_records_come_from_started_leases_only_and_from_the_offset_on(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    for partition in range(PARTITIONS):
        await producer.send([token(b"r", b"%d-%d" % (partition, n), partition=partition) for n in range(5)])
    member = await cluster.member(transport)
    await share([member])
    first, second = await acquire(member, 0), await acquire(member, 1)
    assert (first.partition, first.partition_count) == (0, PARTITIONS)
    assert (first.log_start, first.log_end) == (0, 5)
    await member.poll()
    assert not member.records
    await first.start(0)
    await second.start(3)
    await drive([member], lambda: len(member.records) >= 7, "seven records")
    await member.poll()
    by_partition = {p: [r.value for r in member.records if r.partition == p] for p in range(PARTITIONS)}
    assert by_partition == {0: [b"0-%d" % n for n in range(5)], 1: [b"1-3", b"1-4"], 2: [], 3: []}


async def test_a_lease_can_be_started_anew_at_another_offset(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await (await transport.producer()).send([token(b"r", b"%d" % n) for n in range(4)])
    member = await cluster.member(transport)
    leases = await own_all(member, 1)
    await drive([member], lambda: len(member.records) >= 4, "four records")
    member.records.clear()
    await leases[0].start(2)
    await drive([member], lambda: len(member.records) >= 2, "two records again")
    assert member.values == [b"2", b"3"]


async def test_a_poll_returns_no_more_than_asked_of_all_partitions_together(cluster: Cluster) -> None:
    transport = await cluster.with_topics()
    producer = await transport.producer()
    await producer.send([token(b"r", b"v", partition=0) for _ in range(100)])
    await producer.send([token(b"r", b"v", partition=partition) for partition in range(1, PARTITIONS)])
    member = await cluster.member(transport)
    await own_all(member)
    in_time = deadline()
    counts = dict.fromkeys(range(PARTITIONS), 0)
    while sum(counts.values()) < 103:
        polled = await member.member.poll(0.1, 20)
        assert sum(map(len, polled.records.values())) <= 20
        for partition, records in polled.records.items():
            counts[partition] += len(records)
        assert in_time(), counts
    assert counts == {0: 100, 1: 1, 2: 1, 3: 1}


async def test_a_waiting_poll_returns_soon_after_a_record_came(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    producer = await transport.producer()
    member = await cluster.member(transport)
    await own_all(member, 1)
    await member.poll()
    waiting = asyncio.create_task(member.member.poll(60, 10))
    await producer.send([token(b"r", b"v")])
    async with asyncio.timeout(30):
        polled = await waiting
    assert [record.value for record in polled.records[0]] == [b"v"]


async def test_pause_holds_back_and_resume_goes_on_where_it_was(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    producer = await transport.producer()
    member = await cluster.member(transport)
    leases = await own_all(member, 2)
    leases[0].pause()
    await producer.send([token(b"r", b"%d" % p, partition=p) for p in range(2)])
    await drive([member], lambda: b"1" in member.values, "the other partition's record")
    for _ in range(3):
        await member.poll()
    assert member.values == [b"1"]
    leases[0].resume()
    await drive([member], lambda: b"0" in member.values, "the held record")
    assert member.values == [b"1", b"0"]


async def test_caught_up_means_delivered(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    producer = await transport.producer()
    await producer.send([token(b"r", b"1")])
    member = await cluster.member(transport)
    lease = (await own_all(member, 1))[0]
    await drive([member], lambda: bool(member.records), "the record")
    assert await lease.caught_up()
    assert (await lease.first(), await lease.end()) == (0, 1)
    await producer.send([token(b"r", b"2")])
    assert not await lease.caught_up()
    assert (await lease.end(), lease.log_end) == (2, 1)
    await drive([member], lambda: len(member.records) == 2, "the second record")
    assert await lease.caught_up()


async def test_record_at(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    await (await transport.producer()).send(
        [token(b"r", b"%d" % n, headers=(("h", b"x"),)) for n in range(3)]
    )
    member = await cluster.member(transport)
    lease = (await own_all(member, 1))[0]
    record = await lease.record_at(1)
    assert record is not None
    assert (record.offset, record.value, record.headers) == (1, b"1", (("h", b"x"),))
    assert await lease.record_at(3) is None
    await drive([member], lambda: len(member.records) == 3, "all three, undisturbed")
    assert member.records[1] == record


async def test_two_share_and_a_third_gets_its_part(cluster: Cluster) -> None:
    members = [await cluster.member(await cluster.with_topics())]
    for count in (2, 3):
        members.append(await cluster.member())
        await share(members)
        assert len(members) == count


async def test_one_too_many_stands_by_and_takes_over(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    members = [await cluster.member(transport), await cluster.member(), await cluster.member()]
    await share(members, partitions=2)
    (standby,) = [member for member in members if not member.assigned]
    leaving = next(member for member in members if member.assigned)
    await leaving.member.leave()
    staying = [member for member in members if member is not leaving]
    await share(staying, partitions=2)
    assert standby.assigned


async def test_the_one_that_takes_over_goes_on_with_what_was_left(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    producer = await transport.producer()
    await producer.send([token(b"r", b"%d" % n) for n in range(4)])
    leaving = await cluster.member(transport)
    lease = (await own_all(leaving, 1))[0]
    await drive([leaving], lambda: len(leaving.records) == 4, "all records")
    await lease.commit_hint(3, 4)
    await leaving.member.leave()
    taking = await cluster.member()
    await share([taking], 1)
    taken = await acquire(taking, 0)
    assert taken.committed == 3
    await taken.start(taken.committed)
    await drive([taking], lambda: bool(taking.records), "the rest")
    assert taking.values == [b"3"]


async def test_no_offset_is_committed_at_first(cluster: Cluster) -> None:
    member = await cluster.member(await cluster.with_topics(partitions=1))
    assert (await own_all(member, 1))[0].committed is None


@pytest.mark.parametrize("offset", [0, 5])
async def test_the_next_acquisition_sees_the_committed_offset(cluster: Cluster, offset: int) -> None:
    member = await cluster.member(await cluster.with_topics(partitions=1))
    lease = (await own_all(member, 1))[0]
    await lease.commit_hint(offset, offset + 7)
    again = await acquire(member, 0)
    assert (again.committed, again.recorded) == (offset, offset + 7)


async def test_a_proof_of_ownership_changes_nothing_of_what_is_said_of_the_ledger(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    member = await cluster.member(transport)
    await own_all(member, 1)
    again = await acquire(member, 0)
    assert again.recorded is None
    await again.start(0)
    await again.commit_hint(0, 5)
    for _ in range(2):
        taken = await acquire(member, 0)
        assert (taken.committed, taken.recorded) == (0, 5)
    assert await transport.offsets(cluster.group) == {0: GroupOffset(0, 5)}
    assert await transport.offsets("nobody") == {}


async def test_groups_do_not_share_offsets_or_partitions(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    member = await cluster.member(transport)
    await (await own_all(member, 1))[0].commit_hint(1, 1)
    cluster.group += "-other"
    other = await cluster.member()
    await drive(
        [member, other], lambda: bool(member.assigned and other.assigned), "one partition in each group"
    )
    assert (await acquire(other, 0, member)).committed is None


async def test_what_is_not_assigned_cannot_be_acquired(cluster: Cluster) -> None:
    members = [await cluster.member(await cluster.with_topics(partitions=2)), await cluster.member()]
    await share(members, partitions=2)
    (foreign,) = members[1].assigned
    with pytest.raises(OwnershipLostError):
        await members[0].member.acquire(foreign)


async def test_what_was_assigned_elsewhere_meanwhile_cannot_be_acquired(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    late = await cluster.member(transport)
    await share([late], partitions=2)
    other = await cluster.member()
    await drive([other], lambda: bool(other.assigned), "the newcomer's share, while the first is not polled")
    (moved,) = other.assigned
    with pytest.raises(OwnershipLostError):
        await late.member.acquire(moved)
    lease = await acquire(other, moved, late)
    await lease.publish([token(b"r", b"published by its owner")])
    assert [record.value for record in await read_all(transport, Topic.TOKENS)] == [b"published by its owner"]


async def test_a_member_that_left_polls_no_more(cluster: Cluster) -> None:
    member = await cluster.member(await cluster.with_topics(partitions=1))
    lease = (await own_all(member, 1))[0]
    await member.member.leave()
    with pytest.raises(FreezepointError):
        await member.member.poll(0.1, 1)
    with pytest.raises(FreezepointError):
        await member.member.acquire(0)
    with pytest.raises(PublishError):
        await lease.publish([token(b"r", b"v")])


async def test_leaving_twice_is_no_error(cluster: Cluster) -> None:
    member = await cluster.member(await cluster.with_topics(partitions=1))
    await member.member.leave()
    await member.member.leave()


async def test_a_member_needs_the_topic(cluster: Cluster) -> None:
    transport = cluster.transport()
    await transport.admin().apply(topic_specs(TopicNames(f"{cluster.names.prefix}others."), 1))
    with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
        await (await transport.join(cluster.group)).poll(0.1, 1)


@pytest.mark.slow
async def test_the_partitions_of_a_killed_process_are_taken_over(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=2)
    async with MemberProcess.started(cluster) as process:
        await process.until_owning(2)
        assert await process.publish(0, "by the first") == "published"
        survivor = await cluster.member(transport)
        await drive([survivor], lambda: len(survivor.assigned) == 1, "the survivor's half")
        process.kill()
        await share([survivor], partitions=2)
        for partition in range(2):
            lease = await acquire(survivor, partition)
            await lease.publish([token(key_of(partition, 2), b"by the second")])
    values = [record.value for record in await read_all(transport, Topic.TOKENS)]
    assert sorted(values, key=str) == [b"by the first", b"by the second", b"by the second"]


@pytest.mark.slow
async def test_a_process_stopped_past_its_session_is_fenced_when_it_wakes(cluster: Cluster) -> None:
    transport = await cluster.with_topics(partitions=1)
    async with MemberProcess.started(cluster) as process:
        await process.until_owning(1)
        process.stop()
        successor = await cluster.member(transport)
        await share([successor], partitions=1)
        lease = await acquire(successor, 0)
        await lease.publish([token(b"r", b"by the owner")])
        process.wake()
        assert await process.publish(0, "by the zombie") == FencedError.__name__
        assert [record.value for record in await read_all(transport, Topic.TOKENS)] == [b"by the owner"]
