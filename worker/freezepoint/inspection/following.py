"""One rollout's records out of its partition, folded into the lives that its workers saw.

No record says that a worker timed a life out, what it carried past the topic's retention, or that retention has taken the
first records of a life. The ledger does, more or less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from freezepoint.core.carry import load_life
from freezepoint.core.effects import DeadLetter, Effect, Freeze
from freezepoint.core.frozen import FrozenLog, TimedOut
from freezepoint.core.ledger import Decided
from freezepoint.core.partition import PartitionCore
from freezepoint.core.records import InputRecord
from freezepoint.core.rollout import RolloutLog
from freezepoint.core.snapshot import take_snapshot
from freezepoint.inspection.ledger import Ledger
from freezepoint_schemas.events import RolloutComplete
from freezepoint_schemas.headers import ERROR_MESSAGE, header
from freezepoint_schemas.reasons import Reason


class LifeState(StrEnum):
    """How a life ended, as far as the log tells."""

    FROZEN = "frozen"
    OPEN = "open"
    """There is no end yet; it is shown as if it completed now."""
    CLEARED = "cleared"
    """A clear came before any end; it is shown as if it completed then."""
    GONE = "gone"
    """It was published, and nothing of it is in the log any more."""


class Beginning(StrEnum):
    """Whether a life's first records are still there."""

    KEPT = "kept"
    CARRIED = "carried"
    """The topic has lost them, the ledger holds them."""
    REMOVED = "removed"
    DOUBTED = "doubted"
    """Most likely removed: what is left is not what was published, or names calls that are not there."""
    UNKNOWN = "unknown"
    """Records before the first one that is left were removed, and nothing tells whose they were."""


@dataclass(frozen=True, slots=True)
class Life:
    """``notes``: what came of its id between its beginning and the next life's, and could not be used, in words."""

    log: FrozenLog
    state: LifeState
    beginning: Beginning = Beginning.KEPT
    first_ms: int | None = None
    """When its first record was appended; None where that is not in the log."""
    notes: Sequence[str] = ()


