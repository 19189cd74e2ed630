"""The worker: sessions in the group, one after the other for as long as the broker can be reached again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from freezepoint.errors import BrokerError
from freezepoint.foreign import refuse_foreign_ledger
from freezepoint.guard import MaskAlarm, TopicGuard
from freezepoint.leaving import cut_short_by, silence
from freezepoint.memory import MemoryBudget
from freezepoint.session import Session
from freezepoint.settings import WorkerSettings
from freezepoint.telemetry.figures import Figures
from freezepoint.transport.ports import Transport
from freezepoint_schemas.topics import Topic

log = structlog.get_logger()

BUILD_THREADS = 2
RETRY_S = 0.5
RETRY_MAX_S = 30.0
STEADY_S = 60.0
"""After so long a session, a new failure is a new beginning, not the next step of the backoff."""


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """What a worker has done: records read, results published (masked ones among them), dead letters, and the
    rollouts open and partitions held at the end."""

    records: int = 0
    results: int = 0
    masked: int = 0
    dead_letters: int = 0
    open_rollouts: int = 0
    partitions: int = 0


@dataclass(slots=True)
class Worker:
    """One process of the group.

    :meth:`run` returns at a stop, or when idle if asked to. A lost broker is waited for; what is raised cannot be
    survived: a configuration that would spoil results, a bug.
    """

    transport: Transport
    settings: WorkerSettings
    on_progress: Callable[[WorkerSummary], None] | None = None
    executor: Executor | None = None
    """Where large builds run; threads of its own by default."""
    figures: Figures = field(default_factory=Figures)
    heartbeat_at: float = 0.0
    """When the poll loop last turned, on the event loop's clock."""
    waiting_since: float | None = None
    """Since when the broker has been waited for, if it is."""
    session: Session | None = None
    _summary: WorkerSummary = field(default_factory=WorkerSummary)

    async def run(self, stop: asyncio.Event, *, until_idle: bool = False) -> WorkerSummary:
        """Work until ``stop`` is set, or with ``until_idle`` until everything that is there has been processed.

        :raises ConfigurationError: what has to be set right first.
        :raises BrokerError: with ``until_idle``, the broker failed; otherwise it is waited for.
        """
        executor = self.executor or ThreadPoolExecutor(BUILD_THREADS, thread_name_prefix="build")
        memory = MemoryBudget.of(self.settings)
        self.figures.standing = lambda: self._standing(memory)
        try:
            await self._sessions(stop, executor, memory, until_idle=until_idle)
        finally:
            memory.close()
            if executor is not self.executor:
                executor.shutdown(wait=False, cancel_futures=True)
        return self._summary

    async def _sessions(
        self, stop: asyncio.Event, executor: Executor, memory: MemoryBudget, *, until_idle: bool
    ) -> None:
        retry_s = RETRY_S
        while not stop.is_set():
            began = _now()
            try:
                await self._session(stop, executor, memory, until_idle=until_idle)
            except BrokerError as error:
                if until_idle:
                    raise
                retry_s = RETRY_S if _now() - began > STEADY_S else min(retry_s * 2, RETRY_MAX_S)
                self.waiting_since = self.waiting_since or _now()
                self.figures.recent.failed("the session in the group", error)
                log.warning("waiting_for_broker", error=str(error), retry_in_s=retry_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), retry_s)
            else:
                return

    async def _session(
        self, stop: asyncio.Event, executor: Executor, memory: MemoryBudget, *, until_idle: bool
    ) -> None:
        try:
            async with cut_short_by(stop):
                await self._work(stop, executor, memory, until_idle=until_idle)
        finally:
            if self.session is not None:
                await self._leave(self.session)

    async def _leave(self, session: Session) -> None:
        runners = session.runners
        try:
            await session.close(lambda: silence(lambda: self.transport.admin().partitions(Topic.TOKENS)))
        finally:
            self.session = None
            self._summarise(len(runners), sum(len(runner.core.open) for runner in runners))

    async def _work(
        self, stop: asyncio.Event, executor: Executor, memory: MemoryBudget, *, until_idle: bool
    ) -> None:
        guard = TopicGuard(self.transport, self.settings.topic_check_interval_s)
        await guard.check()
        await refuse_foreign_ledger(self.transport, self.settings, guard.identity)
        member = await self.transport.join(self.settings.group)
        name = self.transport.names[Topic.TOKENS]
        session = Session(member, name, self.settings, executor, memory, self.figures, guard.identity)
        self.session = session
        alarm = MaskAlarm.of(self.settings, self.figures.counts)
        while not stop.is_set():
            await session.turn()
            self.heartbeat_at, self.waiting_since = _now(), None
            self.figures.recent.sample(self.heartbeat_at, self.figures.counts)
            await guard.check_if_due()
            alarm.look(self.figures.counts)
            self._report(session)
            if until_idle and await session.idle():
                break

    def _standing(self, memory: MemoryBudget) -> dict[str, float]:
        """How things stand now; see ``telemetry.metrics`` for the names."""
        runners = self.session.runners if self.session else []
        opened = [life.opened_ms for runner in runners for life in runner.core.open.values()]
        return {
            "partitions": len(runners),
            "rollouts_open": sum(len(runner.core.open) for runner in runners),
            "oldest_open_rollout_seconds": max(0.0, time.time() - min(opened) / 1000) if opened else 0.0,
            "replay_bytes": sum(runner.core.replay_bytes for runner in runners),
            "memory_bytes": memory.used_bytes,
            "spooled_bytes": memory.spool.size_bytes,
            "spool_limit_bytes": memory.spool_bytes_max,
            "pending_bytes": memory.pending_bytes,
            "intake_paused": sum(runner.paused for runner in runners),
            "intake_stands_still": float(memory.stands_still),
        }

    def _report(self, session: Session) -> None:
        if self.on_progress is not None:
            runners = session.runners
            self._summarise(len(runners), sum(len(runner.core.open) for runner in runners))
            self.on_progress(self._summary)

    def _summarise(self, partitions: int, open_rollouts: int) -> None:
        self._summary = WorkerSummary(
            records=self.figures.counts["records"],
            results=self.figures.counts["results"],
            masked=self.figures.counts["masked"],
            dead_letters=self.figures.counts["dead_letters"],
            open_rollouts=open_rollouts,
            partitions=partitions,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
