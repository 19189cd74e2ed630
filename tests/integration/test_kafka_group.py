"""Membership and delivery, against a real broker."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from freezepoint.errors import BrokerError, MissingTopicError
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint_schemas.topics import Topic
from tests.integration.kafka_kit import (
    JOIN_S,
    SETTINGS,
    assigned,
    join,
    open_transaction,
    owner,
    receive,
    token,
    transport,
)
from tests.polling import poll_until_async


class Crew:
    """Members that poll all the time, and what each was last told."""

    def __init__(self) -> None:
        self.told: dict[KafkaMember, frozenset[int]] = {}
        self.tasks: dict[KafkaMember, asyncio.Task[None]] = {}

    def add(self, member: KafkaMember) -> None:
        self.tasks[member] = asyncio.create_task(self._work(member))

    async def _work(self, member: KafkaMember) -> None:
        while True:
            self.told[member] = (await member.poll(0.05, 100)).assigned

    async def remove(self, member: KafkaMember) -> None:
        task = self.tasks.pop(member)
        task.cancel()
        await asyncio.wait({task})
        await member.leave()
        del self.told[member]

    async def owns_each_once(self, partitions: int) -> bool:
        """Also in equal shares: right after joining, a member has been told nothing while another still has all."""
        for task in self.tasks.values():
            if task.done():
                task.result()
        counted = Counter(partition for told in self.told.values() for partition in told)
        shares = [len(told) for told in self.told.values()]
        return (
            counted == Counter(range(partitions))
            and len(shares) == len(self.tasks)
            and max(shares) - min(shares) < 2
        )


async def test_members_join_and_leave_and_every_partition_stays_owned_once(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    crew = Crew()
    async with AsyncExitStack() as stack:
        transports = [
            await stack.enter_async_context(transport(kafka_bootstrap, unique_prefix, partitions=partitions))
            for partitions in (6, 0, 0)
        ]
        for _ in range(3):
            began = time.monotonic()
            members = await asyncio.gather(*(join(made, unique_prefix) for made in transports))
            for member in members:
                crew.add(member)
            await poll_until_async(lambda: crew.owns_each_once(6), JOIN_S, "three members own six partitions")
            await crew.remove(members[0])
            await poll_until_async(lambda: crew.owns_each_once(6), JOIN_S, "two members own six partitions")
            await crew.remove(members[1])
            await poll_until_async(lambda: crew.owns_each_once(6), JOIN_S, "one member owns six partitions")
            await crew.remove(members[2])
            assert time.monotonic() - began < 15.0


async def test_a_member_without_partitions_takes_over(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with (
        transport(kafka_bootstrap, unique_prefix) as first,
        transport(kafka_bootstrap, unique_prefix, partitions=0) as second,
    ):
        crew = Crew()
        members = [await join(first, unique_prefix), await join(second, unique_prefix)]
        for member in members:
            crew.add(member)
        await poll_until_async(lambda: crew.owns_each_once(1), JOIN_S, "one of two owns the partition")
        busy = next(member for member, told in crew.told.items() if told)
        await crew.remove(busy)
        await poll_until_async(lambda: crew.owns_each_once(1), JOIN_S, "the idle member takes over")
        (heir,) = crew.tasks
        await crew.remove(heir)


async def test_a_new_assignment_ends_a_poll_early_and_nothing_is_delivered_before_a_start(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await (await made.producer()).send([token("a"), token("b")])
        member = await join(made, unique_prefix)
        began = time.monotonic()
        poll = await member.poll(30.0, 10)
        assert time.monotonic() - began < 10.0
        assert poll.assigned == {0}
        for _ in range(3):
            assert not (await member.poll(0.3, 10)).records
        lease = await member.acquire(0)
        await lease.start(1)
        assert [record.offset for record in await receive(member, 1)] == [1]


async def test_pausing_loses_and_repeats_nothing(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        producer = await made.producer()
        await producer.send([token(f"r{number}") for number in range(300)])
        member, lease = await owner(made, unique_prefix)
        await lease.start(0)
        offsets: list[int] = []
        while len(offsets) < 300:
            poll = await member.poll(0.1, 7)
            offsets += [record.offset for record in poll.records.get(0, ())]
            if len(offsets) % 3 == 0:
                lease.pause()
                lease.pause()
                assert not (await member.poll(0, 7)).records
                assert await lease.caught_up() == (len(offsets) == 300)
                lease.resume()
                lease.resume()
        assert offsets == list(range(300))
        await poll_until_async(lease.caught_up, JOIN_S, "caught up")


async def test_records_taken_just_before_a_pause_are_kept_for_the_resume(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        await (await made.producer()).send([token("a"), token("b")])
        member, lease = await owner(made, unique_prefix)
        await lease.start(0)
        polling = asyncio.create_task(member.poll(5.0, 1))
        await asyncio.sleep(0)  # the poll has begun
        taking = member._intake._fetching
        assert taking is not None
        taking.add_done_callback(lambda _: lease.pause())  # before the poll, which looks one step later
        assert not (await polling).records
        assert not await lease.caught_up()
        lease.resume()
        assert [record.offset for record in await receive(member, 2)] == [0, 1]


async def test_caught_up_passes_over_markers_and_stops_at_an_open_transaction(
    kafka_bootstrap: str, unique_prefix: str
) -> None:
    foreign = SETTINGS.model_copy(update={"transactional_id_prefix": "foreign"})
    async with (
        transport(kafka_bootstrap, unique_prefix) as made,
        transport(kafka_bootstrap, unique_prefix, foreign, partitions=0) as other,
    ):
        _, writer = await owner(other, unique_prefix + "-writer")
        await writer.publish([token("a")])
        await open_transaction(writer, [token("b")])
        await (await made.producer()).send([token("c")])
        member, lease = await owner(made, unique_prefix)
        assert lease.log_end == 2  # a record and its marker; the rest is behind an open transaction
        assert not await lease.caught_up()
        await lease.start(0)

        async def caught_up() -> bool:
            await member.poll(0.05, 10)
            return await lease.caught_up()

        await poll_until_async(caught_up, JOIN_S, "caught up behind the open transaction")


async def test_an_error_of_one_partition_costs_no_record_of_another(
    kafka_bootstrap: str, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=2) as made:
        await (await made.producer()).send([token("a", partition=0) for _ in range(50)])
        member = await join(made, unique_prefix)
        await assigned(member, {0, 1})
        leases = [await member.acquire(partition) for partition in (0, 1)]
        await leases[0].start(0)
        await leases[1].start(1_000)  # beyond the end: the client raises, and drops what it drained beside it
        offsets: list[int] = []
        errors: list[str] = []

        async def all_read() -> bool:
            try:
                poll = await member.poll(0.1, 7)
            except BrokerError as error:
                errors.append(str(error))
            else:
                offsets.extend(record.offset for record in poll.records.get(0, ()))
            return len(offsets) >= 50 and len(errors) > 1

        await poll_until_async(all_read, JOIN_S, "all of the other partition")
        assert offsets == list(range(50))
        assert all("OffsetOutOfRange" in error for error in errors)


async def test_joining_needs_the_tokens_topic(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix, partitions=0) as made:
        with pytest.raises(
            MissingTopicError, match=r"rollout-tokens does not exist.*freezepoint topics apply"
        ):
            await join(made, unique_prefix)


async def test_a_member_says_so_when_its_topic_is_deleted(kafka_bootstrap: str, unique_prefix: str) -> None:
    async with transport(kafka_bootstrap, unique_prefix) as made:
        member, lease = await owner(made, unique_prefix)
        await lease.start(0)
        admin = await made._cluster.admin()
        await admin.delete_topics([made.names[Topic.TOKENS]])
        with pytest.raises(MissingTopicError, match="freezepoint topics apply"):
            await receive(member, 1)
