"""Which offset of a partition a restart must read from."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


class AckWatermark:
    """One partition's results, open from when they were read to when they are acknowledged, in whatever order.

    A result is named by the offset where it begins: a split one by its first part's, so that a restart reads all of it.
    Only offsets that were read are known; transaction markers and compaction leave gaps.
    """

    def __init__(self, start: int) -> None:
        self.position = start
        """After the last record read."""
        self._open: set[int] = set()
        self._lowest: list[int] = []  # a heap of all that is open, and of some that was

    def open(self, first_offset: int) -> None:
        """A result that begins there has been read and is not acknowledged yet."""
        if first_offset not in self._open:
            self._open.add(first_offset)
            heapq.heappush(self._lowest, first_offset)

    def ack(self, first_offset: int) -> bool:
        """Whether it was open."""
        if first_offset not in self._open:
            return False
        self._open.remove(first_offset)
        return True

    def low(self, first_incomplete: int | None = None) -> int:
        """The lowest offset that must be read again: of what is open, or of a value whose last parts are still to come."""
        while self._lowest and self._lowest[0] not in self._open:
            heapq.heappop(self._lowest)
        candidates = [self.position, *self._lowest[:1]]
        return min(candidates if first_incomplete is None else [*candidates, first_incomplete])

    def is_open(self, first_offset: int) -> bool:
        return first_offset in self._open

    @property
    def open_count(self) -> int:
        return len(self._open)


@dataclass(slots=True, eq=False)
class Claim:
    """What acknowledges one result: its place in the watermark of the partition as it was assigned then."""

    watermark: AckWatermark
    partition: int
    first_offset: int
