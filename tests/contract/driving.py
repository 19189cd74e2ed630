"""What the contract tests drive a transport with: nothing here knows which one it is.

Waiting is polling with a deadline, never a sleep for a time that should do; deadlines are generous, since a broker on
a busy machine may take seconds for what it mostly does in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Self

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError
from freezepoint.settings import KafkaSettings, Settings, SqliteSettings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Broker, GroupMember, Lease, Reader, Transport
from freezepoint_schemas.topics import Topic, TopicNames, TopicSpec, partition_for, topic_specs
from tests.polling import poll_until_async

WAIT_S = 60.0
POLL_S = 0.1
RECORDS_MAX = 500
PARTITIONS = 4


class Cluster:
    """One broker with one test's topics, and all the transports that the test makes."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url = url
        self.names = TopicNames(prefix)
        self.group = f"{prefix}group"
        self._made: list[Transport] = []

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite:")

    def settings(self, record_bytes_max: int = 1_000_000) -> Settings:
        """Short timeouts: 6 s is the least that an untouched Kafka broker grants a session."""
        return Settings(
            broker=self.url,
            topic_prefix=self.names.prefix,
            sqlite=SqliteSettings(
                session_timeout_ms=1_500, heartbeat_interval_ms=100, record_bytes_max=record_bytes_max
            ),
            kafka=KafkaSettings(session_timeout_ms=6_000, heartbeat_interval_ms=500),
        )

    def environment(self) -> dict[str, str]:
        """The same settings for a process of its own."""
        settings = self.settings()
        return {
            "FREEZEPOINT_BROKER": self.url,
            "FREEZEPOINT_TOPIC_PREFIX": self.names.prefix,
            "FREEZEPOINT_SQLITE__SESSION_TIMEOUT_MS": str(settings.sqlite.session_timeout_ms),
            "FREEZEPOINT_SQLITE__HEARTBEAT_INTERVAL_MS": str(settings.sqlite.heartbeat_interval_ms),
            "FREEZEPOINT_KAFKA__SESSION_TIMEOUT_MS": str(settings.kafka.session_timeout_ms),
            "FREEZEPOINT_KAFKA__HEARTBEAT_INTERVAL_MS": str(settings.kafka.heartbeat_interval_ms),
        }

    def transport(self, record_bytes_max: int = 1_000_000) -> Broker:
        """One more transport, as another process would make it."""
        made = connect(self.settings(record_bytes_max))
        self._made.append(made)
        return made

    def specs(self, partitions: int = PARTITIONS, record_bytes_max: int | None = None) -> list[TopicSpec]:
        limit = {} if record_bytes_max is None else {"max.message.bytes": str(record_bytes_max)}
        return [
            replace(spec, config={**spec.config, **limit}) for spec in topic_specs(self.names, partitions)
        ]

    async def with_topics(self, partitions: int = PARTITIONS, record_bytes_max: int | None = None) -> Broker:
        """A transport whose topics exist; the limit is the topics' on one broker, the transport's on the other."""
        transport = self.transport(record_bytes_max or 1_000_000)
        specs = self.specs(partitions, record_bytes_max)

        async def applied() -> bool:
            """A broker that was not heard of for a while, as on a machine that is overloaded, may create nothing yet."""
            with contextlib.suppress(BrokerError):
                return all(finding.ok for finding in await transport.admin().apply(specs))
            return False

        await poll_until_async(applied, WAIT_S, "the topics created")
        return transport

    async def member(self, transport: Transport | None = None) -> Driven:
        return Driven(await (transport or self.transport()).join(self.group))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for transport in self._made:
            await transport.close()


class Driven:
    """A member and all it has been told so far."""

    def __init__(self, member: GroupMember) -> None:
        self.member = member
        self.generation = 0
        self.assigned: frozenset[int] = frozenset()
        self.records: list[InputRecord] = []

    async def poll(self) -> None:
        polled = await self.member.poll(POLL_S, RECORDS_MAX)
        assert polled.generation >= self.generation
        assert set(polled.records) <= polled.assigned
        self.generation, self.assigned = polled.generation, polled.assigned
        self.records += [record for records in polled.records.values() for record in records]

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]


def deadline() -> Callable[[], bool]:
    """Answers whether there is time left."""
    end = time.monotonic() + WAIT_S
    return lambda: time.monotonic() < end


async def drive(members: Sequence[Driven], until: Callable[[], bool], what: str) -> None:
    """Poll all the members side by side, as their processes would, until it is so."""
    in_time = deadline()
    while not until():
        assert in_time(), f"not within {WAIT_S:g} s: {what}; {[(m.generation, m.assigned) for m in members]}"
        await asyncio.gather(*(member.poll() for member in members))


async def share(members: Sequence[Driven], partitions: int = PARTITIONS) -> None:
    """Until every partition is one member's, and no member has two more than another."""

    def is_shared() -> bool:
        assigned = [partition for member in members for partition in member.assigned]
        counts = [len(member.assigned) for member in members]
        return sorted(assigned) == list(range(partitions)) and max(counts) - min(counts) <= 1

    await drive(members, is_shared, "all partitions shared out")


async def acquire(member: Driven, partition: int, *others: Driven) -> Lease:
    """Acquire while everybody goes on polling; anew while the assignment is on the move, as a worker does."""
    in_time = deadline()
    while True:
        task = asyncio.create_task(member.member.acquire(partition))
        try:
            await drive([member, *others], task.done, f"acquisition of partition {partition}")
            return task.result()
        except BrokerError:
            if not in_time():
                raise
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, BrokerError):
                    await task


async def own_all(member: Driven, partitions: int = PARTITIONS) -> dict[int, Lease]:
    """The only member's leases on everything, started at the beginning."""
    await share([member], partitions)
    leases = {partition: await acquire(member, partition) for partition in range(partitions)}
    for lease in leases.values():
        await lease.start(lease.log_start)
    return leases


async def read_to_end(reader: Reader) -> list[InputRecord]:
    """All that is committed now."""
    in_time = deadline()
    records: list[InputRecord] = []
    while True:
        at_end = await reader.at_end()
        found = await reader.poll(POLL_S, RECORDS_MAX)
        records += found
        if at_end and not found:
            return records
        assert in_time(), f"not at the end within {WAIT_S:g} s"


async def read_all(transport: Transport, topic: Topic) -> list[InputRecord]:
    """A topic's committed records, by partition and offset."""
    reader = await transport.reader(topic)
    try:
        records = await read_to_end(reader)
    finally:
        await reader.close()
    return sorted(records, key=lambda record: (record.partition, record.offset))


async def read_until(transport: Transport, topic: Topic, count: int) -> list[InputRecord]:
    """A topic's committed records, once there are so many."""
    in_time = deadline()
    while len(records := await read_all(transport, topic)) < count:
        assert in_time(), f"{len(records)} of {count} records in {topic}"
    return records


def token(key: bytes | None, value: bytes | None, **more: object) -> OutputRecord:
    """A record for the tokens topic."""
    return replace(OutputRecord(Topic.TOKENS, key, value), **more)  # type: ignore[arg-type]


def keys_of(partition: int, partitions: int = PARTITIONS) -> Iterator[bytes]:
    """Keys that belong to that partition."""
    number = 0
    while True:
        key = b"rollout-%d" % number
        if partition_for(key, partitions) == partition:
            yield key
        number += 1


def key_of(partition: int, partitions: int = PARTITIONS) -> bytes:
    return next(keys_of(partition, partitions))
