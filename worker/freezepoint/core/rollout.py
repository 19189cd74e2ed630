"""One rollout's log, and the table of what an input does to it.

Two rules open this file:

1. A log only grows until it is frozen, and a frozen log never changes.
2. What a log says does not depend on the order or the number of times its records came, but for which of two
   conflicting payloads was kept.

So a log is a few sets. Everything that needs an order (references, parents, digests over prompts) waits for the
freeze, where it works on the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from freezepoint.core.frozen import Closing, FrozenLog
from freezepoint.core.snapshot import body_digest, prompt_form
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.reasons import Reason

_T = TypeVar("_T")
LogEvent = TokenEntry | CallIntent | CallCancelled | CaptureIncomplete
_DROPPED_MARK = ("", "")
"""Stands for all marks of a log whose payload was dropped: of a text that a producer chose, nothing is left."""


class State(Enum):
    """Where a rollout id stands, seen from the next offset."""

    ABSENT = auto()
    """No open life: never seen, or cleared since."""
    OPEN = auto()
    """A life is being recorded."""
    FROZEN = auto()
    """The last life froze and was not cleared since; its result is published or on its way."""


class Input(Enum):
    """What a record is, as far as the table cares."""

    RECORD = auto()
    """An entry, an intent, a cancelled call, an incomplete mark, or a part of a split record."""
    FAULT = auto()
    """A record of this rollout that was lost: undecodable, invalid, foreign, too large."""
    CLOSE = auto()
    """A complete or cancellation."""
    CLEAR = auto()
    """A clear or tombstone."""


class Action(Enum):
    """What the partition does."""

    WRITE = auto()
    """Write it into the life, which opens where there is none."""
    FREEZE = auto()
    """Freeze the life, which opens where there is none (a complete without any record still gets its result)."""
    FORGET = auto()
    """Drop the open life, if any, and remember the clear. A freeze before it stands."""
    LATE = auto()
    """Too late: dead letter, the published result stands."""
    IGNORE = auto()
    """Nothing but a count."""


TRANSITIONS: dict[tuple[State, Input], tuple[Action, State]] = {
    (State.ABSENT, Input.RECORD): (Action.WRITE, State.OPEN),
    (State.ABSENT, Input.FAULT): (Action.WRITE, State.OPEN),
    (State.ABSENT, Input.CLOSE): (Action.FREEZE, State.FROZEN),
    (State.ABSENT, Input.CLEAR): (Action.FORGET, State.ABSENT),
    (State.OPEN, Input.RECORD): (Action.WRITE, State.OPEN),
    (State.OPEN, Input.FAULT): (Action.WRITE, State.OPEN),
    (State.OPEN, Input.CLOSE): (Action.FREEZE, State.FROZEN),
    (State.OPEN, Input.CLEAR): (Action.FORGET, State.ABSENT),
    (State.FROZEN, Input.RECORD): (Action.LATE, State.FROZEN),
    (State.FROZEN, Input.FAULT): (Action.IGNORE, State.FROZEN),
    (State.FROZEN, Input.CLOSE): (Action.IGNORE, State.FROZEN),
    (State.FROZEN, Input.CLEAR): (Action.FORGET, State.ABSENT),
}


class Written(Enum):
    """What became of an event that was written into a log."""

    RECORDED = auto()
    DUPLICATE = auto()
    CONFLICT = auto()
    DEFERRED = auto()
    """A repeat whose prompt is written another way: duplicate or conflict shows at the freeze."""


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Above these a rollout is masked ``rollout_too_large`` and its payload dropped."""

    bytes_max: int
    entries_max: int


