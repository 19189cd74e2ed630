"""One partition's log: offsets with gaps, transactions in it, what readers of committed records may see."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint_schemas.topics import Topic


class TxnState(Enum):
    OPEN = auto()
    COMMITTING = auto()
    """Decided; markers are being written."""
    ABORTING = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Transaction:
    """Records of one producer epoch. ``records``: as they were meant to be, by their place in the publication."""

    transactional_id: str
    epoch: int
    state: TxnState = TxnState.OPEN
    commits: bool = False
    records: list[tuple[int, OutputRecord]] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    """Without a marker of it yet."""
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A record in a log; a control record (marker) without one. Both take an offset."""

    offset: int
    record: InputRecord | None
    transaction: Transaction | None
    at: float

    @property
    def is_committed(self) -> bool:
        return self.record is not None and (self.transaction is None or self.transaction.commits)

    @property
    def visible_at(self) -> float:
        """Since when it can be read, if it can be."""
        return self.at if self.transaction is None else self.transaction.ended_at


class Log:
    """Append-only but for retention and compaction. ``start``: the first offset it still has. ``history``: all it ever had."""

    def __init__(
        self, topic: Topic, partition: int, clock_ms: Callable[[], int], now: Callable[[], float]
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.start = 0
        self.end = 0
        self.waiters: list[Callable[[], None]] = []
        self.history: list[Stored] = []
        self._clock_ms = clock_ms
        self._now = now
        self._stored: list[Stored] = []
        self._open: dict[Transaction, int] = {}

    @property
    def stable(self) -> int:
        """The last stable offset: nothing at or behind it is read, since a transaction there is undecided."""
        return min(self._open.values(), default=self.end)

    @property
    def is_open(self) -> bool:
        """Whether a transaction in it has no end yet."""
        return bool(self._open)

    def append(self, output: OutputRecord, transaction: Transaction | None) -> InputRecord:
        record = InputRecord(
            self.partition, self.end, self._clock_ms(), output.key, output.value, output.headers
        )
        if transaction is not None and transaction not in self._open:
            self._open[transaction] = self.end
            transaction.logs.append(self)
        self._store(record, transaction)
        return record

    def mark(self, transaction: Transaction) -> None:
        """Write the control record that ends the transaction here."""
        del self._open[transaction]
        transaction.logs.remove(self)
        transaction.ended_at = self._now()
        self._store(None, transaction)

    def _store(self, record: InputRecord | None, transaction: Transaction | None) -> None:
        stored = Stored(self.end, record, transaction, self._now())
        self._stored.append(stored)
        self.history.append(stored)
        self.end += 1
        self._notify()

    def read(self, start: int, limit: int, count: int | None = None) -> list[InputRecord]:
        """Committed records from ``start`` and below ``limit``, at most ``count``."""
        limit = min(limit, self.stable)
        found: list[InputRecord] = []
        for index in range(
            bisect_left(self._stored, start, key=lambda stored: stored.offset), len(self._stored)
        ):
            stored = self._stored[index]
            if stored.offset >= limit or (count is not None and len(found) == count):
                break
            if stored.is_committed and stored.record is not None:
                found.append(stored.record)
        return found

    def truncate(self, start: int) -> None:
        """Retention: records below that offset are gone."""
        self.start = max(self.start, min(start, self.stable))
        self._stored = [stored for stored in self._stored if stored.offset >= self.start]

    def compact(self, end: int) -> None:
        """Of the records below that offset keep the latest of each key, and no tombstone; markers and aborted records go."""
        end = min(end, self.stable)
        records = self.read(self.start, end)
        latest = {record.key: record.offset for record in records}
        kept = {
            record.offset
            for record in records
            if latest[record.key] == record.offset and record.value is not None
        }
        self._stored = [stored for stored in self._stored if stored.offset >= end or stored.offset in kept]

    def _notify(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()
