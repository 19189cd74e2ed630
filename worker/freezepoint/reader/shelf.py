"""What is ready for the trainer: single results, or groups of them. One interface for both, for the engine."""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeAlias

from freezepoint.reader.groups import GroupAssembler, ReadyGroup, Why
from freezepoint.reader.trajectory import Trajectory

Item: TypeAlias = Trajectory | ReadyGroup


class Shelf(Protocol):
    """Takes results in and gives items out, each in its own order."""

    @property
    def waiting(self) -> tuple[int, int]:
        """Results that are ready, and their bytes."""
        ...

    def add(self, trajectory: Trajectory, now_s: float) -> Why | None:
        """Take a result in; the reason if it is not kept."""
        ...

    def expire(self, now_s: float) -> None: ...

    def flush(self) -> None: ...

    def next_deadline_s(self) -> float | None: ...

    def pop(self) -> Item | None: ...

    def put_back(self, item: Item) -> None:
        """What was popped last and not handed over after all."""
        ...

    def drop(self, partitions: frozenset[int]) -> int:
        """Forget what lies on these partitions; how many results that were."""
        ...


class SingleShelf:
    """Results one by one, in the order they were read."""

    def __init__(self) -> None:
        self._ready: deque[Trajectory] = deque()
        self._bytes = 0

    @property
    def waiting(self) -> tuple[int, int]:
        return len(self._ready), self._bytes

    def add(self, trajectory: Trajectory, _now_s: float) -> Why | None:
        self._ready.append(trajectory)
        self._bytes += trajectory.size_bytes
        return None

    def expire(self, _now_s: float) -> None:
        """Nothing here has a deadline."""

    def flush(self) -> None:
        """Nothing here waits for anything."""

    def next_deadline_s(self) -> float | None:
        return None

    def pop(self) -> Item | None:
        if not self._ready:
            return None
        trajectory = self._ready.popleft()
        self._bytes -= trajectory.size_bytes
        return trajectory

    def put_back(self, item: Item) -> None:
        assert isinstance(item, Trajectory)
        self._ready.appendleft(item)
        self._bytes += item.size_bytes

    def drop(self, partitions: frozenset[int]) -> int:
        kept = [trajectory for trajectory in self._ready if trajectory.partition not in partitions]
        dropped = len(self._ready) - len(kept)
        self._ready = deque(kept)
        self._bytes = sum(trajectory.size_bytes for trajectory in kept)
        return dropped


class GroupShelf:
    """Groups, in the order they became ready."""

    def __init__(self, assembler: GroupAssembler) -> None:
        self._assembler = assembler

    @property
    def waiting(self) -> tuple[int, int]:
        results = [result for group in self._assembler.ready for result in group.everything]
        return len(results), sum(result.size_bytes for result in results)

    def add(self, trajectory: Trajectory, now_s: float) -> Why | None:
        return self._assembler.add(trajectory, now_s)

    def expire(self, now_s: float) -> None:
        self._assembler.expire(now_s)

    def flush(self) -> None:
        self._assembler.flush()

    def next_deadline_s(self) -> float | None:
        return self._assembler.next_deadline_s()

    def pop(self) -> Item | None:
        return self._assembler.ready.popleft() if self._assembler.ready else None

    def put_back(self, item: Item) -> None:
        assert isinstance(item, ReadyGroup)
        self._assembler.ready.appendleft(item)

    def drop(self, _partitions: frozenset[int]) -> int:
        """Everything: a group lies on many partitions, and half of it is worth nothing."""
        return self._assembler.clear()
