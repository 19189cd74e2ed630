"""How long leaving takes: as long as there is something to finish and a broker to finish it with, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from freezepoint.errors import BrokerError

SILENCE_S_MAX = 3.0
"""A broker that has not answered for so long is not waited for: what is not committed is replayed by whoever comes next."""
LOOK_S = 0.5
PROMPT_S = 1.0
"""How long a question to the broker may go on when the worker is asked to stop."""


async def silence(ask: Callable[[], Awaitable[object]], silence_s_max: float = SILENCE_S_MAX) -> None:
    """Return once ``ask`` has had no answer of the broker for so long."""
    loop = asyncio.get_running_loop()
    heard_at = loop.time()
    while loop.time() - heard_at < silence_s_max:
        try:
            async with asyncio.timeout_at(heard_at + silence_s_max):
                await ask()
        except (BrokerError, TimeoutError):
            pass  # some of its brokers may be up; the next question tells
        else:
            heard_at = loop.time()
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def cut_short_by(stop: asyncio.Event) -> AsyncIterator[None]:
    """Give the block up soon after ``stop`` is set, unless it ends by itself; what follows it is done in any case."""

    async def watch(limit: asyncio.Timeout) -> None:
        await stop.wait()
        limit.reschedule(asyncio.get_running_loop().time() + PROMPT_S)

    limit = asyncio.timeout(None)
    try:
        async with limit:
            watching = asyncio.create_task(watch(limit))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
