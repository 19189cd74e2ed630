"""What must come out of one partition: the contract's rules, read once more and written down plainly.

Knows nothing of ledgers, replays, watermarks or limits; sees the whole log at once. Shares with the worker only the decoder
(`codec`) and the build of a frozen log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freezepoint.core.frozen import Closing, FrozenLog, TimedOut
from freezepoint.core.records import InputRecord
from freezepoint_schemas import codec
from freezepoint_schemas.errors import DecodeError
from freezepoint_schemas.events import (
    CallCancelled,
    CallIntent,
    CaptureIncomplete,
    RolloutCancelled,
    RolloutClear,
    RolloutComplete,
    TokenEntry,
)
from freezepoint_schemas.headers import PART, header
from freezepoint_schemas.parts import PartHeader
from freezepoint_schemas.reasons import DeadLetterReason, Reason
from freezepoint_schemas.topics import partition_for, rollout_id_of_key

_PROMPT = {"prompt_token_ids", "prompt_prefix"}


@dataclass
class Life:
    """The records of one id between two clears."""

    rollout_id: str
    first_offset: int
    dispatch: RolloutClear | None = None
    ended_at: int | None = None
    frozen: FrozenLog | None = None
    offsets: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    intents: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    marks: set[tuple[str, str]] = field(default_factory=set)
    faults: set[Reason] = field(default_factory=set)
    parts: defaultdict[PartHeader, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    whole: set[PartHeader] = field(default_factory=set)


@dataclass(frozen=True)
class Letter:
    offset: int
    reason: Reason | DeadLetterReason
    record: InputRecord
    rollout_id: str | None


class Fold:
    """``timeouts``: by offset, the ids that the workers froze there; the log itself does not tell. ``idle``: those of them
    that were not open, with the offset."""

    def __init__(self, partition: int, partition_count: int, timeouts: Iterable[tuple[int, str]]) -> None:
        self.lives: list[Life] = []
        self.letters: list[Letter] = []
        self.idle: list[tuple[str, int]] = []
        self._partition = partition
        self._partition_count = partition_count
        self._timeouts = sorted(timeouts)
        self._open: dict[str, Life] = {}
        self._frozen: set[str] = set()

    def run(self, records: Sequence[InputRecord]) -> None:
        for record in records:
            self._time_out(record.offset)
            self._record(record)
        self._time_out(1 << 62)

    def _time_out(self, next_offset: int) -> None:
        while self._timeouts and self._timeouts[0][0] < next_offset:
            offset, rollout_id = self._timeouts.pop(0)
            if rollout_id in self._open:
                self._freeze(self._open[rollout_id], TimedOut(), offset)
            else:
                self.idle.append((rollout_id, offset))

    def _record(self, record: InputRecord) -> None:
        rollout_id = rollout_id_of_key(record.key)
        if rollout_id is None or record.key is None:
            self._letter(record, DeadLetterReason.INVALID_KEY, None)
        elif partition_for(record.key, self._partition_count) != self._partition:
            self._letter(record, DeadLetterReason.WRONG_PARTITION, None)
        elif (part := header(record.headers, PART)) is not None and record.value is not None:
            self._part(rollout_id, record, PartHeader.parse(part))
        else:
            self._whole(rollout_id, record)

    def _part(self, rollout_id: str, record: InputRecord, part: PartHeader) -> None:
        if rollout_id in self._frozen:
            self._letter(record, DeadLetterReason.LATE_AFTER_FREEZE, rollout_id)
            return
        life = self._life(rollout_id, record.offset)
        assert record.value is not None
        name = replace(part, index=0)
        if name in life.whole:
            return
        parts = life.parts[name]
        parts[part.index] = record.value
        if len(parts) == part.count:
            del life.parts[name]
            life.whole.add(name)
            self._whole(
                rollout_id, record._replace(value=b"".join(parts[index] for index in range(part.count)))
            )

    def _whole(self, rollout_id: str, record: InputRecord) -> None:
        try:
            event = codec.decode_event(rollout_id, record.value)
        except DecodeError as error:
            if rollout_id not in self._frozen:
                self._life(rollout_id, record.offset).faults.add(error.reason)
            self._letter(record, error.reason, rollout_id)
            return
        if isinstance(event, RolloutClear):
            self._clear(event, record.offset)
        elif isinstance(event, (RolloutComplete, RolloutCancelled)):
            if rollout_id not in self._frozen:
                self._freeze(self._life(rollout_id, record.offset), event, record.offset)
        elif rollout_id in self._frozen:
            self._letter(record, DeadLetterReason.LATE_AFTER_FREEZE, rollout_id)
        else:
            _write(self._life(rollout_id, record.offset), event)

    def _life(self, rollout_id: str, offset: int, dispatch: RolloutClear | None = None) -> Life:
        life = self._open.get(rollout_id)
        if life is None:
            life = self._open[rollout_id] = Life(rollout_id, offset, dispatch)
            self.lives.append(life)
        life.offsets.append(offset)
        return life

    def _clear(self, event: RolloutClear, offset: int) -> None:
        life = self._open.pop(event.rollout_id, None)
        if life is not None:
            life.ended_at = offset
        self._frozen.discard(event.rollout_id)
        if event.group_id is not None or event.metadata is not None:
            self._life(event.rollout_id, offset, event)

    def _freeze(self, life: Life, closing: Closing, offset: int) -> None:
        del self._open[life.rollout_id]
        self._frozen.add(life.rollout_id)
        life.ended_at = offset
        life.frozen = _frozen_log(life, closing, self._partition, offset)

    def _letter(self, record: InputRecord, reason: Reason | DeadLetterReason, rollout_id: str | None) -> None:
        self.letters.append(Letter(record.offset, reason, record, rollout_id))


def _write(life: Life, event: TokenEntry | CallIntent | CallCancelled | CaptureIncomplete) -> None:
    match event:
        case TokenEntry():
            life.entries.append(event)
        case CallIntent():
            life.intents.add(event.model_call_id)
        case CallCancelled():
            life.cancelled.add(event.model_call_id)
        case CaptureIncomplete():
            life.marks.add((event.model_call_id, event.reason))


def _frozen_log(life: Life, closing: Closing, partition: int, offset: int) -> FrozenLog:
    """The first entry of each call; of the others those that may be the same with the prompt written another way."""
    first: dict[str, TokenEntry] = {}
    others: list[TokenEntry] = []
    faults = set(life.faults)
    for entry in life.entries:
        known = first.setdefault(entry.model_call_id, entry)
        if known is entry or _content(known) == _content(entry):
            continue
        by_reference = known.prompt_prefix is not None or entry.prompt_prefix is not None
        if by_reference and _content(known, _PROMPT) == _content(entry, _PROMPT):
            others.append(entry)
        else:
            faults.add(Reason.CONFLICTING_ENTRY)
    if life.parts:
        faults.add(Reason.CAPTURE_INCOMPLETE)
    return FrozenLog(
        rollout_id=life.rollout_id,
        partition=partition,
        first_offset=life.first_offset,
        freeze_offset=offset,
        closing=closing,
        entries=tuple(first.values()),
        alternatives=tuple(others),
        intents=frozenset(life.intents),
        cancelled=frozenset(life.cancelled),
        marks=frozenset(life.marks),
        faults=frozenset(faults),
        dispatch=life.dispatch,
    )


def _content(entry: TokenEntry, without: set[str] | None = None) -> dict[str, Any]:
    return entry.model_dump(exclude=without)
