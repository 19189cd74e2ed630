"""The sink's way to the broker: connected on first use, every wait bounded, nothing of a client ever cancelled.

A client that is cancelled in the middle of a send keeps what it was given and repeats it for ever. So a send is a task
of its own, which ends by the transport's own timeout; a caller waits for it as long as its deadline allows and leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
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

    def start(self, records: Sequence[OutputRecord]) -> asyncio.Task[None]:
        """Begin to send; the task ends once the records are durable, or with one of our errors.

        :raises BrokerUnavailableError: too much is under way already.
        :raises ConfigurationError: another event loop uses this sink, or it is closed.
        """
        self._enter()
        size = sum(record.size for record in records)
        if self.pending_bytes and self.pending_bytes + size > self._pending_bytes_max:
            raise BrokerUnavailableError(
                f"{self.pending_bytes} bytes wait for the broker, above pending_bytes_max {self._pending_bytes_max}"
            )
        return self.background(self._send(records, size))

    async def finished(self, task: asyncio.Task[T], began: float, doing: str) -> T:
        """The task's result, waited for until ``deadline_s`` after ``began`` (``time.monotonic()``).

        :raises BrokerUnavailableError: it takes longer; it goes on by itself.
        """
        left_s = began + self._deadline_s - time.monotonic()
        done, _ = await asyncio.wait({task}, timeout=max(0.0, left_s))
        if not done:
            raise BrokerUnavailableError(f"{doing} took longer than {self._deadline_s:g} s (deadline_s)")
        return task.result()

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

    async def _send(self, records: Sequence[OutputRecord], size: int) -> None:
        self.pending_bytes += size
        try:
            producer = await self._producer()
            await producer.send(records)
        except FreezepointError:
            raise
        except Exception as error:
            raise BrokerError(f"sending failed: {type(error).__name__}: {error}") from error
        finally:
            self.pending_bytes -= size

    async def _producer(self) -> Producer:
        """One attempt to connect at a time, shared by all that wait; after a failure the next one tries again."""
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            self._connecting = self.background(self._transport.producer())
        if not self._connecting.done():
            await asyncio.wait({self._connecting})
        return self._connecting.result()

    def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ConfigurationError("the sink is closed")
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigurationError(
                "the sink is in use in another event loop; make one TokenSink for each process and loop"
            )
        if self._loop is not None:  # that loop ended without closing the sink; its connections went with it
            self._transport = connect(self._settings)
            self._connecting, self.pending_bytes = None, 0
            self._tasks.clear()
        self._loop = loop

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
