"""Topics as they are: read from the beginning by plain consumers that know nothing of the worker's own reading."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition

READ_S = 120.0
STEP_MS = 200
PART = "freezepoint-part"
FETCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """One record as it lies in a partition."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    def header(self, name: str) -> bytes | None:
        return next((value for key, value in reversed(self.headers) if key == name), None)


@dataclass(slots=True)
class Wholes:
    """Values put together from the records that they were split into."""

    _parts: defaultdict[tuple[int, bytes | None, str], dict[int, bytes]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    @property
    def torn(self) -> list[tuple[int, bytes | None]]:
        """Partition and key of what lacks parts."""
        return [(partition, key) for partition, key, _ in self._parts]

    def put(self, line: Line) -> bytes | None:
        """The whole value, with its last record."""
        value, part = line.value or b"", line.header(PART)
        if part is None:
            return value
        name, index, count = part.decode().split(":")
        held = self._parts[line.partition, line.key, name]
        held[int(index)] = value
        if len(held) < int(count):
            return None
        del self._parts[line.partition, line.key, name]
        return b"".join(held[number] for number in range(int(count)))


@dataclass(slots=True)
class Tail:
    """All committed records of one topic, kept; :meth:`pull` adds what came since."""

    bootstrap: str
    topic: str
    partitions: int
    lines: list[Line] = field(default_factory=list)
    _consumer: Any = None

    @property
    def sources(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, number) for number in range(self.partitions)]

    async def __aenter__(self) -> Self:
        self._consumer = _consumer(self.bootstrap, "read_committed")
        await self._consumer.start()
        self._consumer.assign(self.sources)
        await self._consumer.seek_to_beginning(*self.sources)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._consumer.stop()

    async def pull(self) -> list[Line]:
        """Read on to the end of what is committed now; everything read so far."""
        deadline = time.monotonic() + READ_S
        ends = await self._consumer.end_offsets(self.sources)
        for source in self.sources:
            while await self._consumer.position(source) < ends[source]:
                assert time.monotonic() < deadline, f"{source} is not read to {ends[source]}"
                batches = await self._consumer.getmany(timeout_ms=STEP_MS)
                for messages in batches.values():
                    self.lines += [_line(message) for message in messages]
        return self.lines

    async def ends(self) -> dict[int, int]:
        """The end of what is committed, by partition."""
        found = await self._consumer.end_offsets(self.sources)
        return {source.partition: int(end) for source, end in found.items()}


async def open_transactions(bootstrap: str, topics: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Partitions whose last stable offset is not their end, with both: a transaction is open there."""
    ends: list[dict[TopicPartition, int]] = []
    sources = [TopicPartition(name, number) for name, count in topics.items() for number in range(count)]
    for isolation in ("read_committed", "read_uncommitted"):
        consumer = _consumer(bootstrap, isolation)
        await consumer.start()
        try:
            ends.append(await consumer.end_offsets(sources))
        finally:
            await consumer.stop()
    stable, high = ends
    return {
        f"{source.topic}[{source.partition}]": (stable[source], high[source])
        for source in sources
        if stable[source] != high[source]
    }


def _consumer(bootstrap: str, isolation: str) -> Any:
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        client_id="checker",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level=isolation,
        max_partition_fetch_bytes=FETCH_BYTES,
    )


def _line(message: Any) -> Line:
    return Line(
        message.partition,
        message.offset,
        message.timestamp,
        message.key,
        message.value,
        tuple(message.headers),
    )
