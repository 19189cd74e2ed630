"""What became of every result that a reader read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReaderCounts:
    """Nothing is dropped silently: ``read`` = ``delivered`` + all of ``skipped`` + ``revoked`` + what waits in the reader.

    ``read``: results read. ``delivered``: handed to the trainer, members of groups one by one. ``skipped``, each of them
    acknowledged by the reader itself, by why: ``masked``, ``stale``, ``repeated``, ``other_run``, ``late``, ``ungrouped``,
    ``superseded`` (by a later life of the same rollout in its group; acknowledged with the group).
    ``revoked``: read, and left unread by the trainer when their partition went to another reader.

    Beside that: ``masked`` and ``masked_by_reason`` (of all read, delivered or not; a result with two reasons counts under
    both), ``stale`` and ``unknown_version`` (of all handed out or skipped as stale), ``groups``, ``incomplete_groups`` and
    ``late_groups`` handed out, ``crowded_groups`` (handed out early since a limit was reached), ``undecodable`` records,
    ``expired_offsets`` (removed by retention before they were read), ``acked`` results, ``lost_acks`` (of partitions that
    had gone to another reader), ``failed_commits`` (tried again).
    """

    read: int = 0
    delivered: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    revoked: int = 0
    masked: int = 0
    masked_by_reason: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    unknown_version: int = 0
    groups: int = 0
    incomplete_groups: int = 0
    late_groups: int = 0
    crowded_groups: int = 0
    undecodable: int = 0
    expired_offsets: int = 0
    acked: int = 0
    lost_acks: int = 0
    failed_commits: int = 0
