"""Composition root: settings in, a running worker out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from freezepoint.collector import short_pauses
from freezepoint.errors import ConfigurationError
from freezepoint.health import serving
from freezepoint.settings import Settings
from freezepoint.telemetry.figures import Figures
from freezepoint.telemetry.tracing import RolloutTracer
from freezepoint.transport.connect import KAFKA_SCHEME, connect
from freezepoint.worker import Worker, WorkerSummary


async def run_worker(
    settings: Settings,
    *,
    until_idle: bool = False,
    on_progress: Callable[[WorkerSummary], None] | None = None,
    stop: asyncio.Event | None = None,
) -> WorkerSummary:
    """Run one worker until SIGTERM, SIGINT or ``stop``; with ``until_idle`` until everything there is processed. It has the
    process's collector its way meanwhile (see ``collector``).

    :raises ConfigurationError: what has to be set right first; the message says how.
    :raises BrokerError: the broker failed for good.
    """
    stop = stop or asyncio.Event()
    async with short_pauses(), connect(settings) as transport, _tracing(settings) as tracer:
        worker = Worker(transport, settings.worker, on_progress, figures=Figures(tracer=tracer))
        async with serving(worker, settings.http):
            with _stops_on_signals(stop):
                return await worker.run(stop, until_idle=until_idle)


@asynccontextmanager
async def _tracing(settings: Settings) -> AsyncIterator[RolloutTracer | None]:
    """The tracer, where tracing is switched on. What is left of it is exported at the end.

    :raises ConfigurationError: it is switched on and OpenTelemetry is not installed.
    """
    if not settings.tracing.enabled:
        yield None
        return
    try:
        from freezepoint.telemetry import otel  # noqa: PLC0415 - nobody else pays for it, or needs it installed
    except ImportError as error:
        raise ConfigurationError(
            f"tracing.enabled takes OpenTelemetry ({error}): pip install 'freezepoint[otel]'"
        ) from None
    system = "kafka" if settings.broker.startswith(KAFKA_SCHEME) else "sqlite"
    tracer = otel.OpenTelemetryTracer(otel.exporting_provider(), system)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


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
