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
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from freezepoint.core.digests import canonical_routes
from freezepoint.core.frozen import Closing, FrozenLog, SpillRef
from freezepoint.core.snapshot import body_digest, prompt_form
from freezepoint_schemas.arrays import TokenArray
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.ledger import Carried
from freezepoint_schemas.parts import PartAssembler, PartHeader
from freezepoint_schemas.prompts import KnownPrompts
from freezepoint_schemas.reasons import Reason

_T = TypeVar("_T")
LogEvent = TokenEntry | CallIntent | CallCancelled | CaptureIncomplete
_NOTHING_LEFT = {"n_calls": None, "terminal_call_id": None, "terminal_response_id": None}
"""What a complete event says of calls, once the payload was dropped: nothing is left to count or to find."""
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What a log knows beside its entries."""

    intents: frozenset[str]
    cancelled: frozenset[str]
    marks: frozenset[tuple[str, str]]
    faults: frozenset[Reason]


class _Known(NamedTuple):
    """What is remembered of a recorded call, wherever its entry is."""

    body: bytes
    form: bytes
    by_reference: bool


@dataclass(slots=True)
class RolloutLog:
    """One open life of a rollout id.

    ``size_bytes`` counts the wire bytes of what was kept, :attr:`held_bytes` the parts that wait for others as well;
    ``memory_bytes`` is about what its entries hold in memory. ``spilled``: where entries were put away, in order;
    ``garbage``: what of that nobody needs any more. A log that grew too large keeps that fact alone, and as many parts
    as one value can have: the event that closes it may come in parts too.
    """

    rollout_id: str
    first_offset: int
    limits: LogLimits
    parts: PartAssembler
    dispatch: RolloutClear | None = None
    active_at: float = 0.0
    """When the last record came, on the partition's clock."""
    last_offset: int = -1
    opened_ms: int = 0
    """Append time of the first record; for people to look at, nothing depends on it."""
    after_gap: bool = False
    """Whether records that retention took unread may have been its first ones."""
    carried: Carried | None = None
    """Where its log was written to, so that a replay may skip its records up to there."""
    size_bytes: int = 0
    memory_bytes: int = 0
    spilled: list[SpillRef] = field(default_factory=list)
    garbage: list[SpillRef] = field(default_factory=list)
    oversized: bool = False
    frozen: bool = False
    prompts: KnownPrompts = field(default_factory=KnownPrompts)
    """For the decoder alone."""
    _buffers: set[int] = field(default_factory=set)
    """The ``id`` of buffers in which several entries' prompts lie; they are held by these entries, and counted once."""
    _entries: dict[str, TokenEntry] = field(default_factory=dict)
    _known: dict[str, _Known] = field(default_factory=dict)
    _alternatives: dict[tuple[str, bytes], TokenEntry | None] = field(default_factory=dict)
    """None where the entry is spilled."""
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
        try:
            return self.parts.add(header, part, offset)
        finally:  # what is refused is remembered as well
            self._limit()

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
            closing = closing.model_copy(update=_NOTHING_LEFT)
        return FrozenLog(
            rollout_id=self.rollout_id,
            partition=partition,
            first_offset=self.first_offset,
            freeze_offset=offset,
            closing=closing,
            entries=tuple(self._entries.values()),
            alternatives=tuple(entry for entry in self._alternatives.values() if entry is not None),
            intents=frozenset(self._intents),
            cancelled=frozenset(self._cancelled),
            marks=frozenset(self._marks),
            faults=self._final_faults(closing),
            dispatch=self.dispatch,
            spilled=tuple(self.spilled),
            memory_bytes=self.memory_bytes,
            bodies={call_id: known.body for call_id, known in self._known.items()},
        )

    def entries(self) -> list[TokenEntry]:
        """The entries in memory, the kept ones first."""
        alternatives = (entry for entry in self._alternatives.values() if entry is not None)
        return [*self._entries.values(), *alternatives]

    @property
    def calls(self) -> int:
        """How many distinct calls are recorded."""
        return len(self._known)

    def facts(self) -> Facts:
        """Everything but the entries, as it stands."""
        return Facts(
            frozenset(self._intents),
            frozenset(self._cancelled),
            frozenset(self._marks),
            frozenset(self._faults),
        )

    def spill(self) -> list[TokenEntry]:
        """Hand out the entries in memory, to be put away, and keep what is needed to know them again.

        :raises FrozenLogError: the log is frozen; nothing changed.
        """
        self._require_open()
        entries = self.entries()
        self.prompts.forget()
        self._buffers.clear()
        self._entries.clear()
        self._alternatives = dict.fromkeys(self._alternatives)
        self.memory_bytes = 0
        return entries

    def take_spilled(self) -> list[SpillRef]:
        """Everything of this log that is in the spool, which nobody will ask for any more."""
        refs, self.spilled, self.garbage = [*self.spilled, *self.garbage], [], []
        return refs

    def _final_faults(self, closing: Closing) -> frozenset[Reason]:
        """Once the payload is dropped, what could still be compared depends on arrival: such faults stay out."""
        if self.oversized:
            return frozenset(self._faults - {Reason.CONFLICTING_ENTRY})
        faults = set(self._faults)
        if self.parts.incomplete:
            faults.add(Reason.CAPTURE_INCOMPLETE)
        counted = closing.n_calls if isinstance(closing, RolloutComplete) else None
        if self.after_gap and counted not in (None, len(self._known)):
            faults.add(Reason.INPUT_EXPIRED)
        return frozenset(faults)

    def _write_entry(self, entry: TokenEntry, size_bytes: int) -> Written:
        if self.oversized:
            return Written.RECORDED
        call_id, body, form = entry.model_call_id, body_digest(entry), prompt_form(entry)
        known = self._known.get(call_id)
        if known is None:
            self._known[call_id] = _Known(body, form, entry.prompt_prefix is not None)
            self._entries[call_id] = _compact(entry)
            self._grow(entry, size_bytes)
            return Written.RECORDED
        if known.body == body and (known.form == form or (call_id, form) in self._alternatives):
            return Written.DUPLICATE
        if known.body != body or not (entry.prompt_prefix or known.by_reference):
            self._faults.add(Reason.CONFLICTING_ENTRY)
            return Written.CONFLICT
        self._alternatives[call_id, form] = _compact(entry)
        self._grow(entry, size_bytes)
        return Written.DEFERRED

    def _note(self, known: set[_T], item: _T, size_bytes: int) -> Written:
        if item in known:
            return Written.DUPLICATE
        known.add(item)
        self.size_bytes += size_bytes
        self._limit()
        return Written.RECORDED

    def _grow(self, entry: TokenEntry, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.memory_bytes += memory_of(entry) - self._shared_bytes(entry.prompt_token_ids)
        self._limit()

    def _shared_bytes(self, tokens: TokenArray) -> int:
        """How many bytes of an array are counted already, less those that its buffer has beyond it."""
        buffer = tokens.base
        if not isinstance(buffer, np.ndarray):
            return 0
        if id(buffer) in self._buffers:
            return tokens.nbytes
        self._buffers.add(id(buffer))
        return tokens.nbytes - buffer.nbytes

    def _limit(self) -> None:
        too_many = len(self._known) + len(self._alternatives) > self.limits.entries_max
        if not self.oversized and (too_many or self.held_bytes > self.limits.bytes_max):
            self.fault(Reason.ROLLOUT_TOO_LARGE)
        if self.oversized:
            self._drop_payload()

    def _drop_payload(self) -> None:
        self.oversized = True
        self.size_bytes = self.memory_bytes = 0
        self.garbage += self.spilled
        self.spilled = []
        self.prompts.forget()
        self._buffers.clear()
        self._entries.clear()
        self._known.clear()
        self._alternatives.clear()
        self._intents.clear()
        self._cancelled.clear()
        self._marks = {_DROPPED_MARK} if self._marks else set()
        self.parts.drop_oldest(self.parts.value_bytes_max)

    def _require_open(self) -> None:
        if self.frozen:
            raise FrozenLogError(f"the log of rollout {self.rollout_id} is frozen")


_ENTRY_OVERHEAD_BYTES = 3 * 1024
_OBJECT_FACTOR = 2


def memory_of(entry: TokenEntry) -> int:
    """About how many bytes an entry holds in memory: its arrays, and its output items as Python objects."""
    routes = entry.routed_experts
    routes_bytes = (
        routes.nbytes if isinstance(routes, np.ndarray) else 0 if routes is None else _json_bytes(routes)
    )
    return (
        entry.prompt_token_ids.nbytes
        + entry.generation_token_ids.nbytes
        + entry.generation_log_probs.nbytes
        + routes_bytes
        + _OBJECT_FACTOR * _json_bytes(entry.output_items)
        + _ENTRY_OVERHEAD_BYTES
    )


def _json_bytes(value: Any) -> int:
    return len(orjson.dumps(value))


def _compact(entry: TokenEntry) -> TokenEntry:
    """Nested lists of routed experts are an array, where they are one: a tenth of the memory, the same values."""
    if not isinstance(entry.routed_experts, list):
        return entry
    return entry.model_copy(update={"routed_experts": canonical_routes(entry.routed_experts)})


class FrozenLogError(Exception):
    """A frozen log was written to: a bug of the caller, who has to ask the table first."""
