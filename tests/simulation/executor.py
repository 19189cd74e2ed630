"""Builds that take virtual time: they wait for a thread, run, and answer later."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SlowExecutor(Executor):
    """Jobs may be overtaken by later ones. A job that began can no longer be cancelled, as with threads."""

    def __init__(self, rng: random.Random, delay_s_max: float) -> None:
        self._rng = rng
        self._delay_s_max = delay_s_max

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        asyncio.get_running_loop().call_later(self._delay(), self._begin, future, lambda: fn(*args, **kwargs))
        return future

    def _begin(self, future: Future[Any], job: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - as a thread pool does: whoever waits for it gets it
            future.set_exception(error)
        else:
            asyncio.get_running_loop().call_later(self._delay(), future.set_result, result)

    def _delay(self) -> float:
        return self._rng.random() ** 4 * self._delay_s_max
