"""One partition's log: offsets with gaps, transactions in it, what readers of committed records may see."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.errors import BrokerUnavailableError
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
    excused: bool = False
    """Nobody could know any more what was decided when the rest of its partitions were told; see ADR 8."""


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
        self.leader_at = 0.0
        self._stable_at: list[float] = []
        self.history: list[Stored] = []
        self._clock_ms = clock_ms
        self._now = now
        self._stored: list[Stored] = []
        self._open: dict[Transaction, int] = {}

    @property
    def stable(self) -> int:
        """The last stable offset: nothing at or behind it is read, since a transaction there is undecided."""
        return min(self._open.values(), default=self.end)

    def visible_at(self, offset: int) -> float:
        """Since when what is there can be read: no transaction before it or of its own is undecided any more."""
        return self._stable_at[offset] if offset < len(self._stable_at) else inf

    @property
    def is_open(self) -> bool:
        """Whether a transaction in it has no end yet."""
        return bool(self._open)

    @property
    def has_leader(self) -> bool:
        return self._now() >= self.leader_at

    def require_leader(self) -> None:
        """:raises BrokerUnavailableError: the partition is not back yet from a crash."""
        if not self.has_leader:
            raise BrokerUnavailableError(f"{self.topic} {self.partition} has no leader")

    def append(self, output: OutputRecord, transaction: Transaction | None) -> InputRecord:
        record = InputRecord(
            self.partition, self.end, self._clock_ms(), output.key, output.value, output.headers
        )
        if transaction is not None and transaction not in self._open:
            self._open[transaction] = self.end
            transaction.logs.append(self)
        self._store(record, transaction)
        return record

    def mark(self, transaction: Transaction) -> list[Transaction]:
        """Write the control record that ends the transaction here, and with it what its producer was not told the end of
        before: those are returned."""
        name = transaction.transactional_id
        ended = [known for known in self._open if known.transactional_id == name]
        for known in [*ended, transaction]:
            self._open.pop(known, None)
        transaction.logs.remove(self)
        self._store(None, transaction)
        return [known for known in ended if known is not transaction]

    def left_open(self, transactional_id: str) -> list[Transaction]:
        """What of the id's decided transactions it was never told the end of."""
        return [
            known
            for known in self._open
            if known.transactional_id == transactional_id and self not in known.logs
        ]

    def _store(self, record: InputRecord | None, transaction: Transaction | None) -> None:
        stored = Stored(self.end, record, transaction, self._now())
        self._stored.append(stored)
        self.history.append(stored)
        self.end += 1
        self._stable_at += [self._now()] * (self.stable - len(self._stable_at))
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
