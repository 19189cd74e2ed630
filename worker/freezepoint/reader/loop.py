"""An event loop on a thread of its own, for use from any thread and from any other loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from its making until :meth:`stop`. A daemon: a program that forgets to stop it ends all the same."""

    def __init__(self, name: str) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        asyncio.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._ready.set()
        await self._stopping.wait()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there; cancelling the future cancels it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function there, after all that was submitted and called before."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Cancel what still runs there, and wait until the thread has ended."""
        if self._thread.is_alive():
            assert self._stopping is not None
            self.call(self._stopping.set)
            self._thread.join()
