"""Ownership and atomic publication, against a real broker."""

import asyncio
from collections.abc import Mapping
from itertools import pairwise

import pytest
from aiokafka.errors import ProducerFenced
from aiokafka.protocol.group import LeaveGroupRequest

from freezepoint.core.records import OutputRecord
from freezepoint.errors import (
    ConfigurationError,
    FencedError,
    MissingTopicError,
    OwnershipLostError,
    PublishError,
    RecordTooLargeError,
)
from freezepoint.transport.kafka.lease import KafkaLease
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.topics import Topic
from tests.integration.kafka_kit import (
    FAST,
    JOIN_S,
    assigned,
    cancel,
    config,
    group_of,
    join,
    leave_group_silently,
    open_transaction,
    owner,
    progress,
    read_all,
    read_count,
    receive,
    result,
    set_config,
    token,
    transport,
)
from tests.polling import poll_until_async

SLEEPY = FAST.model_copy(update={"heartbeat_interval_ms": 60_000, "request_timeout_ms": 10_000})
"""Heartbeats so rare that an evicted member learns nothing before it tries something."""


async def evict(member: KafkaMember, group: str) -> None:
    """Make the broker drop a member without telling it, as when its session ran out while it slept."""
    coordinator = member._intake._consumer._coordinator
    request = LeaveGroupRequest(group, coordinator.member_id)
    response = await coordinator._client.send(coordinator.coordinator_id, request)
    assert response.error_code == 0


