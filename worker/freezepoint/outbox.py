"""What waits to be published of one partition, in offset order, and the builds that it waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass, field, replace

from freezepoint.building import result_of, tokens_max
from freezepoint.core.effects import DeadLetter, Effect, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.ledger import Verdict
from freezepoint.core.records import OutputRecord
from freezepoint.evidence import EvidenceKeeper
from freezepoint.memory import MemoryBudget
from freezepoint.settings import WorkerSettings
from freezepoint.spool import Spool
from freezepoint_schemas import codec
from freezepoint_schemas.topics import Topic

INLINE_TOKENS_MAX = 3_000_000
"""A log whose result could be larger is never built on the event loop: writing so many tokens takes 20 ms."""

INLINE_NOTES_MAX = 10_000
"""The same for what a log knows of calls that it has no entry of."""


@dataclass(frozen=True, slots=True)
class Built:
    """A result's record, what the ledger will say of it, and when the rollout froze, on the event loop's clock."""

    verdict: Verdict
    record: OutputRecord
    frozen_at: float = 0.0


@dataclass(slots=True)
class _Item:
    effect: Effect
    size_bytes: int
    built: Built | asyncio.Future[Built] | None = None
    job: ConcurrentFuture[Built] | None = None
    added_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    @property
    def ready(self) -> bool:
        return not isinstance(self.built, asyncio.Future) or self.built.done()

    def shed(self) -> None:
        """The result is built: what it was built from is needed no more."""
        if isinstance(self.effect, Freeze):
            self.effect = replace(self.effect, log=self.effect.log.without_entries())


def build(
    log: FrozenLog,
    settings: WorkerSettings,
    spool: Spool | None = None,
    evidence: EvidenceKeeper | None = None,
) -> Built:
    """The result of a frozen log, encoded. What of it is spilled is taken from the spool; a masked one's log is offered to
    ``evidence``. Any thread may run it."""
    if log.spilled and spool is not None:
        log = log.with_entries(spool.take(log.spilled))
    result = result_of(log, settings)
    if evidence is not None and result.mask_sample:
        evidence.offer(log)
    key = log.rollout_id.encode("ascii")
    del log  # a large one goes before its result is encoded, which takes as much again
    return Built(Verdict.of(result), OutputRecord(Topic.TRAJECTORIES, key, codec.encode_result(result)))


def payload_bytes(log: FrozenLog) -> int:
    """About how much memory a log will hold: decides where it is built and when intake pauses."""
    return log.memory_bytes + sum(ref.length for ref in log.spilled)


def is_quick(log: FrozenLog, settings: WorkerSettings) -> bool:
    """Whether its build holds the event loop for a few milliseconds. A thread would take longer for it and hold up the loop as
    well, which has to wait for the interpreter after every system call."""
    return (
        payload_bytes(log) <= settings.inline_build_bytes_max
        and not log.spilled
        and len(log.intents) + len(log.cancelled) + len(log.marks) <= INLINE_NOTES_MAX
        and tokens_max(log, settings) <= INLINE_TOKENS_MAX
    )


class Outbox:
    """Effects in offset order. Small logs are built at once, large ones on ``executor``; ``on_ready`` is called when
    something became publishable. What was taken counts as waiting until :meth:`settle`."""

    def __init__(
        self, settings: WorkerSettings, executor: Executor, memory: MemoryBudget, on_ready: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._tools = (settings, memory.spool, memory.evidence)
        self._executor = executor
        self._memory = memory
        self._on_ready = on_ready
        self._items: deque[_Item] = deque()
        self._taken_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, effect: Effect) -> None:
        item = self._begin(effect)
        self._items.append(item)
        self._memory.hold(item.size_bytes)
        if self._items[0].ready:
            self._on_ready()

    def _begin(self, effect: Effect) -> _Item:
        if isinstance(effect, DeadLetter):
            return _Item(effect, effect.record.size)
        if is_quick(effect.log, self._settings):
            built = build(effect.log, *self._tools)
            item = _Item(effect, built.record.size, built)
            item.shed()
            return item
        job = self._executor.submit(build, effect.log, *self._tools)
        future = asyncio.wrap_future(job)
        item = _Item(effect, payload_bytes(effect.log), future, job)
        future.add_done_callback(lambda _: self._built(item))
        return item

    def _built(self, item: _Item) -> None:
        """A build has ended, well or not."""
        future = item.built
        if isinstance(future, asyncio.Future) and not future.cancelled() and future.exception() is None:
            item.shed()
            self._memory.drop(item.size_bytes)
            item.size_bytes = future.result().record.size
            self._memory.hold(item.size_bytes)
        self._on_ready()

    def take_ready(self) -> list[tuple[Freeze, Built] | DeadLetter]:
        """Remove and return the longest publishable prefix that fits one transaction, at least one item if any is.

        Re-raises what a build raised: the builder masks every input, so that is a bug or the machine's end.
        """
        taken: list[tuple[Freeze, Built] | DeadLetter] = []
        size = 0
        while self._items and self._items[0].ready and len(taken) < self._settings.transaction_results_max:
            item = self._items[0]
            ready = self._finished(item)
            record = ready.record if isinstance(ready, DeadLetter) else ready[1].record
            size += record.size
            if taken and size > self._settings.transaction_bytes_max:
                break
            self._items.popleft()
            self._taken_bytes += item.size_bytes
            taken.append(ready)
        return taken

    def settle(self) -> None:
        """What was taken is published, or will not be."""
        taken, self._taken_bytes = self._taken_bytes, 0
        self._memory.drop(taken)

    @staticmethod
    def _finished(item: _Item) -> tuple[Freeze, Built] | DeadLetter:
        if isinstance(item.effect, DeadLetter):
            return item.effect
        built = item.built.result() if isinstance(item.built, asyncio.Future) else item.built
        if built is None:
            raise AssertionError("a freeze without a build")
        return item.effect, replace(built, frozen_at=item.added_at)

    def abandon(self) -> None:
        """Forget everything: another owner replays it."""
        for item in self._items:
            if item.job is not None and item.job.cancel() and isinstance(item.effect, Freeze):
                self._memory.spool.free(item.effect.log.spilled)  # else the build has taken it, or will
            self._memory.drop(item.size_bytes)
            item.built = None
        self._items.clear()
