"""The sink's way to the broker: connected on first use, every wait bounded, nothing of a client ever cancelled.

A client that is cancelled in the middle of a send keeps what it was given and repeats it for ever. So a send is a task
of its own, which ends by the transport's own timeout; a caller waits for it as long as its deadline allows and leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from freezepoint.core.records import OutputRecord
from freezepoint.errors import BrokerError, BrokerUnavailableError, ConfigurationError, FreezepointError
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.transport.ports import Producer, Transport

T = TypeVar("T")
log = logging.getLogger(__name__)


class Channel:
    """A producer for one event loop. ``pending_bytes``: handed over and neither acknowledged nor given up."""

    def __init__(self, settings: Settings, deadline_s: float, pending_bytes_max: int) -> None:
        self.pending_bytes = 0
        self._settings = settings
        self._deadline_s = deadline_s
        self._pending_bytes_max = pending_bytes_max
        self._transport: Transport = connect(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[Producer] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(
        self, records: Sequence[OutputRecord], on_durable: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Begin to send. The future is for one who waits: it ends once the records are durable, or with one of our errors,
        and to cancel it ends nothing else. ``on_durable`` is called when it has ended well, before anybody hears of it.

        :raises BrokerUnavailableError: too much is under way already.
        :raises ConfigurationError: another event loop uses this sink, or it is closed.
        """
        loop = self._enter()
        size = sum(record.size for record in records)
        if self.pending_bytes and self.pending_bytes + size > self._pending_bytes_max:
            raise BrokerUnavailableError(
                f"{self.pending_bytes} bytes wait for the broker, above pending_bytes_max {self._pending_bytes_max}"
            )
        told = loop.create_future()
        self.background(self._send(records, size, told, on_durable))
        return told

    async def finished(self, told: asyncio.Future[None], began: float, doing: str) -> None:
        """Wait for what :meth:`start` gave, until ``deadline_s`` after ``began`` (``time.monotonic()``).

        :raises BrokerUnavailableError: it takes longer; it goes on by itself.
        """
        left_s = began + self._deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await told
        except TimeoutError:
            raise BrokerUnavailableError(
                f"{doing} took longer than {self._deadline_s:g} s (deadline_s)"
            ) from None

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that is kept until it ends; its error, if nobody asks, is logged and not reported as lost."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._retired)
        return task

    def _retired(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a task of the sink failed", exc_info=task.exception())

    async def _send(
        self,
        records: Sequence[OutputRecord],
        size: int,
        told: asyncio.Future[None],
        on_durable: Callable[[], None] | None,
    ) -> None:
        """Tells by itself how it ended: a turn of the event loop earlier than the end of its task would be seen."""
        self.pending_bytes += size
        try:
            producer = await self._producer()
            await producer.send(records)
        except FreezepointError as error:
            _fail(told, error)
        except Exception as error:  # noqa: BLE001 - who waits hears of it, whatever it is
            failure = BrokerError(f"sending failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            _fail(told, failure)
        else:
            if not told.done():
                told.set_result(None)
            if on_durable is not None:
                on_durable()
        finally:
            self.pending_bytes -= size
            told.cancel()  # what is not told by now was cancelled

    async def _producer(self) -> Producer:
        """One attempt to connect at a time, shared by all that wait; after a failure the next one tries again."""
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            self._connecting = self.background(self._transport.producer())
        if not self._connecting.done():
            await asyncio.wait({self._connecting})
        return self._connecting.result()

    def _enter(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ConfigurationError("the sink is closed")
        if self._loop is loop:
            return loop
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigurationError(
                "the sink is in use in another event loop; make one TokenSink for each process and loop"
            )
        if self._loop is not None:  # that loop ended without closing the sink; its connections went with it
            self._transport = connect(self._settings)
            self._connecting, self.pending_bytes = None, 0
            self._tasks.clear()
        self._loop = loop
        return loop

    async def close(self) -> None:
        """Wait for what is under way, within the deadline, and release everything. Closing again does nothing."""
        if self._closed:
            return
        if self._loop is not None:
            self._enter()
        self._closed = True
        if self._loop is None:  # nothing was ever opened
            return
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._deadline_s)
        await self._transport.close()
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


def _fail(told: asyncio.Future[None], error: FreezepointError) -> None:
    if told.done():  # nobody waits any more
        log.debug("a send of the sink failed", exc_info=error)
    else:
        told.set_exception(error)
        told.exception()  # counts as seen, should its waiter's time be up in this very moment
