"""A frozen log: everything that was recorded of one life of a rollout, fixed by its freeze point.

Making it is cheap; what is expensive (resolving references, hashing, building) works on it later and elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from freezepoint_schemas.events import RolloutCancelled, RolloutClear, RolloutComplete, TokenEntry
from freezepoint_schemas.reasons import Reason


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Freezes a rollout for which nothing came for too long; no event says so, the worker does."""

    group_id: None = None
    group_size: None = None


@dataclass(frozen=True, slots=True)
class SpillRef:
    """Where entries of a log were put away: a stretch of a spool's segment."""

    segment: int
    offset: int
    length: int


Closing = RolloutComplete | RolloutCancelled | TimedOut
"""What can freeze a rollout."""


@dataclass(frozen=True, slots=True)
class FrozenLog:
    """One life of a rollout id, frozen.

    ``entries``: the first entry of each call id, in order of arrival, on which no result may depend.
    ``alternatives``: further entries of recorded call ids that differ at most in how the prompt is written; whether
    they are duplicates or conflicts shows once references are resolved. ``intents``, ``cancelled``: call ids.
    ``marks``: (call id or "", reason) of incomplete captures. ``faults``: reasons that lost, bad or conflicting
    records mask the rollout with. ``closing``: what froze it. ``dispatch``: the clear that opened the life,
    if one did. ``spilled``: where the rest of the entries are; see :meth:`with_entries`.
    ``memory_bytes``: about what the entries hold in memory. ``bodies``: body digests by call id, of the kept entries, as
    far as they are known; whoever needs another computes it.
    """

    rollout_id: str
    partition: int
    first_offset: int
    freeze_offset: int
    closing: Closing
    entries: tuple[TokenEntry, ...] = ()
    alternatives: tuple[TokenEntry, ...] = ()
    intents: frozenset[str] = frozenset()
    cancelled: frozenset[str] = frozenset()
    marks: frozenset[tuple[str, str]] = frozenset()
    faults: frozenset[Reason] = frozenset()
    dispatch: RolloutClear | None = None
    spilled: tuple[SpillRef, ...] = ()
    memory_bytes: int = field(default=0, compare=False)
    bodies: Mapping[str, bytes] = field(default_factory=dict, compare=False)

    def without_entries(self) -> FrozenLog:
        """What is left of it once its result is built."""
        return replace(self, entries=(), alternatives=(), spilled=(), memory_bytes=0, bodies={})

    def with_entries(self, entries: Iterable[TokenEntry]) -> FrozenLog:
        """The whole log, given the entries that were spilled: the first of each call id is the kept one."""
        kept = {entry.model_call_id: entry for entry in self.entries}
        alternatives = list(self.alternatives)
        for entry in entries:
            if entry.model_call_id in kept:
                alternatives.append(entry)
            else:
                kept[entry.model_call_id] = entry
        return replace(self, entries=tuple(kept.values()), alternatives=tuple(alternatives), spilled=())
