"""Prompt groups from results as they come. No clock, no I/O: times are values."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from freezepoint.errors import ConfigurationError
from freezepoint.reader.trajectory import Trajectory

Late: TypeAlias = Literal["drop", "yield"]
Ungrouped: TypeAlias = Literal["single", "drop"]
Why: TypeAlias = Literal["late", "ungrouped"]


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How results become groups.

    ``size``: rollouts a group; None: each result's own ``group_size`` (the largest named). ``deadline_s``: seconds from a
    group's first result until it is handed out as it is; None: it waits until it is complete. ``late``: what becomes of
    results of a group that was handed out incomplete: ``drop`` (counted, acknowledged) or ``yield`` as a late group.
    ``ungrouped``: what becomes of a result without a group id: ``single`` (a group of one) or ``drop``.
    """

    size: int | None = None
    deadline_s: float | None = None
    late: Late = "drop"
    ungrouped: Ungrouped = "single"

    def __post_init__(self) -> None:
        """:raises ConfigurationError: a size or deadline that no group can meet, or an unknown word."""
        if self.size is not None and self.size < 1:
            raise ConfigurationError("size must be at least 1")
        if self.deadline_s is not None and not self.deadline_s >= 0:
            raise ConfigurationError("deadline must be a number of seconds, at least 0")
        if self.late not in ("drop", "yield"):
            raise ConfigurationError("late must be 'drop' or 'yield'")
        if self.ungrouped not in ("single", "drop"):
            raise ConfigurationError("ungrouped must be 'single' or 'drop'")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What may be held of groups that are not complete, and how many that were handed out incomplete are remembered."""

    results_max: int
    bytes_max: int
    remembered_max: int


@dataclass(slots=True)
class ReadyGroup:
    """A group to hand out: its members by rollout id, and the results of their earlier lives."""

    group_id: str | None
    members: dict[str, Trajectory]
    superseded: list[Trajectory]
    expected: int | None
    late: bool = False
    crowded: bool = False

    @property
    def missing(self) -> int | None:
        return None if self.expected is None else max(0, self.expected - len(self.members))

    @property
    def everything(self) -> list[Trajectory]:
        return [*self.members.values(), *self.superseded]


@dataclass(slots=True)
class _Pending:
    since_s: float
    expected: int | None
    members: dict[str, Trajectory] = field(default_factory=dict)
    superseded: list[Trajectory] = field(default_factory=list)

    @property
    def everything(self) -> Iterable[Trajectory]:
        return [*self.members.values(), *self.superseded]


@dataclass(slots=True)
class _Emitted:
    """A group handed out incomplete: how many are still to come, None where nobody knows, and which rollouts have come."""

    missing: int | None
    rollouts: set[str]


class GroupAssembler:
    """Collects results by ``group_id``; a group is ready when it has as many distinct rollouts as its size, when its
    deadline has passed, or, the oldest first, when a limit is reached.

    Whether a result is masked makes no difference here: its rollout is over. A second result of the same rollout id (a
    later life) takes the first one's place while the group waits. A group id names one group: after a group was complete
    the same id begins a new one; after it was handed out incomplete, as many results as were missing are late.
    """

    def __init__(self, rule: GroupRule, limits: GroupLimits) -> None:
        self.rule = rule
        self.ready: deque[ReadyGroup] = deque()
        self._limits = limits
        self._pending: OrderedDict[str, _Pending] = (
            OrderedDict()
        )  # in the order of their first results, so of deadlines
        self._emitted: OrderedDict[str, _Emitted] = OrderedDict()
        self._held = 0
        self._held_bytes = 0

    @property
    def held(self) -> int:
        """Results in groups that wait."""
        return self._held

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def add(self, trajectory: Trajectory, now_s: float) -> Why | None:
        """Take a result in; the reason if it is not kept, in which case the caller acknowledges it.

        :raises ConfigurationError: nobody says how large its group is, and there is no deadline.
        """
        group_id = trajectory.group_id
        if group_id is None:
            return self._add_ungrouped(trajectory)
        emitted = self._emitted.get(group_id)
        if emitted is not None:
            return self._add_late(group_id, emitted, trajectory)
        self._add_to(group_id, trajectory, now_s)
        return None

    def expire(self, now_s: float) -> None:
        """Make ready what has waited for its deadline."""
        deadline_s = self.rule.deadline_s
        if deadline_s is None:
            return
        while self._pending:
            group_id, pending = next(iter(self._pending.items()))
            if now_s - pending.since_s < deadline_s:
                return
            self._emit(group_id)

    def flush(self) -> None:
        """Make everything ready: nothing more will come."""
        while self._pending:
            self._emit(next(iter(self._pending)))

    def next_deadline_s(self) -> float | None:
        """When :meth:`expire` has something to do."""
        if self.rule.deadline_s is None or not self._pending:
            return None
        return next(iter(self._pending.values())).since_s + self.rule.deadline_s

    def clear(self) -> int:
        """Forget everything; how many results that were."""
        dropped = self._held + sum(len(group.everything) for group in self.ready)
        self.ready.clear()
        self._pending.clear()
        self._emitted.clear()
        self._held = self._held_bytes = 0
        return dropped

    def _add_ungrouped(self, trajectory: Trajectory) -> Why | None:
        if self.rule.ungrouped == "drop":
            return "ungrouped"
        self.ready.append(ReadyGroup(None, {trajectory.rollout_id: trajectory}, [], 1))
        return None

    def _add_late(self, group_id: str, emitted: _Emitted, trajectory: Trajectory) -> Why | None:
        is_new = trajectory.rollout_id not in emitted.rollouts
        emitted.rollouts.add(trajectory.rollout_id)
        if (
            emitted.missing is not None and is_new
        ):  # a later life of one that has come is not the one that is missing
            emitted.missing -= 1
            if emitted.missing <= 0:
                del self._emitted[group_id]
        if self.rule.late == "drop":
            return "late"
        expected = None if emitted.missing is None else emitted.missing + 1
        self.ready.append(ReadyGroup(group_id, {trajectory.rollout_id: trajectory}, [], expected, late=True))
        return None

    def _add_to(self, group_id: str, trajectory: Trajectory, now_s: float) -> None:
        size = self.rule.size if self.rule.size is not None else trajectory.result.group_size
        pending = self._pending.get(group_id)
        if pending is None:
            if size is None and self.rule.deadline_s is None:
                raise ConfigurationError(
                    f"rollout {trajectory.rollout_id} is of group {group_id}, whose size nobody names: give groups() a size "
                    "or a deadline, or group_size with the complete event"
                )
            pending = self._pending[group_id] = _Pending(now_s, size)
        elif size is not None:
            pending.expected = max(size, pending.expected or 0)
        earlier = pending.members.get(trajectory.rollout_id)
        if earlier is not None:
            pending.superseded.append(earlier)
        pending.members[trajectory.rollout_id] = trajectory
        self._held += 1
        self._held_bytes += trajectory.size_bytes
        if pending.expected is not None and len(pending.members) >= pending.expected:
            self._emit(group_id)
        while self._held > self._limits.results_max or self._held_bytes > self._limits.bytes_max:
            self._emit(next(iter(self._pending)), crowded=True)

    def _emit(self, group_id: str, *, crowded: bool = False) -> None:
        pending = self._pending.pop(group_id)
        for member in pending.everything:
            self._held -= 1
            self._held_bytes -= member.size_bytes
        group = ReadyGroup(group_id, pending.members, pending.superseded, pending.expected, crowded=crowded)
        self.ready.append(group)
        if group.missing != 0:
            self._emitted[group_id] = _Emitted(group.missing, set(group.members))
            if len(self._emitted) > self._limits.remembered_max:
                self._emitted.popitem(last=False)
