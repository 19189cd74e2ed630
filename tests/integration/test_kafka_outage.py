"""A broker that cannot be reached, or dies and comes back."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack

import pytest
from aiokafka.errors import UnknownTopicOrPartitionError

from freezepoint.errors import BrokerError, BrokerUnavailableError, PublishError
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.lease import KafkaLease
from freezepoint_schemas.topics import Topic, TopicNames
from kafka_local import LocalKafka
from tests.integration.kafka_kit import (
    FAST,
    JOIN_S,
    SETTINGS,
    owner,
    progress,
    read_all,
    receive,
    token,
    transport,
)
from tests.polling import poll_until_async

NOWHERE = "127.0.0.1:9"


async def test_an_unreachable_broker_is_named_at_once(unique_prefix: str) -> None:
    async with KafkaTransport(NOWHERE, TopicNames(unique_prefix), FAST) as made:
        for attempt in (made.producer, lambda: made.join("group"), lambda: made.reader(Topic.TOKENS)):
            began = time.monotonic()
            with pytest.raises(
                BrokerUnavailableError, match=r"no answer from the broker while .*127.0.0.1:9"
            ):
                await attempt()
            assert time.monotonic() - began < 3.0


@pytest.mark.slow
async def test_a_member_and_a_lease_outlive_a_killed_broker(
    local_kafka: LocalKafka, unique_prefix: str
) -> None:
    settings = SETTINGS.model_copy(update={"request_timeout_ms": 30_000})
    async with transport(local_kafka.bootstrap, unique_prefix, settings) as made:
        producer = await made.producer()
        await producer.send([token("a")])
        member, lease = await owner(made, unique_prefix)
        await lease.start(0)
        assert [record.offset for record in await receive(member, 1)] == [0]
        await lease.publish([progress("before")])
        local_kafka.kill()
        restarting = asyncio.create_task(asyncio.to_thread(local_kafka.restart))
        publishing = asyncio.create_task(lease.publish([progress("during")]))
        generation = (await member.poll(0, 1)).generation
        offsets: list[int] = []
        sent = False

        async def delivered() -> bool:
            nonlocal generation, lease, sent
            poll = await member.poll(0.1, 10)
            offsets.extend(record.offset for record in poll.records.get(0, ()))
            if restarting.done() and not sent:
                await producer.send([token("b")])
                sent = True
            if poll.generation != generation and poll.assigned:
                generation = poll.generation
                await lease.close()
                lease = await member.acquire(0)
                await lease.start(1)
            return 1 in offsets

        await poll_until_async(delivered, 60.0, "the record sent after the restart")
        await restarting
        await asyncio.wait({publishing})
        await lease.close()
        again = await member.acquire(0)
        landed = [record.value for record in again.ledger]
        assert (
            landed == [b"during"] if publishing.exception() is None else landed in ([b"before"], [b"during"])
        )
        await again.publish([progress("after")])


@pytest.mark.slow
async def test_without_a_broker_everything_fails_in_time_and_closes_in_time(
    local_kafka: LocalKafka, unique_prefix: str
) -> None:
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(transport(local_kafka.bootstrap, unique_prefix, FAST))
        producer = await made.producer()
        await producer.send([token("a")])
        member, lease = await owner(made, unique_prefix)
        await lease.start(0)
        await receive(member, 1)
        reader = await made.reader(Topic.TOKENS)
        local_kafka.kill()

        began = time.monotonic()
        with pytest.raises(BrokerUnavailableError):
            await producer.send([token("b")])
        with pytest.raises(BrokerError):
            await lease.publish([progress("lost")])
        with pytest.raises(BrokerUnavailableError):
            await lease.caught_up()
        with pytest.raises(BrokerUnavailableError):
            await reader.at_end()
        with pytest.raises(BrokerUnavailableError):
            await member.acquire(0)
        await lease.commit_hint(1, 1)
        assert time.monotonic() - began < 15.0

        with pytest.raises(BrokerUnavailableError, match="restart this process"):
            await receive(member, 1)

        began = time.monotonic()
        await stack.aclose()
        assert time.monotonic() - began < 30.0


async def test_a_send_outlives_the_failure_of_another(local_kafka: LocalKafka, unique_prefix: str) -> None:
    """The producer is replaced after the first one's timeout; the second one still has time, and is sent anew."""
    settings = SETTINGS.model_copy(update={"request_timeout_ms": 4_000})
    async with transport(local_kafka.bootstrap, unique_prefix, settings) as made:
        producer = await made.producer()
        await producer.send([token("a", "before")])
        pid = local_kafka.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            first = asyncio.create_task(producer.send([token("a", "first")]))

            async def half_way() -> bool:
                return time.monotonic() - began > 2.0

            await poll_until_async(half_way, 10.0, "half of the first one's time is over")
            second = asyncio.create_task(producer.send([token("a", "second")]))
            with pytest.raises(BrokerUnavailableError):
                await first
        finally:
            os.kill(pid, signal.SIGCONT)
        await second

        async def arrived() -> bool:
            try:
                return b"second" in {record.value for record in await read_all(made, Topic.TOKENS)}
            except BrokerUnavailableError:  # after standing still it may not know itself at first
                return False

        await poll_until_async(arrived, JOIN_S, "the second one can be read")


@pytest.mark.slow
async def test_a_stopped_broker_is_no_missing_topic(local_kafka: LocalKafka, unique_prefix: str) -> None:
    """The client calls a topic unknown whose metadata nobody sent it in time: here each producer's first publication."""
    settings = SETTINGS.model_copy(update={"request_timeout_ms": 3_000})
    async with transport(local_kafka.bootstrap, unique_prefix, settings) as made:
        member, first = await owner(made, unique_prefix)
        await first.close()
        lease = await member.acquire(
            0
        )  # nothing was amiss while its producer started, so that it asked for no metadata
        await lease.start(0)
        pid = local_kafka.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(PublishError, match=f"while publishing as .*{unique_prefix}") as failed:
                await lease.publish([progress("during")])
            with pytest.raises(BrokerUnavailableError):
                await made.admin().partitions(Topic.TOKENS)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert isinstance(failed.value.__cause__, UnknownTopicOrPartitionError)
        await lease.close()
        again: list[KafkaLease] = []

        async def acquired() -> bool:
            try:
                await member.poll(0.1, 10)
                again.append(await member.acquire(0))
            except BrokerError:
                return False
            return True

        await poll_until_async(acquired, 60.0, "it works on")
        await again[0].publish([progress("after")])