@dataclass(slots=True)
class Follower:
    """Folds the records of one key. Give it all of the partition, in order."""

    rollout_id: str
    core: PartitionCore
    ledger: Ledger = field(default_factory=Ledger)
    log_start: int = -1
    """The first offset that was there; -1 while there was none."""
    _logs: list[tuple[FrozenLog, LifeState]] = field(default_factory=list)
    _notes: list[tuple[int, str]] = field(default_factory=list)
    _stamps: dict[int, int] = field(default_factory=dict)
    _is_past_freeze: bool = False
    _is_past_carried: bool = False

    @property
    def _decided(self) -> Decided:
        return self.ledger.decided

    def take(self, record: InputRecord) -> None:
        if self.log_start < 0:
            self.log_start = record.offset
        self._catch_up(record.offset)
        if record.key != self.rollout_id.encode("ascii"):
            return
        self._stamps[record.offset] = record.timestamp_ms
        before, ignored = self._open, self.core.counters["ignored_after_freeze"]
        effects = self.core.feed(record)
        if before is not None and before is not self._open and not before.frozen:
            self._cleared(before, record.offset)
        self._keep(effects)
        if self.core.counters["ignored_after_freeze"] > ignored:
            frozen_at = self.core.book.freeze_offset(self.rollout_id)
            message = f"an end that came too late: the rollout was frozen at offset {frozen_at}"
            self._notes.append((record.offset, f"offset {record.offset}: {message}"))

    def lives(self) -> list[Life]:
        """All lives that are known, the oldest first; asked for once, at the end."""
        self._catch_up(None)
        life = self._open
        if life is not None:
            self._end(life, life.last_offset, LifeState.OPEN)
        self._add_gone()
        return [self._life(index) for index in range(len(self._logs))]

    @property
    def _open(self) -> RolloutLog | None:
        return self.core.open.get(self.rollout_id)

    def _catch_up(self, next_offset: int | None) -> None:
        """Do what a worker did behind the records that come before this offset (None: the end of the log)."""
        carried = self._decided.carried
        if carried is not None and not self._is_past_carried and _is_past(next_offset, carried.through):
            self._is_past_carried = True
            self._restore_carried()
        freeze = self._decided.freeze_offset
        if freeze >= 0 and not self._is_past_freeze and _is_past(next_offset, freeze):
            self._is_past_freeze = True
            self._apply_freeze(freeze)

    def _apply_freeze(self, freeze: int) -> None:
        """Where the log has no record that froze the life, a worker timed it out, or all of it is gone."""
        if self._open is None:
            if self.core.book.freeze_offset(self.rollout_id) != freeze:
                self.core.book.decided[self.rollout_id] = replace(
                    self._decided, carried=None, first_offset=-1
                )
        elif Reason.ROLLOUT_TIMEOUT in self._decided.reasons:
            self.core.next_offset = freeze + 1
            self._keep(self.core.time_out(2 * self.core.config.rollout_timeout_s))

    def _restore_carried(self) -> None:
        """The open life as the ledger holds it, where the log has lost its first records."""
        carried = self._decided.carried
        if carried is None or self._decided.first_offset >= self.log_start >= 0:
            return
        chunks = [self.ledger.chunks.get(key, b"") for key in carried.keys(self.rollout_id)]
        config = self.core.config
        try:
            life = load_life(self.rollout_id, chunks, config.limits, config.record_bytes_max)
        except (KeyError, ValueError):
            return  # it went on while the ledger was read
        self.core.open.pop(self.rollout_id, None)
        self.core.restore(life, carried)

    def _keep(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Freeze():
                    self._logs.append((effect.log, LifeState.FROZEN))
                case DeadLetter():
                    message = (header(effect.record.headers, ERROR_MESSAGE) or b"").decode()
                    self._notes.append((effect.offset, f"offset {effect.offset}: {effect.reason}: {message}"))

    def _cleared(self, life: RolloutLog, offset: int) -> None:
        """A dispatch that was said again is no life of its own."""
        if life.dispatch is None or life.last_offset > life.first_offset:
            self._end(life, offset - 1, LifeState.CLEARED)

    def _end(self, life: RolloutLog, offset: int, state: LifeState) -> None:
        closing = RolloutComplete(rollout_id=self.rollout_id)
        self._logs.append((life.freeze(closing, self.core.config.partition, offset), state))

    def _add_gone(self) -> None:
        """What the ledger calls published, and the log has nothing of any more."""
        freeze = self._decided.freeze_offset
        timed_out = Reason.ROLLOUT_TIMEOUT in self._decided.reasons
        is_there = any(log.first_offset <= freeze <= log.freeze_offset for log, _ in self._logs)
        if freeze < 0 or is_there or not (timed_out or freeze < self.log_start or self.log_start < 0):
            return
        log = FrozenLog(
            self.rollout_id,
            self.core.config.partition,
            first_offset=freeze,
            freeze_offset=freeze,
            closing=TimedOut() if timed_out else RolloutComplete(rollout_id=self.rollout_id),
        )
        earlier = sum(other.freeze_offset < freeze for other, _ in self._logs)
        self._logs.insert(earlier, (log, LifeState.GONE))

    def _life(self, index: int) -> Life:
        log, state = self._logs[index]
        start = log.first_offset if index else -1
        end = self._logs[index + 1][0].first_offset if index + 1 < len(self._logs) else None
        notes = [text for offset, text in self._notes if start <= offset and (end is None or offset < end)]
        return Life(log, state, self._beginning(log, state), self._stamps.get(log.first_offset), notes)

    def _beginning(self, log: FrozenLog, state: LifeState) -> Beginning:
        if state is LifeState.GONE:
            return Beginning.REMOVED
        if log.first_offset not in self._stamps:
            return Beginning.CARRIED
        # Retention takes the log from its start: what follows another record of the id, or opens its life, follows all.
        is_first = min(self._stamps) == log.first_offset
        if self.log_start <= 0 or log.dispatch is not None or not is_first:
            return Beginning.KEPT
        return self._beginning_by_ledger(log, state)

    def _beginning_by_ledger(self, log: FrozenLog, state: LifeState) -> Beginning:
        """Of a life that begins with the first record of the id that is left."""
        opened, frozen = self._decided.first_offset, self._decided.freeze_offset
        if log.first_offset <= frozen <= log.freeze_offset:
            return self._beginning_by_result(log)
        if 0 <= opened <= log.freeze_offset:
            return Beginning.REMOVED if opened < self.log_start else Beginning.KEPT
        if (
            log.first_offset > frozen
            and state is not LifeState.CLEARED
            and self.ledger.applied_offset >= self.log_start - 1
        ):
            return Beginning.KEPT  # a worker read what is gone, and no life of this id was open behind it
        return Beginning.DOUBTED if _names_missing_calls(log) else Beginning.UNKNOWN

    def _beginning_by_result(self, log: FrozenLog) -> Beginning:
        """Of the life whose result was published."""
        if Reason.INPUT_EXPIRED in self._decided.reasons:
            return Beginning.REMOVED
        if take_snapshot(log).id == self._decided.snapshot_id:
            return Beginning.KEPT
        other_limits = not log.faults.issubset(self._decided.reasons)
        return Beginning.UNKNOWN if other_limits else Beginning.DOUBTED


def _is_past(next_offset: int | None, offset: int) -> bool:
    return next_offset is None or next_offset > offset


def _names_missing_calls(log: FrozenLog) -> bool:
    recorded = {entry.model_call_id for entry in log.entries}
    named = {entry.parent_call_id for entry in log.entries if entry.parent_call_id is not None}
    named |= {entry.prompt_prefix.call_id for entry in log.entries if entry.prompt_prefix is not None}
    return not named <= recorded
