"""A frozen log: everything that was recorded of one life of a rollout, fixed by its freeze point.

Making it is cheap; what is expensive (resolving references, hashing, building) works on it later and elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from freezepoint_schemas.events import RolloutCancelled, RolloutClear, RolloutComplete, TokenEntry
from freezepoint_schemas.reasons import Reason


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Freezes a rollout for which nothing came for too long; no event says so, the worker does."""

    group_id: None = None
    group_size: None = None


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
    if one did.
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
