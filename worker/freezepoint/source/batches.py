"""Work that is as cheap for many as for one: what comes while a batch is worked on makes up the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from freezepoint.errors import BrokerError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Batches(Generic[Item, Outcome]):
    """``work`` gets a batch and returns an outcome or an exception for each item; what it raises is everybody's."""

    def __init__(
        self, work: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome | BaseException]]]
    ) -> None:
        self._work = work
        self._waiting: list[tuple[Item, asyncio.Future[Outcome]]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Outcome:
        """Its outcome, once its batch was worked on."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            outcomes: Sequence[Outcome | BaseException]
            try:
                outcomes = await self._work([item for item, _ in batch])
            except asyncio.CancelledError:
                outcomes = [BrokerError("closed before it was done")] * len(batch)
            except Exception as error:  # noqa: BLE001 - it is the callers' to see
                outcomes = [error] * len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                _settle(future, outcome)

    async def close(self) -> None:
        """Give up what is worked on and what waits: a ``BrokerError`` to who asked."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            _settle(future, BrokerError("closed before it was begun"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def _settle(future: asyncio.Future[Outcome], outcome: Outcome | BaseException) -> None:
    if future.done():  # whoever asked has gone
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
