"""What is decided about every rollout id of one partition: the ledger as read, and what waits to be written to it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from freezepoint.core.frozen import FrozenLog
from freezepoint_schemas import codec
from freezepoint_schemas.ledger import Carried, LedgerRecord
from freezepoint_schemas.reasons import Reason
from freezepoint_schemas.results import Result


@dataclass(frozen=True, slots=True)
class Decided:
    """One id's ledger record in memory (see ``LedgerRecord`` for the fields)."""

    freeze_offset: int = -1
    clear_offset: int = -1
    first_offset: int = -1
    snapshot_id: str | None = None
    masked: bool | None = None
    reasons: tuple[Reason, ...] = ()
    carried: Carried | None = None

    @classmethod
    def of(cls, record: LedgerRecord) -> Decided:
        return cls(
            record.freeze_offset,
            record.clear_offset,
            record.first_offset,
            record.snapshot_id,
            None if record.outcome is None else record.outcome == "masked",
            tuple(record.reasons),
            record.carried,
        )

    def record(self) -> LedgerRecord:
        return LedgerRecord(
            freeze_offset=self.freeze_offset,
            clear_offset=self.clear_offset,
            first_offset=self.first_offset,
            snapshot_id=self.snapshot_id,
            outcome=None if self.masked is None else "masked" if self.masked else "delivered",
            reasons=list(self.reasons),
            carried=self.carried,
        )


