"""One rollout's records out of a partition, folded by the rules that a worker has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from freezepoint.core.effects import Effect, Freeze
from freezepoint.core.frozen import FrozenLog
from freezepoint.core.ledger import Decided
from freezepoint.core.partition import PartitionConfig, PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.errors import BrokerUnavailableError
from freezepoint.transport.ports import Position, Transport
from freezepoint_schemas.topics import Topic

POLL_S = 0.2
POLL_RECORDS = 500
OFF_LOOP_BYTES = 128 * 1024
"""Records of more bytes are decoded on a thread."""


@dataclass(slots=True)
class RolloutFold:
    """One rollout from the offset ``start`` to its complete event at ``until`` (-1: the end of what is committed).

    ``decided``: what the ledger said before that event was published. ``log``: the last frozen life. ``was_decided``:
    that life is the one that the ledger speaks of.
    """

    rollout_id: str
    config: PartitionConfig
    decided: Decided
    start: int
    until: int
    log: FrozenLog | None = None
    was_decided: bool = False
    _past_decided: bool = field(init=False)
    _core: PartitionCore = field(init=False)

    def __post_init__(self) -> None:
        self._core = PartitionCore(self.config)
        self._past_decided = not is_frozen(self.decided)

    @property
    def key(self) -> bytes:
        return self.rollout_id.encode("ascii")

    def begin(self, first_offset: int) -> None:
        """The first record that could be read lies there: an open life that began before it has lost some."""
        if 0 <= self.decided.first_offset < first_offset:
            self._core.book.decided[self.rollout_id] = self.decided
            self._core.expire(first_offset)

    def feed(self, record: InputRecord) -> None:
        """Fold one of its records in; offsets must grow."""
        if record.offset < self.start or 0 <= self.until < record.offset:
            return
        if record.offset > self.decided.freeze_offset and not self._past_decided:
            # What is open here was frozen by a worker that saw nothing of it for too long, which no record says.
            self._past_decided = True
            self._take(self._core.time_out(2 * self.config.rollout_timeout_s))
        self._take(self._core.feed(record))

    def _take(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Freeze):
                self.log = effect.log
                self.was_decided = effect.log.freeze_offset <= self.decided.freeze_offset


def is_frozen(decided: Decided) -> bool:
    """Whether the ledger calls the rollout frozen and nothing cleared it since."""
    return decided.freeze_offset > decided.clear_offset


def start_of(decided: Decided, watermark: int) -> int:
    """The offset from which a rollout has to be read: its first record's where the ledger knows it, else the watermark.
    Of a frozen one the ledger does not say where it began."""
    if is_frozen(decided):
        return 0
    return decided.first_offset if decided.first_offset >= 0 else watermark


async def read_rollouts(
    transport: Transport, partition: int, folds: Sequence[RolloutFold], deadline_s: float
) -> None:
    """Read the partition once, from the lowest start to the highest complete event, and fold what belongs to whom.

    :raises BrokerError: reading failed, or nothing came for ``deadline_s``.
    """
    start = min(fold.start for fold in folds)
    until = -1 if any(fold.until < 0 for fold in folds) else max(fold.until for fold in folds)
    reader = await transport.reader(Topic.TOKENS, partitions=[partition], start={partition: start})
    try:
        moved_at, begun = time.monotonic(), False
        while True:
            at_end = until < 0 and await reader.at_end()
            records = await reader.poll(POLL_S, POLL_RECORDS)
            if records:
                if not begun:
                    for fold in folds:
                        fold.begin(records[0].offset)
                begun, moved_at = True, time.monotonic()
                await _feed(folds, records)
            if at_end or (records and 0 <= until <= records[-1].offset):
                return
            if time.monotonic() - moved_at > deadline_s:
                where = Position(partition, until)
                raise BrokerUnavailableError(f"nothing came for {deadline_s:g} s while reading up to {where}")
    finally:
        await reader.close()


async def _feed(folds: Iterable[RolloutFold], records: Iterable[InputRecord]) -> None:
    wanted = {fold.key for fold in folds}
    own = [record for record in records if record.key in wanted]

    def feed() -> None:
        for fold in folds:
            for record in own:
                if record.key == fold.key:
                    fold.feed(record)

    if sum(len(record.value or b"") for record in own) > OFF_LOOP_BYTES:
        await asyncio.to_thread(feed)
    else:
        feed()
