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
RESUMED = 0.8
"""Intake goes on when the spool is down to this fraction of its limit."""


@dataclass(slots=True)
class MemoryBudget:
    """Over all partitions of a process.

    ``bytes_max``: of open logs and of what waits to be published together. ``evidence``: where logs of masked rollouts go,
    if anywhere. ``full``: the spool takes no more, intake has to wait. ``pending_bytes``: what waits to be built or published.
    """

    bytes_max: int
    spool_bytes_max: int
    spool: Spool
    pending_bytes_max: int = 64 * 1024 * 1024
    full: bool = False
    pending_bytes: int = 0
    evidence: EvidenceKeeper | None = None
    _let_go_bytes: int = 0
    _unwritable: bool = False
    """The spool's disk took nothing more, the last time."""
    _blocked: list[Callable[[], None]] = field(default_factory=list)
    _cores: list[PartitionCore] = field(default_factory=list)
    _noted: dict[int, int] = field(default_factory=dict)
    """By a core's ``id``: what it held when it was last looked at; ``_noted_bytes`` is their sum."""
    _noted_bytes: int = 0

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """:raises ConfigurationError: a folder is not fit for its use."""
        evidence = EvidenceKeeper.of(settings)
        return cls(
            settings.memory_bytes_max,
            settings.spool_bytes_max,
            Spool(settings.spool_folder),
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

    def try_again(self) -> None:
        """Now and then: perhaps the spool's disk has room by now."""
        if self._unwritable:
            self._unwritable = False
            self._spill(int(self._room_bytes * RELIEVED))
            self._watch_spool()

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
        if not self.full and (size > self.spool_bytes_max or self._unwritable):
            self.full = True
            log.warning(
                "spool_full",
                spooled_bytes=size,
                message="intake pauses; make room in worker.spool_folder"
                if self._unwritable
                else "intake pauses; raise worker.spool_bytes_max or memory_bytes_max",
            )
        elif self.full and size <= self.spool_bytes_max * RESUMED and not self._unwritable:
            self.full = False
            log.info("spool_relieved", spooled_bytes=size)
