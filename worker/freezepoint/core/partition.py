"""One partition's fold: record in, effects out. Every record passes through :meth:`PartitionCore.feed`.

What is decided about an id lives in the ledger; what is open lives here and can be lost at any moment, because the
records it came from are replayed from the watermark on. Hence the one rule of replay, for a record of an id at
offset o, whose last freeze is F and last clear C:

- o <= F: the past; it is in a committed or coming result, or was set aside before it.
- o > F, and no clear C > F below o: late.
- otherwise: live.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from freezepoint.core.carry import dump_life
from freezepoint.core.effects import DeadLetter, Effect, Freeze, dead_letter
from freezepoint.core.frozen import Closing, SpillRef, TimedOut
from freezepoint.core.idle import IdleClock
from freezepoint.core.ledger import LedgerBook, Verdict
from freezepoint.core.records import InputRecord, OutputRecord
from freezepoint.core.rollout import TRANSITIONS, Action, Input, LogLimits, RolloutLog, State, Written
from freezepoint.core.watermark import Watermark
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    InputEvent,
    RolloutCancelled,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.headers import PART, header, without
from freezepoint_schemas.ledger import PROGRESS_KEY, Carried, ProgressRecord
from freezepoint_schemas.parts import PartAssembler, PartError, PartHeader, PartsTooLarge
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import Topic, partition_for, rollout_id_of_key

_INPUTS: dict[type[InputEvent], Input] = {
    RolloutComplete: Input.CLOSE,
    RolloutCancelled: Input.CLOSE,
    RolloutClear: Input.CLEAR,
}
"""What an event is to the table, but for what is written into a log."""


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """What a partition's fold depends on beside its records."""

    topic_name: str
    partition: int
    partition_count: int
    group: str
    record_bytes_max: int
    limits: LogLimits
    rollout_timeout_s: float


