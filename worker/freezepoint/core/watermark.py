"""The low watermark: the lowest offset that a replay must still see."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

_STALE_MAX = 1_000


@dataclass(slots=True)
class Watermark:
    """A multiset of held offsets that knows its lowest: O(log n) amortised per hold, O(1) per release.

    Held are the first offset of every life that is open or whose result is not committed, and the offset of every
    dead letter and clear that is not committed.
    """

    _held: Counter[int] = field(default_factory=Counter)
    _heap: list[int] = field(default_factory=list)

    def hold(self, offset: int) -> None:
        """The watermark may not pass this offset."""
        if not self._held[offset]:
            heapq.heappush(self._heap, offset)
        self._held[offset] += 1
        if len(self._heap) > 2 * len(self._held) + _STALE_MAX:
            self._heap = sorted(self._held)  # what was released lies above one that is still held

    def release(self, offset: int) -> None:
        """Undo one :meth:`hold`; releasing what is not held is a bug of the caller."""
        count = self._held[offset]
        if count < 1:
            del self._held[offset]
            raise ValueError(f"offset {offset} is not held")
        if count == 1:
            del self._held[offset]
        else:
            self._held[offset] = count - 1

    def lowest(self, next_offset: int) -> int:
        """The lowest held offset, or the next offset to read where nothing below it is held: in a replay a carried life
        holds an offset that reading has not come to yet."""
        while self._heap and self._heap[0] not in self._held:
            heapq.heappop(self._heap)
        return min(self._heap[0], next_offset) if self._heap else next_offset
