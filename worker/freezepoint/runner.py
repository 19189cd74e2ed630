"""One leased partition at work: records into the fold, effects into transactions, one in flight at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import structlog

from freezepoint.core.effects import DeadLetter, Effect, Freeze
from freezepoint.core.partition import PartitionCore
from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerError, BrokerUnavailableError, StalledError
from freezepoint.guard import DeadLetterGuard
from freezepoint.memory import MemoryBudget
from freezepoint.outbox import Built, Outbox
from freezepoint.settings import WorkerSettings
from freezepoint.telemetry.figures import Figures
from freezepoint.telemetry.recent import Finished
from freezepoint.transport.ports import Lease

log = structlog.get_logger()

YIELD_AFTER_S = 0.02
"""How long a feed may hold the event loop, on which heartbeats run too."""

TICK_S_MAX = 10.0
TICKS_PER_TIMEOUT = 100
"""How often idle rollouts are looked for: this often in a timeout, and every ``TICK_S_MAX`` seconds at least."""

LAG_S_MAX = 2.0
"""How long somebody who asks for the lag may have to wait for the broker."""

FINISH_S = 5.0
"""How long a transaction in flight may still take when there is no time left."""

HINT_INTERVAL_S = 1.0
"""How often the group's offset is committed at most."""

MARK_INTERVAL_S = 30.0
"""The same where only what stands beside it has changed: that is compared with what retention has removed."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Where the fold stood when a transaction's ledger records were taken; reading goes on while it is in flight.

    ``applied``: below it every record was folded in, by whichever owner; while a replay goes on, ``next_offset`` is behind it.
    """

    next_offset: int
    watermark: int
    applied: int


