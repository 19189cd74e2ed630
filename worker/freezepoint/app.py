"""Composition root: settings in, a running worker out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from freezepoint.health import serving
from freezepoint.settings import Settings
from freezepoint.transport.connect import connect
from freezepoint.worker import Worker, WorkerSummary


async def run_worker(
    settings: Settings,
    *,
    until_idle: bool = False,
    on_progress: Callable[[WorkerSummary], None] | None = None,
    stop: asyncio.Event | None = None,
) -> WorkerSummary:
    """Run one worker until SIGTERM, SIGINT or ``stop``; with ``until_idle`` until everything there is processed.

    :raises ConfigurationError: what has to be set right first; the message says how.
    :raises BrokerError: the broker failed for good.
    """
    stop = stop or asyncio.Event()
    async with connect(settings) as transport:
        worker = Worker(transport, settings.worker, on_progress)
        async with serving(worker, settings.http):
            with _stops_on_signals(stop):
                return await worker.run(stop, until_idle=until_idle)


@contextmanager
def _stops_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set ``stop``. Only the main thread of a process may handle signals."""
    loop = asyncio.get_running_loop()
    handled: list[signal.Signals] = []
    for name in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(name, stop.set)
        except (RuntimeError, ValueError, NotImplementedError):
            continue  # not the main thread, or no signals on this platform: the caller stops us by ``stop``
        handled.append(name)
    try:
        yield
    finally:
        for name in handled:
            loop.remove_signal_handler(name)
