"""The rules of DELIVERY.md and CONTRACT.md once more, as plainly as they can be written: a log in, lives out.

Shares nothing with the worker's fold but the decoder of single events. It holds everything in memory and restarts
never, so that it has no replay, no ledger and no watermark to be wrong about.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import xxhash

from freezepoint.core.frozen import Closing, FrozenLog, TimedOut
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
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.topics import partition_for, rollout_id_of_key
from tests.chaos.tails import PART, Line


@dataclass
class Life:
    """What one life has recorded so far."""

    rollout_id: str
    partition: int
    first_offset: int
    dispatch: RolloutClear | None = None
    entries: dict[str, TokenEntry] = field(default_factory=dict)
    alternatives: list[TokenEntry] = field(default_factory=list)
    intents: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    marks: set[tuple[str, str]] = field(default_factory=set)
    faults: set[Reason] = field(default_factory=set)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    expired: bool = False
    after_gap: bool = False

    def write(self, event: InputEvent) -> None:
        match event:
            case CaptureIncomplete():
                self.marks.add((event.model_call_id, event.reason))
            case _ if self.expired:
                return
            case TokenEntry():
                self._write_entry(event)
            case CallIntent():
                self.intents.add(event.model_call_id)
            case CallCancelled():
                self.cancelled.add(event.model_call_id)

    def _write_entry(self, entry: TokenEntry) -> None:
        first = self.entries.setdefault(entry.model_call_id, entry)
        if first is entry or _same(first, entry):
            return
        if first.prompt_prefix is None and entry.prompt_prefix is None:
            self.faults.add(Reason.CONFLICTING_ENTRY)
        elif not any(_same(known, entry) for known in self.alternatives):
            self.alternatives.append(entry)

    def put_part(self, header: bytes, value: bytes) -> bytes | None:
        """The whole value, with its last part."""
        name, index, count = header.decode().split(":")
        if name in self.whole:
            return None
        held = self.parts.setdefault(name, {})
        held[int(index)] = value
        if len(held) < int(count):
            return None
        whole = b"".join(held[number] for number in range(int(count)))
        assert xxhash.xxh3_128_hexdigest(whole) == name
        del self.parts[name]
        self.whole.add(name)
        return whole

    def freeze(self, closing: Closing, offset: int) -> FrozenLog:
        if self.expired and isinstance(closing, RolloutComplete):
            closing = closing.model_copy(update={"n_calls": None})
        lost = {Reason.CAPTURE_INCOMPLETE} if self.parts and not self.expired else set()
        if self.after_gap and isinstance(closing, RolloutComplete):
            lost |= {Reason.INPUT_EXPIRED} if closing.n_calls not in (None, len(self.entries)) else set()
        return FrozenLog(
            rollout_id=self.rollout_id,
            partition=self.partition,
            first_offset=self.first_offset,
            freeze_offset=offset,
            closing=closing,
            entries=tuple(self.entries.values()),
            alternatives=tuple(self.alternatives),
            intents=frozenset(self.intents),
            cancelled=frozenset(self.cancelled),
            marks=frozenset(self.marks),
            faults=frozenset(self.faults | lost),
            dispatch=self.dispatch,
        )


Place = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class Truncation:
    """A partition's log lost everything below ``log_start`` while a worker still needed it for these rollouts.
    ``unread_from``: from there on, nobody had read it; lives that begin up to ``timeout_s`` after it may have begun in it."""

    log_start: int
    rollout_ids: frozenset[str]
    unread_from: int
    timeout_s: float


@dataclass
class NaiveFold:
    """Feed it each partition's records in order.

    ``timeouts``: where the worker says that idle rollouts froze, by (partition, offset): the log cannot tell, but
    everything else about them is checked. ``truncations``: by partition. ``lives``: what froze, in order. ``letters``:
    which records must be among the dead letters, and why.
    """

    partitions: int
    timeouts: Mapping[Place, Container[str]] = field(default_factory=dict)
    truncations: Mapping[int, Truncation] = field(default_factory=dict)
    lives: list[FrozenLog] = field(default_factory=list)
    letters: dict[Place, str] = field(default_factory=dict)
    open: dict[str, Life] = field(default_factory=dict)
    ignored: int = 0
    _frozen: set[str] = field(default_factory=set)
    _gaps: dict[int, float] = field(default_factory=dict)
    """By truncated partition: until when, in milliseconds, a life may have begun in what was lost."""

    def feed(self, line: Line) -> None:
        cut = self.truncations.get(line.partition)
        if cut is not None and cut.unread_from <= line.offset < cut.log_start:
            return
        if cut is not None and line.offset >= cut.log_start and line.partition not in self._gaps:
            self._truncate(cut, line)
        self._feed(line)
        due = self.timeouts.get((line.partition, line.offset))
        if due is not None:
            for rollout_id in [name for name in self.open if name in due]:
                self._freeze(rollout_id, TimedOut(), line)

    def _truncate(self, cut: Truncation, line: Line) -> None:
        unread = cut.unread_from < cut.log_start
        self._gaps[line.partition] = line.timestamp_ms + cut.timeout_s * 1000 if unread else 0.0
        for rollout_id in cut.rollout_ids & self.open.keys():
            expired = Life(rollout_id, line.partition, cut.log_start, expired=True)
            expired.faults.add(Reason.INPUT_EXPIRED)
            self.open[rollout_id] = expired

    def _feed(self, line: Line) -> None:
        rollout_id = rollout_id_of_key(line.key)
        if rollout_id is None or line.key is None:
            self._set_aside(line, "invalid_key")
        elif partition_for(line.key, self.partitions) != line.partition:
            self._set_aside(line, "wrong_partition")
        else:
            self._feed_own(rollout_id, line)

    def _feed_own(self, rollout_id: str, line: Line) -> None:
        value, part = line.value, line.header(PART)
        if part is not None and value is not None:
            if rollout_id in self._frozen:
                self._set_aside(line, "late_after_freeze")
                return
            value = self._life(rollout_id, line).put_part(part, value)
            if value is None:
                return
        try:
            event = codec.decode_event(rollout_id, value)
        except DecodeError as error:
            if rollout_id not in self._frozen:
                self._life(rollout_id, line).faults.add(error.reason)
            self._set_aside(line, error.reason)
            return
        self._apply(rollout_id, event, line)

    def _apply(self, rollout_id: str, event: InputEvent, line: Line) -> None:
        match event:
            case RolloutClear():
                self.open.pop(rollout_id, None)
                self._frozen.discard(rollout_id)
                if event.group_id is not None or event.metadata is not None:
                    life = self._life(rollout_id, line)
                    life.dispatch, life.after_gap = event, False
            case RolloutComplete() | RolloutCancelled():
                if rollout_id in self._frozen:
                    self.ignored += 1
                else:
                    self._freeze(rollout_id, event, line)
            case _ if rollout_id in self._frozen:
                self._set_aside(line, "late_after_freeze")
            case _:
                self._life(rollout_id, line).write(event)

    def _life(self, rollout_id: str, line: Line) -> Life:
        if rollout_id not in self.open:
            life = self.open[rollout_id] = Life(rollout_id, line.partition, line.offset)
            life.after_gap = line.timestamp_ms <= self._gaps.get(line.partition, 0)
        return self.open[rollout_id]

    def _freeze(self, rollout_id: str, closing: Closing, line: Line) -> None:
        life = self._life(rollout_id, line)
        del self.open[rollout_id]
        self._frozen.add(rollout_id)
        self.lives.append(life.freeze(closing, line.offset))

    def _set_aside(self, line: Line, reason: str) -> None:
        self.letters[line.partition, line.offset] = str(reason)


def _same(left: TokenEntry, right: TokenEntry) -> bool:
    return left.model_dump(mode="json") == right.model_dump(mode="json")
