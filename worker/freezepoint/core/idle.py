"""Idle time: how long nothing came for a rollout while somebody was there to see it.

No wall clock tells that. An outage, a restart or a clock that jumps would time out rollouts that were never looked at.
So each partition has a clock of its own that runs only while the partition is assigned and caught up, and is saved with
its progress. Marks say which offsets had been applied by when, so that a replayed record gets its old place on the clock
(rounded up, in the rollout's favour).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter

MARKS_PER_TIMEOUT = 32
"""How finely replayed records are placed: to this fraction of the timeout."""


@dataclass(slots=True)
class IdleClock:
    """``now``: seconds that the partition was worked on and caught up, over all owners. ``marks``: (offset, seconds)."""

    timeout_s: float
    now: float = 0.0
    marks: list[tuple[int, float]] = field(default_factory=list)

    def advance(self, seconds: float) -> None:
        """The partition was caught up for so long."""
        self.now += max(0.0, seconds)

    def mark(self, next_offset: int) -> None:
        """Everything below this offset has been applied by now. Kept: few marks, and only those that still matter."""
        spacing = self.timeout_s / MARKS_PER_TIMEOUT
        if len(self.marks) > 1 and self.now - self.marks[-2][1] < spacing:
            self.marks.pop()  # the one before stands near enough
        self.marks.append((next_offset, self.now))
        while len(self.marks) > 1 and self.now - self.marks[1][1] > self.timeout_s:
            del self.marks[0]

    def placed(self, offset: int) -> float:
        """When the record at this offset was applied first, at the latest; now for one that never was."""
        if not self.marks or offset >= self.marks[-1][0]:
            return self.now
        return self.marks[bisect_right(self.marks, offset, key=itemgetter(0))][1]
