"""Watches the cluster: what must hold at every commit, and the record of what was committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from freezepoint.core.records import OutputRecord
from freezepoint.transport.ports import Lease
from freezepoint_schemas import codec
from freezepoint_schemas.headers import ERROR_CLASS, ERROR_OFFSET, ERROR_PARTITION, PART, header
from freezepoint_schemas.ledger import CARRY_MARK, PROGRESS_KEY, Carried, LedgerRecord, ProgressRecord
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.results import Result
from freezepoint_schemas.topics import Topic
from tests.simulation.groups import Stored
from tests.simulation.log import Transaction

VALUE_BYTES_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """``commit``: the number of its transaction."""

    result: Result
    at: float
    commit: int


@dataclass(frozen=True, slots=True)
class PublishedLetter:
    offset: int
    reason: str
    record: OutputRecord
    commit: int


@dataclass(frozen=True, slots=True)
class Progress:
    record: ProgressRecord
    commit: int


@dataclass(frozen=True, slots=True)
class CarriedLife:
    where: Carried
    commit: int


class Monitor:
    """Everything by token partition. ``violations``: what must never be, in the order it was seen."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.violations: list[str] = []
        self.results: defaultdict[int, list[PublishedResult]] = defaultdict(list)
        self.letters: defaultdict[int, list[PublishedLetter]] = defaultdict(list)
        self.progress: defaultdict[int, list[Progress]] = defaultdict(list)
        self.ledger: defaultdict[int, dict[str, LedgerRecord]] = defaultdict(dict)
        self.carried: defaultdict[tuple[int, str], list[CarriedLife]] = defaultdict(list)
        self.chunks: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
        self.commits = 0
        self._now = now
        self._effects: defaultdict[int, int] = defaultdict(lambda: -1)
        self._proofs: defaultdict[tuple[str, int], float] = defaultdict(lambda: -1.0)
        self._seen: set[tuple[int, str, int]] = set()

    def violated(self, what: str) -> None:
        self.violations.append(f"{self._now():.3f}: {what}")

    def watermark(self, partition: int) -> int:
        """What the committed ledger says."""
        progress = self.progress[partition]
        return progress[-1].record.watermark if progress else 0

    def proved(self, process: str, partition: int) -> None:
        """The group took a commit of its owner."""
        self._proofs[process, partition] = self._now()

    def committed(self, transaction: Transaction, process: str, begun_at: float) -> None:
        """A transaction is decided: from here on it counts. Its producer was started by that process at that time."""
        self.commits += 1
        partition = int(transaction.transactional_id.rpartition(".")[2])
        if self._proofs[process, partition] < begun_at:
            self.violated(f"{process} publishes for partition {partition} without a proof that it owns it")
        parts = PartAssembler(VALUE_BYTES_MAX)
        for _, record in sorted(transaction.records, key=lambda item: item[0]):
            match record.topic:
                case Topic.TRAJECTORIES:
                    value = self._whole(parts, record)
                    if value is not None:
                        self._result(partition, codec.decode_result(value))
                case Topic.DEAD_LETTERS:
                    self._letter(partition, record)
                case Topic.LEDGER:
                    self._ledger(partition, record)
                case Topic.TOKENS:
                    self.violated("a worker wrote tokens")
        if parts.incomplete:
            self.violated(f"a transaction of partition {partition} holds part of a value")

    @staticmethod
    def _whole(parts: PartAssembler, record: OutputRecord) -> bytes | None:
        part = header(record.headers, PART)
        if part is None:
            return record.value
        return parts.add(PartHeader.parse(part), record.value or b"", 0)

    def _result(self, partition: int, result: Result) -> None:
        offset = result.snapshot.freeze_offset
        if result.snapshot.partition != partition:
            self.violated(f"{result.rollout_id} of another partition than {partition}")
        key = (partition, result.rollout_id, offset)
        if key in self._seen:
            self.violated(
                f"a second result of {result.rollout_id}, partition {partition}, frozen at {offset}"
            )
        self._seen.add(key)
        self._in_order(partition, offset, f"the result of {result.rollout_id}")
        self.results[partition].append(PublishedResult(result, self._now(), self.commits))

    def _letter(self, partition: int, record: OutputRecord) -> None:
        offset = int(header(record.headers, ERROR_OFFSET) or b"-1")
        reason = (header(record.headers, ERROR_CLASS) or b"").decode()
        if header(record.headers, ERROR_PARTITION) != str(partition).encode():
            self.violated(f"a dead letter of another partition than {partition}")
        if any(letter.offset == offset for letter in self.letters[partition]):
            self.violated(f"a second dead letter of partition {partition}, offset {offset}")
        self._in_order(partition, offset, "a dead letter")
        self.letters[partition].append(PublishedLetter(offset, reason, record, self.commits))

    def _in_order(self, partition: int, offset: int, what: str) -> None:
        if offset < self._effects[partition]:
            self.violated(
                f"{what} of partition {partition}, offset {offset}, came after offset {self._effects[partition]}"
            )
        self._effects[partition] = max(offset, self._effects[partition])

    def _ledger(self, partition: int, record: OutputRecord) -> None:
        assert record.key is not None
        if record.partition != partition:
            self.violated(f"a ledger record {record.key!r} of partition {partition} is on {record.partition}")
        elif record.key == PROGRESS_KEY:
            self._progress(partition, codec.decode_progress(record.value or b""))
        elif CARRY_MARK in record.key:
            self._chunk(partition, record)
        else:
            name, decision = record.key.decode(), codec.decode_ledger(record.value or b"")
            self.ledger[partition][name] = decision
            if decision.carried is not None:
                self.carried[partition, name].append(CarriedLife(decision.carried, self.commits))

    def _chunk(self, partition: int, record: OutputRecord) -> None:
        assert record.key is not None
        if record.value is None:
            self.chunks[partition].pop(record.key, None)
        else:
            self.chunks[partition][record.key] = record.value

    def _progress(self, partition: int, progress: ProgressRecord) -> None:
        if progress.watermark < self.watermark(partition):
            self.violated(f"the watermark of partition {partition} went back to {progress.watermark}")
        before = self.progress[partition]
        if before and progress.applied_offset < before[-1].record.applied_offset:
            self.violated(f"partition {partition} went back to {progress.applied_offset} as the last applied")
        before.append(Progress(progress, self.commits))

    def offset_committed(self, partition: int, stored: Stored, log_start: int) -> None:
        """The group's offset is a hint, and may never be beyond what a replay needs; nor may what is said with it of the
        ledger be beyond what that says itself."""
        if stored.offset is None or stored.offset > max(self.watermark(partition), log_start):
            self.violated(
                f"the group's offset of partition {partition} went to {stored.offset}, beyond {self.watermark(partition)}"
            )
        before = self.progress[partition]
        applied = before[-1].record.applied_offset + 1 if before else -1
        if stored.recorded is not None and stored.recorded > applied:
            self.violated(
                f"the group was told that the ledger of partition {partition} had come to {stored.recorded}, not to {applied}"
            )

    def started(self, lease: Lease, offset: int) -> None:
        """Reading began: at the latest of what the ledger says, the group says, and the log has."""
        progress = [record.value for record in lease.ledger if record.key == PROGRESS_KEY]
        watermark = codec.decode_progress(progress[0]).watermark if progress and progress[0] else 0
        expected = max(watermark, lease.committed or 0, lease.log_start)
        if offset != expected:
            self.violated(f"partition {lease.partition} is read from {offset}, not from {expected}")
