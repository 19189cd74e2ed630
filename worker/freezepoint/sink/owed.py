"""Incomplete marks that the broker has not taken yet. A lost mark is the one loss that nobody would notice, so they are
kept, sent along with whatever of their rollout comes next, and tried again by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from freezepoint.core.records import OutputRecord

MARKS_MAX = 100_000


class OwedMarks:
    """Marks by rollout, the oldest ones given up beyond ``MARKS_MAX``."""

    def __init__(self) -> None:
        self._marks: dict[OutputRecord, None] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def owe(self, mark: OutputRecord) -> OutputRecord | None:
        """Keep a mark. Returns the one that was given up for it, if any."""
        self._marks[mark] = None
        if len(self._marks) <= MARKS_MAX:
            return None
        oldest = next(iter(self._marks))
        del self._marks[oldest]
        return oldest

    def of(self, rollout_id: str) -> list[OutputRecord]:
        """What is owed for that rollout."""
        if not self._marks:
            return []
        key = rollout_id.encode("ascii")
        return [mark for mark in self._marks if mark.key == key]

    def all(self) -> list[OutputRecord]:
        return list(self._marks)

    def settle(self, marks: Iterable[OutputRecord]) -> None:
        """These are durable now, or not wanted any more."""
        for mark in marks:
            self._marks.pop(mark, None)

    def rollout_ids(self) -> list[str]:
        return sorted({(mark.key or b"").decode("ascii") for mark in self._marks})
