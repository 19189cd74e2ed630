"""The transport's other ports over the simulated cluster: producers, readers, administration, and the way to join."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.transport.ports import (
    FROM_THE_BEGINNING,
    Extent,
    GroupMember,
    Position,
    Producer,
    Reader,
    Retention,
    StartAt,
    Subscription,
    TopicAdmin,
    TopicFinding,
)
from freezepoint.transport.splitting import split_record
from freezepoint_schemas.topics import Topic, TopicNames, TopicSpec, partition_for
from tests.simulation.broker import Broker
from tests.simulation.clock import Process
from tests.simulation.leasing import SimMember
from tests.simulation.log import Log


class SimProducer:
    """See the ``Producer`` port: without idempotence, so that a repeated request is a repeated record."""

    def __init__(self, broker: Broker, process: Process, record_bytes_max: int) -> None:
        self._broker = broker
        self._process = process
        self._record_bytes_max = record_bytes_max

    async def send(self, records: Sequence[OutputRecord]) -> list[Position]:
        return [await self._send(record) for record in records]

    async def _send(self, record: OutputRecord) -> Position:
        *first, last = split_record(record, self._record_bytes_max)
        for part in first:
            await self._append(part)
        return await self._append(last)

    async def _append(self, record: OutputRecord) -> Position:
        partition = record.partition
        if partition is None:
            partition = partition_for(record.key or b"", self._broker.partitions)
        appended = await self._broker.network.request(
            self._process, f"append to {partition}", lambda: self._broker.append(record, partition)
        )
        return Position(appended.partition, appended.offset)

    async def close(self) -> None: ...


@dataclass(slots=True)
class SimReader:
    """See the ``Reader`` port."""

    logs: Sequence[Log]
    positions: dict[Log, int] = field(default_factory=dict)

    async def poll(self, timeout_s: float, records_max: int) -> Sequence[InputRecord]:
        for log in self.logs:
            records = log.read(self.positions.get(log, log.start), log.end, records_max)
            if records:
                self.positions[log] = records[-1].offset + 1
                return records
        await asyncio.sleep(timeout_s)
        return []

    async def at_end(self) -> bool:
        return not any(log.read(self.positions.get(log, log.start), log.end, 1) for log in self.logs)

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SimAdmin:
    """See the ``TopicAdmin`` port: the topics are as they should be."""

    broker: Broker
    process: Process

    async def identity(self, topic: Topic) -> str | None:
        """Nobody deletes a topic here."""
        return None

    async def retention(self, topic: Topic) -> Retention:
        """Nothing expires here but what a fault truncates."""
        return Retention()

    async def apply(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        return await self.check(specs)

    async def check(self, specs: Sequence[TopicSpec]) -> list[TopicFinding]:
        return [TopicFinding(spec.name, ok=True, message="as it should be") for spec in specs]

    async def partitions(self, topic: Topic) -> int:
        return await self.broker.network.request(
            self.process, f"partitions of {topic}", lambda: self.broker.partitions
        )


@dataclass(slots=True)
class SimTransport:
    """See the ``Transport`` port. ``member``: the last one joined, for faults that concern its client."""

    broker: Broker
    process: Process
    rng: random.Random
    record_bytes_max: int = 1_000_000
    member: SimMember | None = None

    @property
    def names(self) -> TopicNames:
        return self.broker.names

    @names.setter
    def names(self, names: TopicNames) -> None:
        raise AttributeError("the simulated cluster has its names")

    async def producer(self) -> Producer:
        return SimProducer(self.broker, self.process, self.record_bytes_max)

    async def join(self, group: str) -> GroupMember:
        self.process.require_alive()
        self.member = SimMember(self.broker, self.process, self.rng, self.record_bytes_max)
        return self.member

    async def subscribe(self, topic: Topic, group: str, start: StartAt = FROM_THE_BEGINNING) -> Subscription:
        raise NotImplementedError("nothing here reads results together with others")

    async def reader(
        self, topic: Topic, *, partitions: Sequence[int] | None = None, start: Mapping[int, int] | None = None
    ) -> Reader:
        wanted = range(self.broker.partitions) if partitions is None else partitions
        logs = [self.broker.log(topic, partition) for partition in wanted]
        return SimReader(logs, {log: offset for log in logs if (offset := (start or {}).get(log.partition))})

    async def extents(self, topic: Topic) -> Mapping[int, Extent]:
        logs = [self.broker.log(topic, partition) for partition in range(self.broker.partitions)]
        return await self.broker.network.request(
            self.process,
            f"extents of {topic}",
            lambda: {log.partition: Extent(log.start, log.stable) for log in logs},
        )

    def admin(self) -> TopicAdmin:
        return SimAdmin(self.broker, self.process)

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...
