"""Items as they are handed to the trainer: judged by the policy version of that moment, and counted."""

from __future__ import annotations

from dataclasses import replace

from freezepoint.reader.book import PartitionBook
from freezepoint.reader.counts import ReaderCounts
from freezepoint.reader.groups import ReadyGroup
from freezepoint.reader.options import ReadOptions
from freezepoint.reader.shelf import Item
from freezepoint.reader.trajectory import RolloutGroup, Trajectory


class Desk:
    """Where the trainer is served."""

    def __init__(self, options: ReadOptions, book: PartitionBook, counts: ReaderCounts) -> None:
        self._options = options
        self._book = book
        self.counts = counts

    def take_back(self, handed: Trajectory | RolloutGroup) -> None:
        """It was not handed over after all."""
        self._count(handed, -1)

    def hand_over(self, item: Item, version: int | None) -> Trajectory | RolloutGroup | None:
        """The item with its lags; None: it was too old and is skipped."""
        if isinstance(item, ReadyGroup):
            return self._group(item, version)
        trajectory = replace(item, lag=self._options.staleness.lag(item, version))
        if trajectory.stale and self._options.staleness.skip and not trajectory.masked:
            self.counts.stale += 1
            self.counts.skipped["stale"] += 1
            self._book.ack(trajectory.claim)
            return None
        self._count(trajectory, 1)
        return trajectory

    def _group(self, ready: ReadyGroup, version: int | None) -> RolloutGroup:
        rule = self._options.staleness
        members = sorted(
            (replace(member, lag=rule.lag(member, version)) for member in ready.members.values()),
            key=lambda member: member.rollout_id,
        )
        masked = [member for member in members if member.masked and not self._options.yield_masked]
        stale = [member for member in members if member.stale and rule.skip and not member.masked]
        aside = {id(member) for member in (*masked, *stale)}
        group = RolloutGroup(
            group_id=ready.group_id,
            results=tuple(member for member in members if id(member) not in aside),
            masked=tuple(masked),
            stale=tuple(stale),
            expected=ready.expected,
            missing=ready.missing,
            complete=ready.missing == 0 and not ready.late,
            late=ready.late,
            superseded=tuple(ready.superseded),
        )
        self.counts.crowded_groups += ready.crowded
        self._count(group, 1)
        return group

    def _count(self, handed: Trajectory | RolloutGroup, step: int) -> None:
        """``step`` -1 takes it back."""
        members = (handed,) if isinstance(handed, Trajectory) else handed.members
        self.counts.delivered += step * len(members)
        self.counts.stale += step * sum(member.stale for member in members)
        self.counts.unknown_version += step * sum(member.lag.unknown for member in members)
        if isinstance(handed, RolloutGroup):
            self.counts.groups += step
            self.counts.late_groups += step * handed.late
            self.counts.incomplete_groups += step * (not handed.complete and not handed.late)
            self.counts.skipped["superseded"] += step * len(handed.superseded)
