"""The ports together do what they are for: under cancellations, rebalances, zombies and broker crashes, a plain relay that
publishes one result a token, and resumes from the ledger, publishes each exactly once and in order."""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError
from freezepoint.transport.kafka import KafkaTransport
from freezepoint.transport.kafka.lease import KafkaLease
from freezepoint.transport.kafka.member import KafkaMember
from freezepoint_schemas.topics import Topic, TopicNames, topic_specs
from kafka_local import LocalKafka
from tests.integration.kafka_kit import SETTINGS, join, progress, read_all, token
from tests.polling import poll_until_async

PARTITIONS = 4
ROUNDS = 12
TOKENS_EACH = 40


@dataclass
class Relay:
    """A worker without a fold. Everything it knows is in the ledger: the next offset of each partition."""

    made: KafkaTransport
    prefix: str
    chance: random.Random
    story: list[str]
    """What all relays did, in order, for the case that something is wrong in the end."""
    mischief: bool = True
    seats: dict[int, KafkaLease] = field(default_factory=dict)
    next_offset: dict[int, int] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            member: KafkaMember | None = None
            try:
                member = await join(self.made, self.prefix)
                await self.work(member)
            except BrokerError:
                await asyncio.sleep(0.1)  # the broker is down, or this membership is over: begin anew
            finally:
                self.seats.clear()
                if member is not None:
                    await member.leave()

    def tell(self, partition: int, what: str) -> None:
        self.story.append(f"{time.monotonic():.3f} relay {id(self) % 1_000} partition {partition}: {what}")

    async def work(self, member: KafkaMember) -> None:
        generation = 0
        while not (self.mischief and self.chance.random() < 0.003):
            poll = await member.poll(0.05, 50)
            if poll.generation != generation:
                generation = poll.generation
                await self.reassign(generation, poll.assigned)
            for partition in poll.assigned - set(self.seats):
                await self.acquire(member, partition)
            for partition, records in poll.records.items():
                if partition in self.seats:
                    await self.relay(partition, records)

    async def reassign(self, generation: int, assigned: frozenset[int]) -> None:
        for partition, lease in list(self.seats.items()):
            if partition not in assigned:
                await self.drop(partition)
                continue
            offset = self.next_offset[partition]
            try:
                await lease.renew(generation, offset, [progress(str(offset), partition)])
                self.tell(partition, f"renewed at {offset}")
            except BrokerError as error:
                self.tell(partition, f"not renewed at {offset}: {error!r}")
                await self.drop(partition)

    async def acquire(self, member: KafkaMember, partition: int) -> None:
        try:
            lease = await member.acquire(partition)
            self.tell(
                partition, f"acquired, ledger {[(found.offset, found.value) for found in lease.ledger]}"
            )
            known = [record.value for record in lease.ledger if record.value is not None]
            self.next_offset[partition] = int(known[-1]) if known else lease.log_start
            self.seats[partition] = lease
            await lease.start(self.next_offset[partition])
        except BrokerError:
            await self.drop(partition)

    async def relay(self, partition: int, records: Sequence[InputRecord]) -> None:
        assert records[0].offset == self.next_offset[partition]
        results = [OutputRecord(Topic.TRAJECTORIES, record.key, where(record)) for record in records]
        offset = records[-1].offset + 1
        patience_s = self.chance.uniform(0, 0.03) if self.mischief and self.chance.random() < 0.1 else None
        self.tell(partition, f"publishing {records[0].offset} to {offset}, patience {patience_s}")
        try:
            async with asyncio.timeout(patience_s):
                await self.seats[partition].publish([*results, progress(str(offset), partition)])
        except (BrokerError, TimeoutError) as error:
            self.tell(partition, f"not known to be published to {offset}: {error!r}")
            await self.drop(partition)
        else:
            self.tell(partition, f"published to {offset}")
            self.next_offset[partition] = offset

    async def drop(self, partition: int) -> None:
        lease = self.seats.pop(partition, None)
        if lease is not None:
            await lease.close()


def where(record: InputRecord) -> bytes:
    return b"%d/%d" % (record.partition, record.offset)


async def produce(made: KafkaTransport) -> None:
    """Some hundred tokens for every partition. A send that is repeated stores some twice, each with an offset of its own."""
    producer = await made.producer()
    for number in range(ROUNDS):
        for partition in range(PARTITIONS):
            batch = [token(f"{number}-{index}", partition=partition) for index in range(TOKENS_EACH)]
            while True:
                try:
                    await producer.send(batch)
                    break
                except BrokerError:
                    await asyncio.sleep(0.1)
        await asyncio.sleep(0.2)


async def crash_twice(kafka: LocalKafka, chance: random.Random, story: list[str]) -> None:
    for _ in range(2):
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        story.append(f"{time.monotonic():.3f} broker killed")
        await asyncio.to_thread(kafka.kill)
        await asyncio.to_thread(kafka.restart)
        story.append(f"{time.monotonic():.3f} broker restarted")


async def relayed(made: KafkaTransport, tasks: "Sequence[asyncio.Task[None]]") -> list[InputRecord]:
    """The results, once there are as many as tokens."""
    for task in tasks:
        if task.done():
            task.result()
    try:
        tokens, results = await read_all(made, Topic.TOKENS), await read_all(made, Topic.TRAJECTORIES)
    except BrokerError:
        return []
    return results if len(results) >= len(tokens) else []


def told(wrong: set[bytes | None], results: Sequence[InputRecord], story: Sequence[str]) -> str:
    """The whole story of what was relayed wrongly, copy by copy."""
    copies = sorted(
        f"{record.value!r} in {record.partition} at {record.offset}, {record.timestamp_ms}"
        for record in results
        if record.value in wrong
    )
    return "\n".join([f"{len(wrong)} relayed wrongly: {sorted(map(str, wrong))}", *copies, *story])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_every_token_is_relayed_exactly_once_and_in_order(
    local_kafka: LocalKafka, seed: int, unique_prefix: str
) -> None:
    chance = random.Random(seed)
    names = TopicNames(unique_prefix + "-")
    settings = SETTINGS.model_copy(update={"request_timeout_ms": 5_000})
    async with AsyncExitStack() as stack:
        transports = [
            await stack.enter_async_context(KafkaTransport(local_kafka.bootstrap, names, settings))
            for _ in range(4)
        ]
        made = transports.pop()
        await made.admin().apply(topic_specs(names, PARTITIONS))
        story: list[str] = []
        relays = [Relay(own, unique_prefix, random.Random(chance.random()), story) for own in transports]
        tasks = [asyncio.create_task(relay.run()) for relay in relays]
        try:
            await asyncio.gather(produce(made), crash_twice(local_kafka, chance, story))
            for relay in relays:
                relay.mischief = False
            results = await poll_until_async(lambda: relayed(made, tasks), 60.0, "everything relayed")
            tokens = await read_all(made, Topic.TOKENS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    assert len(tokens) >= PARTITIONS * ROUNDS * TOKENS_EACH
    relayed_times = Counter(record.value for record in results)
    wrong = {value for value in relayed_times if relayed_times[value] != 1}
    wrong |= relayed_times.keys() ^ {where(record) for record in tokens}
    assert not wrong, told(wrong, results, story)
    offsets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for record in sorted(results, key=lambda record: (record.partition, record.offset)):
        source, offset = (record.value or b"").split(b"/")
        offsets[record.partition, source].append(int(offset))
    assert all(found == sorted(found) for found in offsets.values())