async def test_an_open_transaction_of_a_predecessor_is_aborted_and_never_visible(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with (
        transport(kafka_bootstrap, unique_prefix) as first,
        transport(kafka_bootstrap, unique_prefix, partitions=0) as second,
    ):
        zombie, lease = await owner(first, unique_prefix)
        await lease.publish([result("a", "committed"), progress("1")])
        await open_transaction(lease, [result("b", "never"), progress("2")])
        await leave_group_silently(zombie)

        _, successor = await owner(second, unique_prefix)

        assert [record.value for record in successor.ledger] == [b"1"]
        await successor.publish([result("c", "after"), progress("3")])
        with pytest.raises(ProducerFenced):  # the zombie goes on where it stopped
            await lease._publisher._producer.commit_transaction()
        values = {record.value for record in await read_count(second, Topic.TRAJECTORIES, 2)}
        assert values == {b"committed", b"after"}


async def test_a_zombie_fences_the_owner_but_proves_nothing_and_the_owner_recovers(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with (
        transport(kafka_bootstrap, unique_prefix, SLEEPY) as first,
        transport(kafka_bootstrap, unique_prefix, partitions=0) as second,
    ):
        zombie, _ = await owner(first, unique_prefix)
        await evict(zombie, group_of(unique_prefix))
        member, lease = await owner(second, unique_prefix)
        await lease.publish([progress("mine")])

        with pytest.raises(OwnershipLostError):
            await zombie.acquire(0)

        with pytest.raises(FencedError):
            await lease.publish([progress("lost")])
        await lease.close()
        await zombie.leave()  # its client has learned by now, and may be joining anew

        async def reacquired() -> KafkaLease | None:
            await member.poll(0.1, 100)
            try:
                return await member.acquire(0)
            except OwnershipLostError:
                return None

        again = await poll_until_async(reacquired, JOIN_S, "the partition, after the rebalance")
        assert again is not None
        assert [record.value for record in again.ledger] == [b"mine"]
        await again.publish([progress("mine again")])


async def test_an_assignment_that_changes_during_the_proof_spoils_it(
    kafka_bootstrap: str, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        transport(kafka_bootstrap, unique_prefix, partitions=2) as first,
        transport(kafka_bootstrap, unique_prefix, partitions=0) as second,
    ):
        member = await join(first, unique_prefix)
        await assigned(member, {0, 1})
        commit = member._intake.commit
        joined: list[KafkaMember] = []

        async def commit_then_rebalance(offsets: Mapping[int, int], text: str) -> None:
            await commit(offsets, text)
            epoch = member._intake.epoch
            joined.append(await join(second, unique_prefix))
            while member._intake.epoch < epoch + 2:
                await member.poll(0.05, 1)

        monkeypatch.setattr(member._intake, "commit", commit_then_rebalance)
        with pytest.raises(OwnershipLostError):
            await member.acquire(0)
        assert all(publisher.ended for publisher in member._publishers)


async def test_only_assigned_partitions_can_be_acquired(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member = await join(made, unique_prefix)
        await assigned(member, {0})
        with pytest.raises(OwnershipLostError):
            await member.acquire(1)


async def test_the_ledger_is_read_past_control_records_and_aborted_ones(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        member = await join(made, unique_prefix)
        await assigned(member, {0, 1})
        lease = await member.acquire(1)
        for number in range(3):
            ids = [OutputRecord(Topic.LEDGER, f"r{number}".encode(), b"done", (), 1)]
            await lease.publish([*ids, progress(str(number), 1)])
        for _ in range(3):  # the log ends with aborted records and their markers
            await open_transaction(lease, [progress("never", 1)])
            lease._publisher.discard()
            lease = await member.acquire(1)

        assert [(record.key, record.value) for record in lease.ledger] == [
            (b"r0", b"done"),
            (b"r1", b"done"),
            (b"r2", b"done"),
            (b"!progress", b"2"),
        ]
        assert all(earlier.offset < later.offset for earlier, later in pairwise(lease.ledger))
        other = await member.acquire(0)
        assert list(other.ledger) == []


async def test_facts_of_a_lease_without_and_with_a_committed_offset(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        producer = await made.producer()
        await producer.send([token("a"), token("b"), token("c")])
        member, lease = await owner(made, unique_prefix)
        assert (lease.committed, lease.log_start, lease.log_end, lease.partition_count) == (None, 0, 3, 1)
        await lease.start(0)
        await lease.commit_hint(2, 2)
        await lease.close()
        again = await member.acquire(0)
        assert again.committed == 2
        assert [(await again.record_at(offset)) is not None for offset in range(4)] == [True] * 3 + [False]
        second = await again.record_at(1)
        assert second is not None
        assert (second.offset, second.key) == (1, b"b")
        assert second.timestamp_ms > 0


async def test_a_hint_of_a_lease_that_is_not_delivered_commits_nothing(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await (await made.producer()).send([token("a"), token("b")])
        member, lease = await owner(made, unique_prefix)
        await lease.commit_hint(2, 2)
        await lease.close()
        assert (await member.acquire(0)).committed == 0


async def test_results_above_the_limit_are_split_inside_the_transaction(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await set_config(made, Topic.TRAJECTORIES, {"max.message.bytes": "2000"})
        _, lease = await owner(made, unique_prefix)
        await lease.publish([result("a", "x" * 10_000), *(result("b", "small" * 10) for _ in range(100))])
        records = await read_count(made, Topic.TRAJECTORIES, 107)
        parts = [record for record in records if header(record.headers, PART)]
        assert b"".join(record.value or b"" for record in parts) == b"x" * 10_000
        assert len(records) == 100 + len(parts)


async def test_a_record_that_cannot_be_split_leaves_the_lease_alive(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await set_config(made, Topic.TRAJECTORIES, {"max.message.bytes": "2000"})
        _, lease = await owner(made, unique_prefix)
        with pytest.raises(RecordTooLargeError):
            await lease.publish([OutputRecord(Topic.TRAJECTORIES, b"k" * 3_000, b"value")])
        await lease.publish([result("a")])


async def test_a_record_the_broker_refuses_ends_the_lease_and_publishes_nothing(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member, lease = await owner(made, unique_prefix)
        await set_config(
            made, Topic.TRAJECTORIES, {"max.message.bytes": "2000"}
        )  # behind the cached limit's back
        written = 0

        async def publish_until_refused() -> None:
            nonlocal written
            while written < 1_000:  # the broker's log takes the new limit a moment later
                await lease.publish([progress(f"{written + 1}"), result("a", "x" * 5_000)])
                written += 1

        with pytest.raises(PublishError, match="MessageSizeTooLarge"):
            await publish_until_refused()
        with pytest.raises(PublishError, match="acquire the partition anew"):
            await lease.publish([progress("dead")])

        again = await member.acquire(0)
        assert [record.value for record in again.ledger] == ([str(written).encode()] if written else [])
        await again.publish([progress("after"), result("b", "x" * 5_000)])
        records = await read_count(made, Topic.TRAJECTORIES, written + 4)
        assert sum(len(record.value or b"") for record in records if record.key == b"b") == 5_000


async def test_a_topic_deleted_behind_a_lease_ends_it(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix, FAST) as made:
        member, lease = await owner(made, unique_prefix)
        admin = await made._cluster.admin()
        await admin.delete_topics([made.names[Topic.DEAD_LETTERS]])

        async def refused() -> bool:
            """A deletion is acknowledged before it is done."""
            try:
                await lease.publish([OutputRecord(Topic.DEAD_LETTERS, b"a", b"b"), progress("1")])
            except (PublishError, MissingTopicError):
                return True
            return False

        await poll_until_async(refused, 20.0, "the lease ended")
        with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
            await member.acquire(0)


async def test_a_cancelled_publication_ends_the_lease_and_the_successor_settles_it(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member, lease = await owner(made, unique_prefix)
        for delay_ms in range(0, 40, 4):
            task = asyncio.create_task(lease.publish([progress(str(delay_ms)), result(str(delay_ms))]))
            await asyncio.wait({task}, timeout=delay_ms / 1_000)
            await cancel(task)
            if task.cancelled():
                with pytest.raises(PublishError):
                    await lease.publish([progress("dead")])
            await lease.close()
            lease = await member.acquire(0)
            landed = {record.value for record in lease.ledger}
            results = {record.key for record in await read_all(made, Topic.TRAJECTORIES)}
            assert (str(delay_ms).encode() in landed) == (str(delay_ms).encode() in results)
            if not task.cancelled():
                assert str(delay_ms).encode() in landed


async def test_two_publications_at_once_become_two_transactions(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        _, lease = await owner(made, unique_prefix)
        await asyncio.gather(*(lease.publish([result(f"r{number}")]) for number in range(5)))
        await lease.publish([])
        assert len(await read_count(made, Topic.TRAJECTORIES, 5)) == 5


async def test_renewing_proves_continuity_and_delivers_again(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with (
        transport(kafka_bootstrap, unique_prefix, partitions=2) as first,
        transport(kafka_bootstrap, unique_prefix, partitions=0) as second,
    ):
        producer = await first.producer()
        await producer.send([token("a", partition=0), token("a", partition=1)])
        member = await join(first, unique_prefix)
        await assigned(member, {0, 1})
        leases = [await member.acquire(partition) for partition in (0, 1)]
        for lease in leases:
            await lease.start(0)
        generation = (await member.poll(0, 1)).generation
        other = await join(second, unique_prefix)
        poll = await member.poll(0.05, 10)
        while poll.generation == generation or len(poll.assigned) != 1:
            poll = await member.poll(0.05, 10)
        (kept,) = poll.assigned
        await assigned(other, {1 - kept})
        assert not (await member.poll(0.3, 10)).records  # nothing before it is renewed

        with pytest.raises(OwnershipLostError):
            await leases[kept].renew(generation, 0, [progress("old", kept)])
        with pytest.raises(OwnershipLostError):
            await leases[1 - kept].renew(poll.generation, 0, [progress("not mine", 1 - kept)])
        with pytest.raises(ValueError, match="record"):
            await leases[kept].renew(poll.generation, 0, [])
        await leases[kept].renew(poll.generation, 0, [progress("kept", kept)])
        assert [record.offset for record in await receive(member, 1, kept)] == [0]

        taken = await other.acquire(1 - kept)
        assert [record.value for record in taken.ledger] == []
        with pytest.raises(FencedError):
            await leases[1 - kept].publish([progress("late", 1 - kept)])


async def test_renewing_after_somebody_else_owned_it_is_fenced(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with (
        transport(kafka_bootstrap, unique_prefix, SLEEPY) as first,
        transport(kafka_bootstrap, unique_prefix, partitions=0) as second,
    ):
        member, lease = await owner(first, unique_prefix)
        before = (await member.poll(0.0, 1)).generation
        await evict(member, group_of(unique_prefix))
        other, taken = await owner(second, unique_prefix)
        await taken.publish([progress("theirs")])
        await taken.close()
        await other.leave()
        with pytest.raises(OwnershipLostError):
            await member._intake.commit({0: 0})  # so that its client learns, and joins anew

        async def assigned_anew() -> int:
            poll = await member.poll(0.1, 100)
            return poll.generation if poll.generation > before and poll.assigned == {0} else 0

        generation = await poll_until_async(assigned_anew, JOIN_S, "a new assignment")
        with pytest.raises(FencedError):
            await lease.renew(generation, 0, [progress("mine")])


async def test_ledger_and_tokens_need_the_same_partitions(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member = await join(made, unique_prefix)
        await assigned(member, {0})
        admin = await made._cluster.admin()
        from aiokafka.admin import NewPartitions

        await admin.create_partitions({made.names[Topic.LEDGER]: NewPartitions(2)})
        while await made._cluster.partitions(Topic.LEDGER) == 1:
            await member.poll(0.02, 1)
        with pytest.raises(ConfigurationError, match="same count"):
            await member.acquire(0)


async def test_leaving_frees_producers_of_leases_nobody_closed(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member, lease = await owner(made, unique_prefix)
        await member.leave()
        with pytest.raises(PublishError):
            await lease.publish([progress("1")])
        await lease.close()
        await member.leave()
    assert await config_is_gone(kafka_bootstrap, unique_prefix)


async def config_is_gone(bootstrap: str, prefix: str) -> bool:
    """The topics outlive the transport."""
    async with transport(bootstrap, prefix, partitions=0) as made:
        return "cleanup.policy" in await config(made, Topic.TOKENS)
