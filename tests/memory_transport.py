"""A broker that is a list: for tests of what is sent, and of what happens while an acknowledgement is out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerUnavailableError
from freezepoint.sink import TokenSink
from freezepoint.sink import channel as sink_channel


@dataclass
class MemoryTransport:
    """Acknowledges at once, unless ``held``; fails while ``down``. ``sent``: what is durable, in order."""

    sent: list[OutputRecord] = field(default_factory=list)
    held: asyncio.Event | None = None
    down: bool = False
    attempts: int = 0
    closed: int = 0

    async def producer(self) -> MemoryTransport:
        return self

    async def send(self, records: Sequence[OutputRecord]) -> None:
        self.attempts += 1
        if self.held is not None:
            await self.held.wait()
        if self.down:
            raise BrokerUnavailableError("down")
        self.sent += records

    async def close(self) -> None:
        self.closed += 1

    def records(self) -> list[InputRecord]:
        """As the only partition of a topic would hold them."""
        return list(as_log(self.sent))


def as_log(records: Iterable[OutputRecord]) -> Iterator[InputRecord]:
    for offset, record in enumerate(records):
        yield InputRecord(0, offset, 1_000_000 + offset, record.key, record.value, record.headers)


@contextmanager
def memory_sink(**options: Any) -> Iterator[tuple[TokenSink, MemoryTransport]]:
    """A sink on such a broker."""
    transport = MemoryTransport()
    with patch.object(sink_channel, "connect", lambda _settings: transport):
        yield TokenSink(**options), transport