@dataclass(slots=True)
class RolloutLog:
    """One open life of a rollout id.

    ``size_bytes`` counts the wire bytes of what is kept, :attr:`held_bytes` the parts that wait for others as well.
    A log that grew too large keeps that fact alone, and as many parts as one value can have: the event that closes it
    may come in parts too.
    """

    rollout_id: str
    first_offset: int
    limits: LogLimits
    parts: PartAssembler
    dispatch: RolloutClear | None = None
    active_at: float = 0.0
    """When the last record came, on the partition's clock."""
    size_bytes: int = 0
    oversized: bool = False
    frozen: bool = False
    _entries: dict[str, TokenEntry] = field(default_factory=dict)
    _digests: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    _alternatives: dict[tuple[str, bytes], TokenEntry] = field(default_factory=dict)
    _intents: set[str] = field(default_factory=set)
    _cancelled: set[str] = field(default_factory=set)
    _marks: set[tuple[str, str]] = field(default_factory=set)
    _faults: set[Reason] = field(default_factory=set)

    def write(self, event: LogEvent, size_bytes: int) -> Written:
        """Write one event down. :raises FrozenLogError: the log is frozen; nothing changed."""
        self._require_open()
        match event:
            case TokenEntry():
                return self._write_entry(event, size_bytes)
            case CallIntent():
                return self._note(self._intents, event.model_call_id, size_bytes)
            case CallCancelled():
                return self._note(self._cancelled, event.model_call_id, size_bytes)
            case CaptureIncomplete():
                mark = _DROPPED_MARK if self.oversized else (event.model_call_id, event.reason)
                return self._note(self._marks, mark, size_bytes)

    def add_part(self, header: PartHeader, part: bytes, offset: int) -> bytes | None:
        """One part of a split record: the whole value once it is here (see :meth:`PartAssembler.add`).

        :raises PartError: the parts contradict each other.
        :raises FrozenLogError: the log is frozen; nothing changed.
        """
        self._require_open()
        whole = self.parts.add(header, part, offset)
        self._limit()
        return whole

    @property
    def held_bytes(self) -> int:
        return self.size_bytes + self.parts.held_bytes

    def fault(self, reason: Reason) -> None:
        """A record of this rollout was lost, or the rollout as a whole is masked for this reason.

        :raises FrozenLogError: the log is frozen; nothing changed.
        """
        self._require_open()
        self._faults.add(reason)
        if reason in (Reason.ROLLOUT_TOO_LARGE, Reason.INPUT_EXPIRED):
            self._drop_payload()

    def freeze(self, closing: Closing, partition: int, offset: int) -> FrozenLog:
        """The log as it is, for good. :raises FrozenLogError: it is frozen already; nothing changed."""
        self._require_open()
        self.frozen = True
        if self.oversized and isinstance(closing, RolloutComplete):
            closing = closing.model_copy(update={"n_calls": None})  # nothing is left to count
        return FrozenLog(
            rollout_id=self.rollout_id,
            partition=partition,
            first_offset=self.first_offset,
            freeze_offset=offset,
            closing=closing,
            entries=tuple(self._entries.values()),
            alternatives=tuple(self._alternatives.values()),
            intents=frozenset(self._intents),
            cancelled=frozenset(self._cancelled),
            marks=frozenset(self._marks),
            faults=self._final_faults(),
            dispatch=self.dispatch,
        )

    def _final_faults(self) -> frozenset[Reason]:
        """Once the payload is dropped, what could still be compared depends on arrival: such faults stay out."""
        if self.oversized:
            return frozenset(self._faults - {Reason.CONFLICTING_ENTRY})
        return frozenset(self._faults | ({Reason.CAPTURE_INCOMPLETE} if self.parts.incomplete else set()))

    def _write_entry(self, entry: TokenEntry, size_bytes: int) -> Written:
        if self.oversized:
            return Written.RECORDED
        call_id, body, form = entry.model_call_id, body_digest(entry), prompt_form(entry)
        known = self._digests.get(call_id)
        if known is None:
            self._digests[call_id] = (body, form)
            self._entries[call_id] = entry
            self._grow(size_bytes)
            return Written.RECORDED
        if known == (body, form) or (known[0] == body and (call_id, form) in self._alternatives):
            return Written.DUPLICATE
        if known[0] != body or not (entry.prompt_prefix or self._entries[call_id].prompt_prefix):
            self._faults.add(Reason.CONFLICTING_ENTRY)
            return Written.CONFLICT
        self._alternatives[call_id, form] = entry
        self._grow(size_bytes)
        return Written.DEFERRED

    def _note(self, known: set[_T], item: _T, size_bytes: int) -> Written:
        if item in known:
            return Written.DUPLICATE
        known.add(item)
        self._grow(size_bytes)
        return Written.RECORDED

    def _grow(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._limit()

    def _limit(self) -> None:
        too_many = len(self._entries) + len(self._alternatives) > self.limits.entries_max
        if not self.oversized and (too_many or self.held_bytes > self.limits.bytes_max):
            self.fault(Reason.ROLLOUT_TOO_LARGE)
        if self.oversized:
            self._drop_payload()

    def _drop_payload(self) -> None:
        self.oversized = True
        self.size_bytes = 0
        self._entries.clear()
        self._digests.clear()
        self._alternatives.clear()
        self._intents.clear()
        self._cancelled.clear()
        self._marks = {_DROPPED_MARK} if self._marks else set()
        self.parts.drop_oldest(self.parts.value_bytes_max)

    def _require_open(self) -> None:
        if self.frozen:
            raise FrozenLogError(f"the log of rollout {self.rollout_id} is frozen")


class FrozenLogError(Exception):
    """A frozen log was written to: a bug of the caller, who has to ask the table first."""