@dataclass(slots=True)
class PartitionCore:
    """The fold of one partition from ``next_offset`` on, over what the ledger says.

    ``dead_letters_through``: dead letters at or below this offset are published already and not emitted again.
    ``applied_offset``: the last record that was ever folded in, by whichever owner; a replay begins before it.
    ``counters``: what happened, by name, for telemetry; never part of a result.
    """

    config: PartitionConfig
    book: LedgerBook = field(default_factory=LedgerBook)
    next_offset: int = 0
    dead_letters_through: int = -1
    applied_offset: int = -1
    applied_timestamp_ms: int = 0
    open: dict[str, RolloutLog] = field(default_factory=dict)
    """Open lives by rollout id, the longest idle first."""
    clock: IdleClock = field(init=False)
    counters: Counter[str] = field(default_factory=Counter)
    unread_offsets: int = 0
    """How many offsets retention took before they were ever read."""
    gap_until_ms: int = 0
    topic_id: str | None = None
    """For both, see ``ProgressRecord``."""
    fed_bytes: int = 0
    """Bytes folded in: what a replay from a life's first record on would have to read is counted in them."""
    memory_bytes: int = 0
    """What the open lives hold in memory, about."""
    _gap_seen: bool = False
    _after_gap: bool = False
    """Whether the record in hand is within the time in which an unread gap may have swallowed the beginning of a life."""
    _watermark: Watermark = field(default_factory=Watermark)
    _dead_letters: deque[int] = field(default_factory=deque)
    _held_for_letters: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By a dead letter's offset: what cleared lives held, until it is published. One of an assembled value comes again in a
    replay only if that begins before the value's first part."""
    _resident: dict[str, int] = field(default_factory=dict)
    """Memory accounted for by open life, the coldest first; lives that hold none are not in it."""
    _released: list[SpillRef] = field(default_factory=list)
    _held_since: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By open life, the longest held first: the offset it holds the watermark at, and ``fed_bytes`` there."""

    def __post_init__(self) -> None:
        self.clock = IdleClock(self.config.rollout_timeout_s)

    def feed(self, record: InputRecord) -> list[Effect]:
        """Fold one record in; offsets must grow. Nothing a producer sent raises."""
        self.next_offset = record.offset + 1
        if record.offset > self.applied_offset:
            self.applied_offset, self.applied_timestamp_ms = record.offset, record.timestamp_ms
        self.counters["records"] += 1
        self._look_for_gap(record)
        rollout_id = rollout_id_of_key(record.key)
        if rollout_id is None or record.key is None:
            return self._set_aside(record, DeadLetterReason.INVALID_KEY, "the key is no valid rollout id")
        home = partition_for(record.key, self.config.partition_count)
        if home != self.config.partition:
            message = f"the key belongs to partition {home}: use Kafka's default partitioner (murmur2)"
            return self._set_aside(record, DeadLetterReason.WRONG_PARTITION, message)
        if record.offset <= self.book.freeze_offset(rollout_id):
            self.counters["past"] += 1
            return []
        known = self.open.get(rollout_id)
        if known is not None and known.carried is not None and record.offset <= known.carried.through:
            self.counters["past"] += 1
            return []
        self.fed_bytes += len(record.value or b"")
        effects = self._feed_live(rollout_id, record)
        if rollout_id in self.open:
            life = self.open[rollout_id] = self.open.pop(rollout_id)
            life.active_at = self.clock.placed(record.offset)
            life.last_offset = record.offset
            life.opened_ms = life.opened_ms or record.timestamp_ms
            self.account(life)
        return effects

    def account(self, life: RolloutLog) -> None:
        """Bring the figures up to date with an open life that changed."""
        self.memory_bytes += life.memory_bytes - self._resident.pop(life.rollout_id, 0)
        if life.memory_bytes:
            self._resident[life.rollout_id] = life.memory_bytes
        if life.garbage:
            self._released += life.garbage
            life.garbage = []

    def coldest(self) -> RolloutLog | None:
        """The open life with entries in memory that was written to the longest ago."""
        rollout_id = next(iter(self._resident), None)
        return None if rollout_id is None else self.open[rollout_id]

    def release_spilled(self) -> list[SpillRef]:
        """What was spilled of lives that are no more; asked for once."""
        released, self._released = self._released, []
        return released

    def _close(self, rollout_id: str) -> RolloutLog | None:
        """The life is open no longer."""
        self.memory_bytes -= self._resident.pop(rollout_id, 0)
        return self.open.pop(rollout_id, None)

    @property
    def replay_bytes(self) -> int:
        """How many bytes a restart would read again."""
        oldest = next(iter(self._held_since.values()), None)
        return 0 if oldest is None else self.fed_bytes - oldest[1]

    def overdue(self, replay_bytes_max: int) -> list[RolloutLog]:
        """The lives to carry forward now, the oldest first: none while a replay stays within the limit, or within twice
        what the open lives hold anyway (else carrying would cost more than it saves); then all of the older half."""
        oldest = next(iter(self._held_since.values()), None)
        if oldest is None or self._dead_letters or self.fed_bytes - oldest[1] <= replay_bytes_max:
            return []
        limit = max(replay_bytes_max, 2 * sum(life.size_bytes for life in self.open.values()))
        if self.fed_bytes - oldest[1] <= limit:
            return []
        return [
            self.open[rollout_id]
            for rollout_id, (_, fed_bytes) in self._held_since.items()
            if self.fed_bytes - fed_bytes > limit // 2 and not self.book.waits(rollout_id)
        ]

    def carry(self, life: RolloutLog, spilled: Iterable[TokenEntry]) -> list[OutputRecord]:
        """The ledger records that carry an open life's log, for the next transaction; the watermark may pass its start.

        :param spilled: its entries that are not in memory.
        """
        chunks = dump_life(life, spilled)
        through = max(self.next_offset - 1, life.carried.through if life.carried else -1)
        life.carried = self.book.carry(life.rollout_id, life.first_offset, through, len(chunks))
        self._watermark.release(self._held_since.pop(life.rollout_id)[0])
        self._hold(life.rollout_id, through + 1)
        self.counters["carried"] += 1
        return [
            OutputRecord(Topic.LEDGER, key, chunk, partition=self.config.partition)
            for key, chunk in zip(life.carried.keys(life.rollout_id), chunks, strict=True)
        ]

    def restore(self, life: RolloutLog, carried: Carried) -> None:
        """Go on with a life that was carried; before anything is fed."""
        life.carried = carried
        life.active_at = self.clock.placed(life.last_offset)
        self.open[life.rollout_id] = life
        self._hold(life.rollout_id, carried.through + 1)
        self.account(life)

    def _hold(self, rollout_id: str, offset: int) -> None:
        self._watermark.hold(offset)
        self._held_since[rollout_id] = (offset, self.fed_bytes)

    def time_out(self, caught_up_s: float) -> list[Effect]:
        """The partition was caught up for so many seconds: freeze the lives that have been idle for too long.

        They freeze at the last applied offset. That counts only once it is committed: another owner may see the
        complete event first.
        """
        self.clock.advance(caught_up_s)
        effects: list[Effect] = []
        for rollout_id, life in list(self.open.items()):
            if self.clock.now - life.active_at <= self.config.rollout_timeout_s:
                break
            self.counters["timed_out"] += 1
            effects.append(self._freeze(rollout_id, TimedOut(), self.next_offset - 1))
        return effects

    def watermark(self) -> int:
        """Where a replay has to start once everything that was taken is committed."""
        return self._watermark.lowest(self.next_offset)

    def take(self, published: Iterable[tuple[Freeze, Verdict] | DeadLetter]) -> list[OutputRecord]:
        """The ledger records that belong into one transaction with these published effects.

        The fold counts them as committed from now on: should the transaction fail, the fold is worthless and must
        be rebuilt from the ledger.
        """
        for item in published:
            if isinstance(item, DeadLetter):
                if self._dead_letters.popleft() != item.offset:
                    raise ValueError(f"dead letters out of order at offset {item.offset}")
                for held in (item.offset, *self._held_for_letters.pop(item.offset, ())):
                    self._watermark.release(held)
            else:
                freeze, verdict = item
                self._watermark.release(freeze.held_offset)
                self.book.decide(freeze.log, verdict)
        records = [
            OutputRecord(Topic.LEDGER, rollout_id.encode("ascii"), value, partition=self.config.partition)
            for rollout_id, value in self.book.changed(self._release_clear, self._unpublished_from)
        ]
        records += [
            OutputRecord(Topic.LEDGER, key, None, partition=self.config.partition)
            for key in self.book.dropped_keys()
        ]
        self.dead_letters_through = (
            self._dead_letters[0] - 1
            if self._dead_letters
            else max(self.dead_letters_through, self.next_offset - 1)
        )
        return [*records, self._progress()]

    @property
    def dirty(self) -> bool:
        """Whether a clear waits to be recorded: the watermark stands until then."""
        return self.book.holds_clears(self._unpublished_from)

    @property
    def _unpublished_from(self) -> int | None:
        return self._dead_letters[0] if self._dead_letters else None

    def _look_for_gap(self, record: InputRecord) -> None:
        if self.unread_offsets and not self._gap_seen:
            self._gap_seen = True
            until_ms = record.timestamp_ms + int(self.config.rollout_timeout_s * 1000)
            self.gap_until_ms = max(self.gap_until_ms, until_ms)
        self._after_gap = self.gap_until_ms > 0 and record.timestamp_ms <= self.gap_until_ms

    def expire(self, log_start: int) -> None:
        """Before anything is fed: the log starts at this offset. Where a replay would start earlier, lives the ledger holds
        as open lost records; where reading would, records were lost of which nothing is known.
        """
        if self.applied_offset >= 0:
            self.unread_offsets = max(0, log_start - (self.applied_offset + 1))
            self.counters["unread_offsets"] += self.unread_offsets
        for rollout_id, decided in self.book.open_before(log_start):
            life = self._life(rollout_id, log_start)
            life.fault(Reason.INPUT_EXPIRED)
            self.account(life)
            self.book.opened(rollout_id, decided.first_offset)
            self.counters["input_expired"] += 1

    def _feed_live(self, rollout_id: str, record: InputRecord) -> list[Effect]:
        state = self._state(rollout_id, record.offset)
        part = header(record.headers, PART)
        if part is not None and record.value is not None:
            if state is State.FROZEN:
                return self._late(record)
            whole = self._assemble(rollout_id, record, part)
            if not isinstance(whole, bytes):
                return whole
            record = record._replace(value=whole, headers=without(record.headers, PART))
            state = self._state(rollout_id, record.offset)
        if record.value is not None and len(record.value) > self.config.record_bytes_max:
            message = (
                f"{len(record.value)} bytes are above the worker's limit of {self.config.record_bytes_max}"
            )
            return self._fault(rollout_id, record, Reason.ROLLOUT_TOO_LARGE, message, truncate=True)
        life = self.open.get(rollout_id)
        known = life.prompts if life is not None and not life.oversized else None
        try:
            event = codec.decode_event(rollout_id, record.value, known)
        except DecodeError as error:
            return self._fault(rollout_id, record, error.reason, str(error))
        if part is not None and record.value is not None and isinstance(event, RolloutClear):
            message = "a clear must be one record: in parts it would have no offset of its own"
            return self._fault(rollout_id, record, Reason.INVALID_ENTRY, message)
        return self._apply(state, event, record)

    def _assemble(self, rollout_id: str, record: InputRecord, raw: bytes) -> bytes | list[Effect]:
        """The whole value if this part was its last one, else what follows from the part."""
        assert record.value is not None
        try:
            part = PartHeader.parse(raw)
            whole = self._life(rollout_id, record.offset).add_part(part, record.value, record.offset)
        except PartsTooLarge as error:
            return self._fault(rollout_id, record, Reason.ROLLOUT_TOO_LARGE, str(error), truncate=True)
        except PartError as error:
            return self._fault(rollout_id, record, Reason.UNDECODABLE_RECORD, str(error))
        return [] if whole is None else whole

    def _apply(self, state: State, event: InputEvent, record: InputRecord) -> list[Effect]:
        action, _ = TRANSITIONS[state, _INPUTS.get(type(event), Input.RECORD)]
        match action, event:
            case Action.WRITE, TokenEntry() | CallIntent() | CallCancelled() | CaptureIncomplete():
                life = self._life(event.rollout_id, record.offset)
                written = life.write(event, len(record.value or b""))
                if written is not Written.RECORDED:
                    self.counters[written.name.lower()] += 1
            case Action.LATE, _:
                return self._late(record)
            case Action.IGNORE, _:
                self.counters["ignored_after_freeze"] += 1
            case Action.FREEZE, RolloutComplete() | RolloutCancelled():
                return [self._freeze(event.rollout_id, event, record.offset)]
            case Action.FORGET, RolloutClear():
                self._forget(event, record.offset)
            case _:
                raise AssertionError(f"the table has no {action} for {event.event}")
        return []

    def _state(self, rollout_id: str, offset: int) -> State:
        if rollout_id in self.open:
            return State.OPEN
        return State.FROZEN if self.book.frozen_at(rollout_id, offset) else State.ABSENT

    def _life(self, rollout_id: str, offset: int, dispatch: RolloutClear | None = None) -> RolloutLog:
        life = self.open.get(rollout_id)
        if life is None:
            assembler = PartAssembler(self.config.record_bytes_max)
            life = RolloutLog(rollout_id, offset, self.config.limits, assembler, dispatch, self.clock.now)
            life.after_gap = self._after_gap and dispatch is None
            self.open[rollout_id] = life
            self._hold(rollout_id, offset)
            self.book.opened(rollout_id, offset)
        return life

    def _freeze(self, rollout_id: str, closing: Closing, offset: int) -> Freeze:
        life = self._life(rollout_id, offset)
        self._close(rollout_id)
        self.book.froze(rollout_id, offset)
        held_offset, _ = self._held_since.pop(rollout_id)
        self.counters["oversized"] += life.oversized
        return Freeze(life.freeze(closing, self.config.partition, offset), held_offset)

    def _forget(self, event: RolloutClear, offset: int) -> None:
        life = self._close(event.rollout_id)
        if life is not None:
            self._released += life.take_spilled()
            held_offset, _ = self._held_since.pop(event.rollout_id)
            if self._dead_letters:
                self._held_for_letters[self._dead_letters[-1]].append(held_offset)
            else:
                self._watermark.release(held_offset)
            self.counters["cleared"] += 1
        if self.book.cleared(event.rollout_id, offset):
            self._watermark.hold(offset)
        if event.group_id is not None or event.metadata is not None:
            self._life(event.rollout_id, offset, event)  # somebody waits for it: the dispatch opens the life

    def _release_clear(self, offset: int) -> None:
        self._watermark.release(offset)

    def _late(self, record: InputRecord) -> list[Effect]:
        message = "the rollout was frozen before; clear it before it is dispatched again"
        return self._set_aside(record, DeadLetterReason.LATE_AFTER_FREEZE, message)

    def _fault(
        self, rollout_id: str, record: InputRecord, reason: Reason, message: str, *, truncate: bool = False
    ) -> list[Effect]:
        """A record of this rollout is lost: dead letter, and the rollout is masked, never silently shortened."""
        action, _ = TRANSITIONS[self._state(rollout_id, record.offset), Input.FAULT]
        if action is Action.WRITE:
            self._life(rollout_id, record.offset).fault(reason)
        return self._set_aside(record, reason, message, truncate=truncate)

    def _set_aside(
        self, record: InputRecord, reason: Reason | DeadLetterReason, message: str, *, truncate: bool = False
    ) -> list[Effect]:
        self.counters[f"dead_letter.{reason}"] += 1
        if record.offset <= self.dead_letters_through:
            return []
        self._watermark.hold(record.offset)
        self._dead_letters.append(record.offset)
        return [dead_letter(record, self.config.topic_name, reason, message, truncate=truncate)]

    def _progress(self) -> OutputRecord:
        self.clock.mark(self.next_offset)
        progress = ProgressRecord(
            partition_count=self.config.partition_count,
            group=self.config.group,
            watermark=self.watermark(),
            applied_offset=self.applied_offset,
            applied_timestamp_ms=self.applied_timestamp_ms,
            dead_letters_through=self.dead_letters_through,
            clock_seconds=self.clock.now,
            clock_marks=self.clock.marks,
            gap_until_ms=self.gap_until_ms,
            topic_id=self.topic_id,
        )
        value = codec.encode_ledger(progress)
        return OutputRecord(Topic.LEDGER, PROGRESS_KEY, value, partition=self.config.partition)