class PartitionRunner:
    """Owns a lease and a fold. ``failure`` is set once the lease is dead: close it and acquire anew.

    Any doubt about a transaction ends the runner, because the fold already counts it as committed.
    """

    def __init__(
        self,
        lease: Lease,
        core: PartitionCore,
        settings: WorkerSettings,
        *,
        executor: Executor,
        memory: MemoryBudget,
        figures: Figures,
    ) -> None:
        self.lease = lease
        self.core = core
        self.failure: BrokerError | None = None
        self._settings = settings
        self._figures = figures
        self._wake = asyncio.Event()
        self._memory = memory
        memory.register(core)
        self._where = f"{core.config.topic_name}[{lease.partition}]"
        self._garbage = DeadLetterGuard(settings.dead_letter_ratio_max, settings.dead_letter_window)
        self._tracer = (
            None
            if figures.tracer is None
            else figures.tracer.partition(core.config.topic_name, lease.partition, settings.group)
        )
        self._outbox = Outbox(settings, executor, memory, self._wake.set)
        self._renewal: int | None = None
        self._stopping = False
        self._paused = False
        self._abandoned = False
        self._carrying = False
        self._publishing = False
        self._backlog: deque[InputRecord] = deque()
        self._expecting = False
        self._draining = False
        self._ticked_at: float | None = None
        self._fed_at = _now()
        self._tick_s = min(TICK_S_MAX, settings.rollout_timeout_s / TICKS_PER_TIMEOUT)
        self._recorded_clock = core.clock.now
        self._recorded_offset = core.next_offset
        self._recorded_at = _now()
        self._landed = self._taken() if core.applied_offset >= 0 else None  # the ledger says so
        self._hinted = (lease.committed, lease.recorded)
        self._hinted_at = 0.0
        self.task = asyncio.create_task(self._run(), name=f"partition-{lease.partition}")

    @property
    def paused(self) -> bool:
        """Whether intake waits for room."""
        return self._paused

    async def status(self) -> dict[str, Any]:
        """How the partition stands, for people and scripts. ``lag`` is None where the broker does not say in time."""
        try:
            async with asyncio.timeout(LAG_S_MAX):
                lag = max(0, await self.lease.end() - self.core.next_offset)
        except (BrokerError, TimeoutError):
            lag = None
        return {
            "partition": self.lease.partition,
            "lag": lag,
            "next_offset": self.core.next_offset,
            "watermark": self.core.watermark(),
            "open_rollouts": len(self.core.open),
            "replay_bytes": self.core.replay_bytes,
            "backlog": len(self._backlog),
            "unpublished": len(self._outbox),
            "paused": self._paused,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be published."""
        busy = len(self._outbox) or self._backlog or self._publishing or self._renewal is not None
        return not (busy or self.core.dirty)

    def expect(self) -> None:
        """Records are on their way to :meth:`feed`: until they are folded in, nothing is known to be idle."""
        self._expecting = True

    async def feed(self, records: Sequence[InputRecord]) -> None:
        """Take records in and fold in what there is room for; the rest follows as room comes."""
        self._backlog.extend(records)
        self._expecting = False
        await self._drain()

    @property
    def _feeding(self) -> bool:
        return self._expecting or bool(self._backlog)

    async def _drain(self) -> None:
        """Fold the backlog in while there is room. Yields to the event loop every ``YIELD_AFTER_S``."""
        if self._draining:
            return
        self._draining = True
        now = asyncio.get_running_loop().time
        began = now()
        try:
            while self._backlog and not self._abandoned and (self._memory.has_room or not len(self._outbox)):
                self._fold(self._backlog.popleft())
                if now() - began > YIELD_AFTER_S:
                    await asyncio.sleep(0)
                    began = now()
        finally:
            self._draining = False
        self._fed_at = now()
        if self._backlog:
            self._memory.wake_when_room(self._wake.set)
        if self.core.dirty:
            self._wake.set()
        self._regulate()

    def _fold(self, record: InputRecord) -> None:
        if record.offset < self.core.next_offset:
            return  # delivered again after a new assignment
        if self._tracer is not None:
            self._tracer.read(record)
        for effect in self.core.feed(record):
            self._outbox.add(effect)
            if isinstance(effect, DeadLetter):
                self._garbage.letter(effect.reason)
            elif self._tracer is not None:
                self._tracer.froze(effect.log)
        if self._tracer is not None:
            self._tracer.folded(record, self.core.open)
        self._memory.relieve(self.core)
        self._garbage.record(self._where)

    def renew(self, generation: int) -> None:
        """A new assignment gave the partition back: prove it and go on."""
        self._renewal = generation
        self._wake.set()

    async def stop(self, *, drain_s: float, lost: asyncio.Event) -> None:
        """Publish what is frozen for at most that long (0: drop it, another owner replays it), then free the lease.

        A transaction in flight is finished, unless the broker is ``lost``, or takes ``FINISH_S`` longer than there was
        time: then its outcome is the ledger's to tell.
        """
        self._stopping = True
        if not drain_s:
            self._abandon()
        self._wake.set()
        losing = asyncio.create_task(lost.wait())
        ends: set[asyncio.Task[Any]] = {self.task, losing}
        try:
            await asyncio.wait(ends, timeout=drain_s or None, return_when=asyncio.FIRST_COMPLETED)
            self._abandon()
            if not lost.is_set():
                await asyncio.wait(ends, timeout=FINISH_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            losing.cancel()
            self.task.cancel()
        await asyncio.wait({self.task})
        await self.lease.close()
        if not self.task.cancelled() and self.task.exception() is not None:
            await self.task

    def _abandon(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            self._memory.unregister(self.core)
        self._outbox.abandon()
        self._wake.set()

    async def _run(self) -> None:
        try:
            while await self._step():
                pass
        except BrokerError as error:
            self.failure = error
            self._abandon()

    async def _step(self) -> bool:
        """Publish what is ready. False when there is nothing more to do."""
        await self._wait()
        if self._abandoned:
            return False
        if self._renewal is not None:
            await self._renew()
            return True
        if self._backlog and not self._stopping:
            await self._drain()
        await self._tick()
        await self._hint()
        batch = self._outbox.take_ready()
        if batch or self.core.dirty or self._progress_due() or self._carry_due:
            await self._publish(batch)
            return True
        return not (self._stopping and not len(self._outbox))

    async def _wait(self) -> None:
        if self._stopping and not len(self._outbox):
            return
        try:
            async with asyncio.timeout(min(self._tick_s, self._settings.progress_interval_ms / 1000)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
        if not self._stopping and self._renewal is None:
            await asyncio.sleep(self._settings.flush_interval_ms / 1000)  # let a batch gather

    async def _tick(self) -> None:
        """Let the partition's clock run while it is caught up, and time out what has been idle on it for too long.

        A turn counts for two ticks at most: a process that was stopped saw nothing meanwhile.
        """
        now = _now()
        if self._ticked_at is not None and now - self._ticked_at < self._tick_s:
            return
        elapsed_s = 0.0 if self._ticked_at is None else min(now - self._ticked_at, 2 * self._tick_s)
        self._ticked_at = now
        self._memory.look(now)
        self._regulate()  # the spool may have been relieved by another partition
        if self._feeding or not await self._is_caught_up() or not self.core.open:
            return
        for effect in self.core.time_out(elapsed_s):
            log.warning("rollout_timed_out", partition=self.lease.partition, rollout_id=_rollout_of(effect))
            self._outbox.add(effect)
            if self._tracer is not None and isinstance(effect, Freeze):
                self._tracer.froze(effect.log)

    async def _is_caught_up(self) -> bool:
        """Whether there is nothing more to read.

        :raises StalledError: there is, and it has not come for far too long.
        """
        try:
            caught_up = await self.lease.caught_up()
        except BrokerUnavailableError:
            caught_up = False  # it may come back; whether it does in time shows below
        if caught_up or self._paused or self._feeding:
            self._fed_at = _now()
        elif _now() - self._fed_at > self._settings.stall_timeout_s:
            raise StalledError(
                f"partition {self.lease.partition} has records behind offset {self.core.next_offset} that the client does "
                f"not deliver for {self._settings.stall_timeout_s:g} s"
            )
        return caught_up and not self._feeding

    @property
    def _carry_due(self) -> bool:
        """Whether lives were left over for which there is room by now. A stop does not wait for them."""
        return self._carrying and self._memory.has_room and not self._stopping

    def _progress_due(self) -> bool:
        if self.core.clock.now - self._recorded_clock > self._settings.rollout_timeout_s / TICKS_PER_TIMEOUT:
            return True
        if self.core.next_offset == self._recorded_offset:
            return False
        elapsed_ms = (_now() - self._recorded_at) * 1000
        return self._stopping or elapsed_ms >= self._settings.progress_interval_ms

    async def _publish(self, batch: Sequence[tuple[Freeze, Built] | DeadLetter]) -> None:
        """One transaction: the batch, the ledger records that belong to it, and the progress."""
        records = [item.record if isinstance(item, DeadLetter) else self._traced(*item) for item in batch]
        carried = self._carry()
        records += carried
        decided = self.core.take(
            item if isinstance(item, DeadLetter) else (item[0], item[1].verdict) for item in batch
        )
        taken = self._taken()
        self._publishing = True
        try:
            await self.lease.publish([*records, *decided])
        finally:
            self._publishing = False
            self._memory.drop(sum(record.size for record in carried))
            self._outbox.settle()
        self._count(batch)
        await self._recorded(taken)
        if len(self._outbox) or self._carrying:
            self._wake.set()
        self._regulate()

    def _traced(self, freeze: Freeze, built: Built) -> OutputRecord:
        """The result's record, with the trace that it belongs to."""
        if self._tracer is None:
            return built.record
        headers = self._tracer.publishing(freeze.log, built.verdict)
        return replace(built.record, headers=(*built.record.headers, *headers))

    def _carry(self) -> list[OutputRecord]:
        """Old open lives go into the ledger, so that a restart need not replay from their beginning: in each transaction as
        many as there is room for. Without any, intake stands still, and with it what a replay would have to read.

        They count as waiting to be published until the transaction has ended.
        """
        records: list[OutputRecord] = []
        size = 0
        self._carrying = False
        for life in self.core.overdue(self._settings.replay_bytes_max):
            self._carrying = size > self._settings.transaction_bytes_max or not self._memory.has_room
            if self._carrying:
                break  # the next transaction goes on
            carried = self.core.carry(life, self._memory.spool.read(life.spilled))
            records += carried
            carried_bytes = sum(record.size for record in carried)
            size += carried_bytes
            self._memory.hold(carried_bytes)
            log.info("rollout_carried", partition=self.lease.partition, rollout_id=life.rollout_id)
        return records

    async def _renew(self) -> None:
        generation, self._renewal = self._renewal, None
        if generation is None:
            return
        records = self.core.take([])
        taken = self._taken()
        self._publishing = True
        try:
            await self.lease.renew(generation, taken.next_offset, records)
        finally:
            self._publishing = False
        if self._paused:
            self.lease.pause()
        await self._recorded(taken)
        self._wake.set()

    def _taken(self) -> _Taken:
        return _Taken(self.core.next_offset, self.core.watermark(), self.core.applied_offset + 1)

    async def _recorded(self, taken: _Taken) -> None:
        """A transaction landed."""
        self._recorded_offset = taken.next_offset
        self._recorded_clock = self.core.clock.now
        self._recorded_at = _now()
        self._landed = taken
        await self._hint()

    async def _hint(self) -> None:
        """The group's offset follows what has landed, now and then; it is only a hint."""
        landed, (committed, recorded) = self._landed, self._hinted
        if landed is None or (landed.watermark, landed.applied) == (committed, recorded):
            return
        now = _now()
        moved = landed.watermark != committed or recorded is None
        if self._stopping or now - self._hinted_at >= (HINT_INTERVAL_S if moved else MARK_INTERVAL_S):
            self._hinted_at = now
            if await self.lease.commit_hint(landed.watermark, landed.applied):
                self._hinted = (landed.watermark, landed.applied)
            else:  # not each time, while the broker is away
                self._hinted_at += MARK_INTERVAL_S - HINT_INTERVAL_S

    def _count(self, batch: Sequence[tuple[Freeze, Built] | DeadLetter]) -> None:
        counts = self._figures.counts
        for item in batch:
            if isinstance(item, DeadLetter):
                counts["dead_letters"] += 1
                counts[f"published_dead_letter.{item.reason}"] += 1
                continue
            freeze, built = item
            if self._tracer is not None:
                self._tracer.published(freeze.log)
            counts["results"] += 1
            counts["masked"] += built.verdict.masked
            counts["result.masked" if built.verdict.masked else "result.delivered"] += 1
            for reason in built.verdict.reasons:
                counts[f"masked.{reason}"] += 1
            seconds = _now() - built.frozen_at
            self._figures.freeze_to_publish.observe(seconds)
            self._figures.recent.finished.append(
                Finished(
                    freeze.log.rollout_id,
                    self.lease.partition,
                    freeze.offset,
                    built.verdict.masked,
                    tuple(str(reason) for reason in built.verdict.reasons),
                    round(seconds, 6),
                    time.time(),
                )
            )
            log.debug(
                "result_published",
                rollout_id=freeze.log.rollout_id,
                partition=self.lease.partition,
                offset=freeze.offset,
                reasons=[str(reason) for reason in built.verdict.reasons],
            )

    def _regulate(self) -> None:
        """Pause intake while there is no room for what has come, or the spool is full."""
        blocked = (bool(self._backlog) and not self._draining) or self._memory.full
        if blocked == self._paused:
            return
        self._paused = blocked
        if blocked:
            self._figures.counts["intake_pauses"] += 1
            self.lease.pause()
        else:
            self.lease.resume()
        log.info(
            "intake_paused" if blocked else "intake_resumed",
            partition=self.lease.partition,
            pending_bytes=self._memory.pending_bytes,
            spooled_bytes=self._memory.spool.size_bytes,
        )


def _now() -> float:
    """Monotonic seconds, by the event loop's clock: a simulation brings its own."""
    return asyncio.get_running_loop().time()


def _rollout_of(effect: Effect) -> str | None:
    return effect.log.rollout_id if isinstance(effect, Freeze) else None
