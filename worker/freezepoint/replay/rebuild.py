"""Results built again from the tokens topic, by the fold that a worker has.

A worker freezes what was idle for too long, and no record says so; where it did is known from the ledger, so that a rebuilt
life ends at the same offset. The ledger also keeps each last life's snapshot id: one that comes out different is
not what was published, most likely because retention has removed some of its records, and is never handed out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from freezepoint.building import result_of
from freezepoint.core.effects import Effect, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.ledger import Decided
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import LogLimits
from freezepoint.errors import InputError
from freezepoint.replay.clears import is_clear
from freezepoint.settings import Settings
from freezepoint.source.ledger_view import LedgerView
from freezepoint.transport.ports import Broker, Extent
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic, partition_for, rollout_id_of_key

POLL_S: Final = 0.2
POLL_RECORDS: Final = 500
DEADLINE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lives: the last one of each of these ids, or all that froze at the offsets from ``first`` up to ``end``
    (exclusive) of one partition, or of each."""

    rollout_ids: frozenset[str] = frozenset()
    partition: int | None = None
    first: int = 0
    end: int | None = None

    def takes(self, offset: int) -> bool:
        return self.first <= offset and (self.end is None or offset < self.end)

    def partitions(self, count: int) -> list[int]:
        """:raises InputError: there is no such partition."""
        if self.rollout_ids:
            return sorted({partition_for(name.encode("ascii"), count) for name in self.rollout_ids})
        if self.partition is None:
            return list(range(count))
        if self.partition >= count:
            raise InputError(f"there is no partition {self.partition}, only {count}")
        return [self.partition]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One life's result. ``agrees``: whether the ledger's snapshot id says that this is what was published; None where
    the ledger does not speak of this life (any more, or yet)."""

    result: Result
    agrees: bool | None


async def rebuild(broker: Broker, settings: Settings, selection: Selection) -> AsyncGenerator[Rebuilt]:
    """The selected lives that are frozen, partition by partition in the order in which they froze.

    Each partition is read from its beginning, for where a life began is not known; its open lives are held in memory.

    :raises InputError: the selection names a partition that is not there.
    :raises BrokerError: the broker failed.
    """
    extents = await broker.extents(Topic.TOKENS)
    ledger = await broker.reader(Topic.LEDGER)
    try:
        view = LedgerView(ledger, broker.names, DEADLINE_S)
        await view.refresh()
        for partition in selection.partitions(len(extents)):
            fold = _PartitionFold(
                _config(broker, settings, partition, len(extents)), extents[partition], view, selection
            )
            async for log in _logs(broker, fold):
                yield _built(log, view.decided(partition, log.rollout_id), settings)
    finally:
        await ledger.close()


def _config(broker: Broker, settings: Settings, partition: int, count: int) -> PartitionConfig:
    worker = settings.worker
    return PartitionConfig(
        topic_name=broker.names[Topic.TOKENS],
        partition=partition,
        partition_count=count,
        group=worker.group,
        record_bytes_max=worker.record_bytes_max,
        limits=LogLimits(worker.rollout_bytes_max, worker.rollout_entries_max),
        rollout_timeout_s=worker.rollout_timeout_s,
    )


def _built(log: FrozenLog, decided: Decided, settings: Settings) -> Rebuilt:
    result = result_of(log, settings.worker)
    if decided.freeze_offset != log.freeze_offset:
        return Rebuilt(result, None)
    return Rebuilt(result, result.snapshot.id == decided.snapshot_id)


async def _logs(broker: Broker, fold: _PartitionFold) -> AsyncGenerator[FrozenLog]:
    partition = fold.config.partition
    reader = await broker.reader(Topic.TOKENS, partitions=[partition])
    try:
        while not fold.past_the_end and not await reader.at_end():
            for record in await reader.poll(POLL_S, POLL_RECORDS):
                for log in fold.take(record):
                    yield log
    finally:
        await reader.close()
    for log in fold.finish():
        yield log


@dataclass(slots=True)
class _PartitionFold:
    """The selected ids of one partition, each folded by itself. A frozen one costs its name, until it is cleared."""

    config: PartitionConfig
    extent: Extent
    view: LedgerView
    selection: Selection
    past_the_end: bool = False
    _open: dict[str, _IdFold] = field(default_factory=dict)
    _frozen: set[str] = field(default_factory=set)
    _last: dict[str, FrozenLog] = field(default_factory=dict)
    """Of ids that were named: the newest life so far."""

    def take(self, record: InputRecord) -> Iterator[FrozenLog]:
        if self.selection.end is not None and record.offset >= self.selection.end:
            self.past_the_end = True
            return
        rollout_id = rollout_id_of_key(record.key)
        if rollout_id is None or not self._wants(rollout_id):
            return
        if rollout_id in self._frozen:
            if not is_clear(rollout_id, record):
                return
            self._frozen.discard(rollout_id)
        fold = self._open.get(rollout_id)
        if fold is None:
            fold = self._open[rollout_id] = _IdFold.begin(
                rollout_id, self.config, self.view.decided(self.config.partition, rollout_id), self.extent
            )
        yield from self._emit(rollout_id, fold.feed(record))

    def _wants(self, rollout_id: str) -> bool:
        return not self.selection.rollout_ids or rollout_id in self.selection.rollout_ids

    def finish(self) -> Iterator[FrozenLog]:
        """What a worker froze for being idle, and then the last lives of the ids that were named."""
        for rollout_id, fold in list(self._open.items()):
            yield from self._emit(rollout_id, fold.time_out())
        yield from sorted(self._last.values(), key=lambda log: log.freeze_offset)

    def _emit(self, rollout_id: str, effects: list[Effect]) -> Iterator[FrozenLog]:
        for effect in effects:
            if not isinstance(effect, Freeze):
                continue
            if self.selection.rollout_ids:
                self._last[rollout_id] = effect.log
            elif self.selection.takes(effect.log.freeze_offset):
                yield effect.log
        fold = self._open[rollout_id]
        if fold.is_frozen:
            del self._open[rollout_id]
            self._frozen.add(rollout_id)


@dataclass(slots=True)
class _IdFold:
    """One id's records in a fold of its own, which times out exactly what the ledger says was timed out."""

    rollout_id: str
    core: PartitionCore
    decided: Decided
    is_frozen: bool = False

    @classmethod
    def begin(cls, rollout_id: str, config: PartitionConfig, decided: Decided, extent: Extent) -> _IdFold:
        """A life that the ledger holds as open and that began before the log does has lost records."""
        core = PartitionCore(config)
        if 0 <= decided.first_offset < extent.first:
            core.book.decided[rollout_id] = replace(decided, freeze_offset=-1, carried=None)
            core.expire(extent.first)
        return cls(rollout_id, core, decided)

    def feed(self, record: InputRecord) -> list[Effect]:
        timed_out = self.time_out() if record.offset > self.decided.freeze_offset else []
        effects = [*timed_out, *self.core.feed(record)]
        if any(isinstance(effect, Freeze) for effect in effects):
            self.is_frozen = self.rollout_id not in self.core.open
        return effects

    def time_out(self) -> list[Effect]:
        """The freeze that the ledger speaks of, if what is open here is what it froze."""
        life = self.core.open.get(self.rollout_id)
        if life is None or not life.first_offset <= self.decided.freeze_offset:
            return []
        self.core.next_offset = self.decided.freeze_offset + 1
        self.is_frozen = True
        return self.core.time_out(2 * self.core.config.rollout_timeout_s)
