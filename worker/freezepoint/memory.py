"""The memory budget of open rollouts: beyond it the coldest logs go to the spool, beyond that intake pauses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import structlog

from freezepoint.allocator import trim
from freezepoint.core.partition import PartitionCore
from freezepoint.evidence import EvidenceKeeper
from freezepoint.settings import WorkerSettings
from freezepoint.spool import Spool

log = structlog.get_logger()

RELIEVED = 0.9
"""Spilling goes on down to this fraction of the budget, so that it comes in strides."""
TRIM_BYTES = 32 * 1024 * 1024
"""So much is let go, and then what is free of the heap is given back."""
PAUSED = 0.9
"""Intake pauses when the spool is at this fraction of its limit. The rest is for reading on when nothing else makes room."""
RESUMED = 0.8
"""Intake goes on when the spool is down to this fraction of its limit."""
STANDSTILL_S = 5.0
"""How long nothing has to be in flight until it is believed that nothing but reading on can free room."""
WARNING_S = 60.0
"""How often a worker says that it stands still."""


@dataclass(slots=True)
class MemoryBudget:
    """Over all partitions of a process.

    ``bytes_max``: of open logs and of what waits to be published together. ``evidence``: where logs of masked rollouts go,
    if anywhere. ``pending_bytes``: what waits to be built or published.

    Only the end of a rollout empties the spool, and its complete event lies behind the pause. So intake waits for what is
    in flight; when nothing is, it reads on up to the limit. At the limit it stands still, and says so steadily.
    """

    bytes_max: int
    spool_bytes_max: int
    spool: Spool
    pending_bytes_max: int = 64 * 1024 * 1024
    pending_bytes: int = 0
    evidence: EvidenceKeeper | None = None
    _let_go_bytes: int = 0
    _unwritable: bool = False
    """The spool's disk took nothing more, the last time."""
    _filled: bool = False
    """The spool came near its limit, and is not well below it yet."""
    _reading_on: bool = False
    _still_since: float | None = None
    """Since when it is filled and nothing is in flight."""
    _warned_at: float | None = None
    """When it last said that it stands still, while it does."""
    _blocked: list[Callable[[], None]] = field(default_factory=list)
    _cores: list[PartitionCore] = field(default_factory=list)
    _noted: dict[int, int] = field(default_factory=dict)
    """By a core's ``id``: what it held when it was last looked at; ``_noted_bytes`` is their sum."""
    _noted_bytes: int = 0

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """:raises ConfigurationError: a folder is not fit for its use."""
        evidence = EvidenceKeeper.of(settings)
        try:
            spool = Spool(settings.spool_folder)
        except BaseException:
            if evidence is not None:
                evidence.close()
            raise
        return cls(
            settings.memory_bytes_max,
            settings.spool_bytes_max,
            spool,
            settings.pending_bytes_max,
            evidence=evidence,
        )

    @property
    def used_bytes(self) -> int:
        """What open logs hold in memory."""
        return sum(core.memory_bytes for core in self._cores)

    def register(self, core: PartitionCore) -> None:
        """Its open logs count from now on."""
        self._cores.append(core)
        self._note(core)

    def unregister(self, core: PartitionCore) -> None:
        """It is given up, and what it has in the spool with it."""
        self._cores = [other for other in self._cores if other is not core]
        self._noted_bytes -= self._noted.pop(id(core), 0)
        self.spool.free(core.release_spilled())
        for life in core.open.values():
            self.spool.free(life.take_spilled())
        self._watch_spool()

    def relieve(self, core: PartitionCore) -> None:
        """After ``core`` took records in: drop what it released, and spill if there is too much."""
        released = core.release_spilled()
        if released:
            self.spool.free(released)
        self._note(core)
        if self._noted_bytes > self._room_bytes and not self._unwritable:
            self._spill(int(self._room_bytes * RELIEVED))
        self._watch_spool()

    def look(self, now: float) -> None:
        """Now and then, at a time in monotonic seconds: perhaps the spool's disk has room by now; and if nothing frees any,
        go on reading, or say that it cannot go on."""
        if self._unwritable:
            self._unwritable = False
            self._spill(int(self._room_bytes * RELIEVED))
            self._watch_spool()
        if not self._filled or self.pending_bytes:
            self._still_since = self._warned_at = None
        elif self._still_since is None:
            self._still_since = now
        elif now - self._still_since >= STANDSTILL_S:
            self._read_on_or_warn(now)

    def _read_on_or_warn(self, now: float) -> None:
        if not self._exhausted:
            self._warned_at = None
            if not self._reading_on:
                self._reading_on = True
                log.info("spool_reserve_used", spooled_bytes=self.spool.size_bytes)
        elif self._warned_at is None or now - self._warned_at >= WARNING_S:
            self._warned_at = now
            log.warning(
                "intake_stands_still",
                spooled_bytes=self.spool.size_bytes,
                spool_bytes_max=self.spool_bytes_max,
                message="open rollouts fill the spool, and what ends them cannot be read: " + self._mend,
            )

    @property
    def full(self) -> bool:
        """The spool takes no more: intake has to wait."""
        return self._filled and (self._exhausted or not self._reading_on)

    @property
    def stands_still(self) -> bool:
        """Full, with nothing in flight that could free room: only the operator can."""
        return self._warned_at is not None

    @property
    def _exhausted(self) -> bool:
        return self._unwritable or self.spool.size_bytes > self.spool_bytes_max

    @property
    def _mend(self) -> str:
        if self._unwritable:
            return "make room in worker.spool_folder"
        return "raise worker.spool_bytes_max or memory_bytes_max, or start more workers"

    @property
    def _room_bytes(self) -> int:
        """What open logs may hold: what waits to be published has its part of the budget."""
        return max(0, self.bytes_max - self.pending_bytes)

    def _note(self, core: PartitionCore) -> None:
        """One core's change alone: a sum over all partitions with every record would grow with their number."""
        held = core.memory_bytes
        self._noted_bytes += held - self._noted.get(id(core), 0)
        self._noted[id(core)] = held

    @property
    def has_room(self) -> bool:
        """Whether more may be frozen: what is to be published stays within its limit."""
        return self.pending_bytes <= self.pending_bytes_max

    def hold(self, size_bytes: int) -> None:
        """So much more waits to be published."""
        self.pending_bytes += size_bytes

    def drop(self, size_bytes: int) -> None:
        """So much less does."""
        self.pending_bytes -= size_bytes
        self._let_go(size_bytes)
        if self._blocked and self.has_room:
            blocked, self._blocked = self._blocked, []
            for wake in blocked:
                wake()

    def _let_go(self, size_bytes: int) -> None:
        self._let_go_bytes += size_bytes
        if self._let_go_bytes > TRIM_BYTES:
            self._let_go_bytes = 0
            trim()

    def wake_when_room(self, wake: Callable[[], None]) -> None:
        """Call this once, as soon as there is room."""
        if wake not in self._blocked:
            self._blocked.append(wake)

    def close(self) -> None:
        """Delete the spool, and let the evidence be written."""
        self.spool.close()
        if self.evidence is not None:
            self.evidence.close()

    def _spill(self, target_bytes: int) -> None:
        """From the partition that holds most, its coldest log first."""
        for core in self._cores:  # some may hold less by now than was noted
            self._note(core)
        while self.used_bytes > target_bytes:
            fullest = max(self._cores, key=lambda core: core.memory_bytes)
            coldest = fullest.coldest()
            if coldest is None:
                return  # parts that wait for their others: only their rollout's own limit bounds them
            try:
                coldest.spilled.append(self.spool.write(coldest.entries()))
            except OSError as error:
                self._unwritable = True
                log.warning("spool_unwritable", error=error.strerror, spooled_bytes=self.spool.size_bytes)
                return
            self._let_go(coldest.memory_bytes)
            coldest.spill()
            fullest.account(coldest)
            self._note(fullest)

    def _watch_spool(self) -> None:
        size = self.spool.size_bytes
        if self._exhausted:
            self._reading_on = False  # until it has waited again for what is in flight
        if not self._filled and (size > self.spool_bytes_max * PAUSED or self._unwritable):
            self._filled = True
            log.warning("spool_full", spooled_bytes=size, message=f"intake pauses; {self._mend}")
        elif self._filled and size <= self.spool_bytes_max * RESUMED and not self._unwritable:
            self._filled = self._reading_on = False
            self._still_since = self._warned_at = None
            log.info("spool_relieved", spooled_bytes=size)
