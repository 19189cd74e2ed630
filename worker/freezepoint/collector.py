"""The cycle collector, kept from stopping a worker.

Open logs are up to millions of objects, none of them in a cycle. A collection of the oldest generation looks at all of them
nevertheless: a second for 170,000 calls, in which nothing is read, published or told the broker. So what survives two young
collections is set aside (``gc.freeze``), where only its reference count frees it, as it would have in any case. Cycles that
live longer than that, of a client that is replaced for example, wait for a whole collection, and these are so rare that
they take a ten-thousandth of the time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

WHOLE_SHARE = 1 / 10_000
WHOLE_INTERVAL_S_MIN = 60.0


@contextmanager
def young_collections() -> Iterator[None]:
    """Within it, collections take milliseconds, whatever this process holds. For who owns the process: the collector is
    all its threads'. What was set aside before stays so."""
    found = gc.get_freeze_count()
    gc.callbacks.append(_set_aside)
    gc.freeze()
    try:
        yield
    finally:
        gc.callbacks.remove(_set_aside)
        if not found:
            gc.unfreeze()


@asynccontextmanager
async def short_pauses() -> AsyncIterator[None]:
    """:func:`young_collections`, and a whole one now and then."""
    with young_collections():
        collecting = asyncio.create_task(_collect_now_and_then(), name="collector")
        try:
            yield
        finally:
            collecting.cancel()
            await asyncio.wait({collecting})


def _set_aside(phase: str, info: dict[str, Any]) -> None:
    """Called by the collector: generation 0 goes on to 1, 1 and what a whole collection left is set aside."""
    if phase == "stop" and info["generation"] > 0:
        gc.freeze()


async def _collect_now_and_then() -> None:
    interval_s = WHOLE_INTERVAL_S_MIN
    while True:
        await asyncio.sleep(interval_s)
        interval_s = max(WHOLE_INTERVAL_S_MIN, collect_all() / WHOLE_SHARE)


def collect_all() -> float:
    """One whole collection; how many seconds it took."""
    began = time.perf_counter()
    gc.unfreeze()
    gc.collect()
    return time.perf_counter() - began
