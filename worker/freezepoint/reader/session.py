"""One reader at work: its thread, its engine, and how items get from there to whoever asks, from any thread or loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Self, TypeVar

from freezepoint.errors import ConfigurationError
from freezepoint.reader.acks import Claim
from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.engine import Engine, Slot
from freezepoint.reader.groups import GroupAssembler, GroupLimits, GroupRule
from freezepoint.reader.loop import LoopThread
from freezepoint.reader.options import ReadOptions
from freezepoint.reader.shelf import GroupShelf, Shelf, SingleShelf
from freezepoint.reader.trajectory import RolloutGroup, Trajectory
from freezepoint.settings import ReaderSettings, Settings
from freezepoint.transport.connect import connect

T = TypeVar("T", Trajectory, RolloutGroup)


class Session:
    """Begins with the first iteration, which decides how results are read."""

    def __init__(
        self, settings: Settings, options: ReadOptions, clock: Callable[[], float], *, auto_ack: bool
    ) -> None:
        self.auto_ack = auto_ack
        self._settings = settings
        self._options = options
        self._clock = clock
        self._changing = threading.Lock()
        self._rule: GroupRule | None = None
        self._running: tuple[LoopThread, Engine] | None = None
        self._closed = False

    @property
    def counts(self) -> ReaderCounts:
        return self._running[1].counts if self._running is not None else ReaderCounts()

    def begin(self, rule: GroupRule | None) -> None:
        """Start, if it was not. ``rule`` None: result by result.

        :raises ConfigurationError: it reads in another way, or is closed.
        """
        with self._changing:
            if self._closed:
                raise ConfigurationError("the reader is closed; make a new one")
            if self._running is None:
                self._rule = rule
                thread = LoopThread("freezepoint-reader")
                shelf = _shelf(rule, self._settings.reader)
                engine = Engine(
                    connect(self._settings), self._options, self._settings.reader, shelf, self._clock
                )
                thread.call(engine.start)
                self._running = thread, engine
            if self._rule != rule:
                raise ConfigurationError(
                    "a reader is read in one way: result by result, or in groups of one kind"
                )

    def fill(self, slot: Slot) -> Future[None] | None:
        """Ask for the next item. None: the reader was closed, and there is none."""
        with self._changing:  # what is submitted before the closing is answered by it
            if self._closed:
                return None
            thread, engine = self._begun()
            return thread.submit(engine.fill(slot))

    def interrupted(self, slot: Slot, future: Future[None]) -> None:
        """Whoever waited was cancelled or interrupted: what the slot may hold is the next item again."""
        future.cancel()
        thread, engine = self._begun()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            thread.call(engine.give_back, slot)

    def ack(self, item: Trajectory | RolloutGroup) -> None:
        if self._running is None or self._closed:
            return
        thread, engine = self._running
        thread.call(engine.ack, _claims(item))

    def commit(self) -> Future[None] | None:
        """None: there is nothing to store."""
        if self._running is None or self._closed:
            return None
        thread, engine = self._running
        return thread.submit(engine.commit())

    def close(self) -> Future[None] | None:
        """None: nothing is open, or somebody else closes it. Follow it by :meth:`stop`."""
        with self._changing:
            if self._closed or self._running is None:
                self._closed = True
                return None
            self._closed = True
        thread, engine = self._running
        return thread.submit(engine.close())

    def stop(self) -> None:
        """End the thread."""
        self._begun()[0].stop()

    def _begun(self) -> tuple[LoopThread, Engine]:
        assert self._running is not None
        return self._running


def _shelf(rule: GroupRule | None, limits: ReaderSettings) -> Shelf:
    if rule is None:
        return SingleShelf()
    held = GroupLimits(limits.group_results_max, limits.group_bytes_max, limits.remembered_groups_max)
    return GroupShelf(GroupAssembler(rule, held))


def _claims(item: Trajectory | RolloutGroup) -> list[Claim]:
    if isinstance(item, Trajectory):
        return [item.claim]
    return [member.claim for member in (*item.members, *item.superseded)]


class _Items(Generic[T]):
    """Where an iteration stands. One that has begun ends when the reader is closed, wherever it is by then."""

    def __init__(self, session: Session, rule: GroupRule | None) -> None:
        self._session = session
        self._rule = rule
        self._has_begun = False
        self._current: T | None = None

    def _ask(self, slot: Slot) -> Future[None] | None:
        if not self._has_begun:
            self._session.begin(self._rule)
            self._has_begun = True
        current, self._current = self._current, None
        if current is not None and self._session.auto_ack:
            self._session.ack(current)
        return self._session.fill(slot)

    def _taken(self, slot: Slot) -> T | None:
        self._current = slot.handed  # type: ignore[assignment] # the shelf holds what the rule asked for
        return self._current


class AsyncItems(_Items[T]):
    """An asynchronous iteration, on whatever loop it is awaited."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        slot = Slot()
        future = self._ask(slot)
        if future is None:
            raise StopAsyncIteration
        try:
            await asyncio.wrap_future(future)
        except BaseException:
            self._session.interrupted(slot, future)
            raise
        item = self._taken(slot)
        if item is None:
            raise StopAsyncIteration
        return item


class BlockingItems(_Items[T]):
    """A plain iteration."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        slot = Slot()
        future = self._ask(slot)
        if future is None:
            raise StopIteration
        try:
            future.result()
        except BaseException:
            self._session.interrupted(slot, future)
            raise
        item = self._taken(slot)
        if item is None:
            raise StopIteration
        return item