_UNKNOWN = Decided()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ledger says of a result."""

    snapshot_id: str
    masked: bool
    reasons: tuple[Reason, ...]

    @classmethod
    def of(cls, result: Result) -> Verdict:
        return cls(result.snapshot.id, result.mask_sample, tuple(result.reasons))


@dataclass(slots=True)
class LedgerBook:
    """Decisions by rollout id: the committed ones, and on top of them freezes and clears that are not committed yet.

    A clear is written only when no freeze of its id waits: one that overtook the freeze before it would make that
    life's records look late in a replay. Nor is one written that ends a carried life before the dead letters in front of it
    are published: of a value in parts, the first of which were carried, a replay would not make the letter again.
    """

    decided: dict[str, Decided] = field(default_factory=dict)
    _freezes: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _clears: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _first_offsets: dict[str, int] = field(default_factory=dict)
    _decided_now: set[str] = field(default_factory=set)
    _dropped_keys: list[bytes] = field(default_factory=list)

    def holds_clears(self, unpublished_from: int | None) -> bool:
        """Whether a clear waits to be recorded and could be now.

        :param unpublished_from: offset of the first dead letter that is not published yet.
        """
        return any(self._may_settle(rollout_id, unpublished_from) for rollout_id in self._clears)

    def freeze_offset(self, rollout_id: str) -> int:
        """The last freeze's offset, committed or not; -1 without one."""
        waiting = self._freezes.get(rollout_id)
        return waiting[-1] if waiting else self.decided.get(rollout_id, _UNKNOWN).freeze_offset

    def frozen_at(self, rollout_id: str, offset: int) -> bool:
        """Whether a record at this offset comes after a freeze that no clear followed."""
        freeze = self.freeze_offset(rollout_id)
        if freeze < 0:
            return False
        clears = (*self._clears.get(rollout_id, ()), self.decided.get(rollout_id, _UNKNOWN).clear_offset)
        return not any(freeze < clear < offset for clear in clears)

    def opened(self, rollout_id: str, first_offset: int) -> None:
        """A life opened; written with the next transaction."""
        self._first_offsets[rollout_id] = first_offset

    def froze(self, rollout_id: str, offset: int) -> None:
        """A life froze; its decision comes with its result."""
        self._freezes[rollout_id].append(offset)
        self._first_offsets[rollout_id] = -1

    def cleared(self, rollout_id: str, offset: int) -> bool:
        """A clear came. False where nothing is known of the id, so that nothing needs to be recorded."""
        known = self.decided.get(rollout_id)
        if known is None and rollout_id not in self._freezes and rollout_id not in self._first_offsets:
            return False
        self._first_offsets[rollout_id] = -1
        if known is not None and offset == known.clear_offset and not _ends(known.carried, offset):
            return False  # replayed, recorded already
        self._clears[rollout_id].append(offset)
        return True

    def decide(self, log: FrozenLog, verdict: Verdict) -> None:
        """A result goes out with the transaction being made, and its ledger record with it."""
        waiting = self._freezes[log.rollout_id]
        first = waiting.popleft()
        if first != log.freeze_offset:
            raise ValueError(f"results out of order: freeze {first} waits, {log.freeze_offset} came")
        if not waiting:
            del self._freezes[log.rollout_id]
        before = self.decided.get(log.rollout_id, _UNKNOWN)
        self.decided[log.rollout_id] = replace(
            before,
            freeze_offset=log.freeze_offset,
            first_offset=-1,
            snapshot_id=verdict.snapshot_id,
            masked=verdict.masked,
            reasons=verdict.reasons,
            carried=None,
        )
        self._drop_carried(log.rollout_id, before.carried)
        self._decided_now.add(log.rollout_id)

    def changed(
        self, release: Callable[[int], None], unpublished_from: int | None
    ) -> Iterator[tuple[str, bytes]]:
        """Take the ids whose record changed, with the encoded record; ``release`` gets the clears thereby recorded.

        :param unpublished_from: offset of the first dead letter that this transaction leaves unpublished.
        """
        for rollout_id in sorted(self._decided_now | self._first_offsets.keys() | self._clears.keys()):
            if self._may_settle(rollout_id, unpublished_from):
                self._settle(rollout_id, release)
            elif rollout_id not in self._decided_now:
                continue  # all that is new of it waits for its result, or for dead letters
            yield rollout_id, codec.encode_ledger(self.decided[rollout_id].record())
        self._decided_now.clear()

    def carry(self, rollout_id: str, first_offset: int, through: int, chunks: int) -> Carried:
        """The open life's log goes into the ledger with the transaction being made, and replaces what was there of it."""
        before = self.decided.get(rollout_id, _UNKNOWN)
        generation = before.carried.generation + 1 if before.carried else 0
        carried = Carried(through=through, generation=generation, chunks=chunks)
        self._drop_carried(rollout_id, before.carried)
        self.decided[rollout_id] = replace(before, carried=carried)
        self._first_offsets[rollout_id] = first_offset
        return carried

    def waits(self, rollout_id: str) -> bool:
        """Whether a freeze of this id is not committed yet."""
        return rollout_id in self._freezes

    def dropped_keys(self) -> list[bytes]:
        """Take the keys of carried chunks that nobody needs any more; they are tombstoned."""
        keys, self._dropped_keys = self._dropped_keys, []
        return keys

    def _drop_carried(self, rollout_id: str, carried: Carried | None) -> None:
        """A life's result or clear goes out: what was carried of it is worthless. No older life's result can follow: a
        life is carried only while no freeze of its id waits."""
        if carried is not None:
            self._dropped_keys += carried.keys(rollout_id)

    def _may_settle(self, rollout_id: str, unpublished_from: int | None) -> bool:
        return not self.waits(rollout_id) and not self._needs_letters(rollout_id, unpublished_from)

    def _needs_letters(self, rollout_id: str, unpublished_from: int | None) -> bool:
        if unpublished_from is None:
            return False
        carried = self.decided.get(rollout_id, _UNKNOWN).carried
        clears = self._clears.get(rollout_id, ())
        return any(clear > unpublished_from and _ends(carried, clear) for clear in clears)

    def _settle(self, rollout_id: str, release: Callable[[int], None]) -> None:
        before = self.decided.get(rollout_id, _UNKNOWN)
        clears = self._clears.pop(rollout_id, [])
        carried = before.carried
        if carried is not None and any(_ends(carried, clear) for clear in clears):
            self._drop_carried(rollout_id, carried)
            carried = None
        self.decided[rollout_id] = replace(
            before,
            clear_offset=_first_after(before.freeze_offset, [before.clear_offset, *clears]),
            first_offset=self._first_offsets.pop(rollout_id, before.first_offset),
            carried=carried,
        )
        for clear in clears:
            release(clear)

    def open_before(self, log_start: int) -> list[tuple[str, Decided]]:
        """The ids whose open life, by the ledger, began before that offset."""
        return [
            (rollout_id, decided)
            for rollout_id, decided in self.decided.items()
            if 0 <= decided.first_offset < log_start
            and (decided.carried is None or decided.carried.through < log_start - 1)
        ]


def _ends(carried: Carried | None, clear: int) -> bool:
    """Whether a clear at this offset ends the life that was carried."""
    return carried is not None and clear > carried.through


def _first_after(freeze_offset: int, clears: list[int]) -> int:
    """The first clear after a freeze; -1 where none is. Records behind it are live, whatever clears came later."""
    return min((clear for clear in clears if clear > freeze_offset), default=-1)
