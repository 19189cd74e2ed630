"""A TCP proxy in front of a broker that reads requests as they pass: it delays, holds and cuts, of whom and when it is told."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

PRODUCE, FETCH, OFFSET_COMMIT, JOIN_GROUP, SYNC_GROUP = 0, 1, 8, 11, 14
INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN = 22, 24, 26
CHUNK_BYTES = 256 * 1024
NAMES = {
    PRODUCE: "Produce",
    FETCH: "Fetch",
    OFFSET_COMMIT: "OffsetCommit",
    JOIN_GROUP: "JoinGroup",
    SYNC_GROUP: "SyncGroup",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS_TO_TXN: "AddPartitionsToTxn",
    END_TXN: "EndTxn",
}


class Verdict(Enum):
    """What becomes of a request."""

    PASS = auto()
    CUT = auto()
    """The connection breaks before the broker has seen it."""
    ANSWER_LOST = auto()
    """The broker sees it, and the connection breaks before its answer arrives."""
    LATE = auto()
    """The connection breaks for the client, and the request reaches the broker only with :meth:`Proxy.deliver_late`."""


_TRANSACTIONAL = frozenset({PRODUCE, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN})
_HEADER_BYTES = 10


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client, as far as a fault needs to know. ``transactional_id``: of those that begin with it."""

    api_key: int
    client_id: str
    transactional_id: str | None = None

    @classmethod
    def parse(cls, frame: bytes) -> Request:
        """The header is of version 1, as all of the client's requests but for some of its very newest."""
        api_key, _version, _correlation, length = struct.unpack_from(">hhih", frame)
        body = _HEADER_BYTES + max(length, 0)
        client_id = frame[_HEADER_BYTES:body].decode()
        if api_key not in _TRANSACTIONAL:
            return cls(api_key, client_id)
        (length,) = struct.unpack_from(">h", frame, body)
        name = frame[body + 2 : body + 2 + length].decode() if length >= 0 else None
        return cls(api_key, client_id, name)


Hook = Callable[[Request], Awaitable[Verdict]]


async def let_pass(_: Request) -> Verdict:
    return Verdict.PASS


@dataclass(slots=True)
class Proxy:
    """``hook`` is asked about each request, and the connection waits until it has answered; ``delay_s`` holds up every
    chunk in both directions; :meth:`cut` breaks what is connected, ``closed`` refuses what would connect."""

    port: int
    target_port: int
    hook: Hook = let_pass
    delay_s: float = 0.0
    closed: bool = False
    cuts: int = 0
    answers_lost: int = 0
    _server: asyncio.Server | None = None
    _late: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]] = field(default_factory=list)
    _links: set[_Link] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for _, writer, _ in self._late:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._server.wait_closed()

    def cut(self, client_id: str | None = None) -> int:
        """Break all connections, or one client's; how many."""
        links = [link for link in self._links if client_id in (None, link.client_id)]
        for link in links:
            link.cut()
        self.cuts += len(links)
        return len(links)

    async def deliver_late(self) -> int:
        """Let the broker have what was held back, as a slow network would, and wait for its answers; how many."""
        late, self._late = self._late, []
        for reader, writer, frame in late:
            writer.write(frame)
            await writer.drain()
            await reader.read(CHUNK_BYTES)
            writer.transport.abort()
        return len(late)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # a broken connection is what a proxy is for
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            return
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        link = _Link(self, (reader, writer), (to_reader, to_writer))
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
            if link.late is None:
                to_writer.transport.abort()
            else:
                self._late.append((to_reader, to_writer, link.late))


_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True, eq=False)
class _Link:
    """One client's connection through the proxy."""

    proxy: Proxy
    client: _Side
    broker: _Side
    client_id: str | None = None
    answer_lost: bool = False
    late: bytes | None = None

    async def run(self) -> None:
        pumps = {asyncio.create_task(self._requests()), asyncio.create_task(self._answers())}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for pump in pumps:
                with suppress(asyncio.CancelledError):
                    pump.exception()

    def cut(self) -> None:
        self.client[1].transport.abort()
        self.broker[1].transport.abort()

    async def _requests(self) -> None:
        reader, writer = self.client[0], self.broker[1]
        while True:
            try:
                size = await reader.readexactly(4)
                frame = await reader.readexactly(int.from_bytes(size, "big"))
            except asyncio.IncompleteReadError:
                return
            request = Request.parse(frame)
            self.client_id = request.client_id
            verdict = await self.proxy.hook(request)
            if verdict is Verdict.CUT:
                return
            if verdict is Verdict.LATE:
                self.late = size + frame
                return
            self.answer_lost |= verdict is Verdict.ANSWER_LOST
            await self._delay()
            writer.write(size + frame)
            await writer.drain()

    async def _answers(self) -> None:
        reader, writer = self.broker[0], self.client[1]
        while chunk := await reader.read(CHUNK_BYTES):
            if self.answer_lost:
                self.proxy.answers_lost += 1
                return
            await self._delay()
            writer.write(chunk)
            await writer.drain()

    async def _delay(self) -> None:
        if self.proxy.delay_s:
            await asyncio.sleep(self.proxy.delay_s)
