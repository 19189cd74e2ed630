"""Waiting for something to become true: the only place in the tests that sleeps."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_SECONDS = 0.02


def poll_until(predicate: Callable[[], T], timeout: float, message: str) -> T:
    """The first true value `predicate` returns; AssertionError with `message` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(_failure(message, timeout, value))
        time.sleep(PAUSE_SECONDS)
    return value


async def poll_until_async(predicate: Callable[[], Awaitable[T]], timeout: float, message: str) -> T:
    """As `poll_until`, for a coroutine function; the event loop runs on in between."""
    deadline = time.monotonic() + timeout
    while not (value := await predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(_failure(message, timeout, value))
        await asyncio.sleep(PAUSE_SECONDS)
    return value


def _failure(message: str, timeout: float, value: object) -> str:
    return f"not within {timeout:g} s: {message} (last value: {value!r})"
