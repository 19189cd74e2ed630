"""Calls linked to the calls they continue: by evidence where a producer sent it, by the longest prefix elsewhere.

Calls are known by their index in the order that decides every tie, (prompt length, call id), in which a parent always
stands before its children. Nothing recurses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from freezepoint.core.prefixes import Node, is_prefix, nearest_ends
from freezepoint.core.snapshot import ResolvedCall
from freezepoint_schemas.reasons import NotDelivered

NONE = -1
"""The parent of a root."""


class How(Enum):
    """How a call got its parent, or why it has none."""

    ROOT = auto()
    """It continues no recorded call."""
    INFERRED = auto()
    """The parent is the call with the longest sequence that its prompt begins with."""
    AMBIGUOUS = auto()
    """As above, but several calls have that sequence."""
    VERIFIED = auto()
    """Its producer named the parent, and the tokens agree."""
    MISMATCH = auto()
    """Its producer named a parent whose sequence its prompt does not begin with: a root."""


class Link(NamedTuple):
    """``parent``: an index or ``NONE``. ``recovered``: a parent was named that has no tokens to check, so the prefix
    decided."""

    parent: int
    how: How
    recovered: bool = False


@dataclass(slots=True)
class Forest:
    """``aim``: the call that the main chain must end with, ``NONE`` without one; ``path``: it and its ancestors;
    ``after``: its descendants, which are set aside. ``quarantined``: index -> why."""

    calls: Sequence[ResolvedCall]
    links: list[Link]
    children: list[list[int]]
    quarantined: dict[int, NotDelivered] = field(default_factory=dict)
    aim: int = NONE
    path: frozenset[int] = frozenset()
    after: frozenset[int] = frozenset()

    def parent(self, index: int) -> int:
        return self.links[index].parent

    def is_continued(self, index: int) -> bool:
        """Whether a call counts as the kept one of a retry group because something goes on from it."""
        return any(
            child not in self.quarantined and child not in self.after for child in self.children[index]
        )

    def dead(self) -> list[bool]:
        """Whether each call is set aside: quarantined, after the terminal, or descending from such a call."""
        dead: list[bool] = []
        for index, link in enumerate(self.links):
            own = index in self.quarantined or index in self.after
            dead.append(own or (link.parent != NONE and dead[link.parent]))
        return dead

    def take_aim(self, index: int) -> None:
        """End the main chain at that call: nothing that follows it is judged any more."""
        path = [index]
        while (parent := self.parent(path[-1])) != NONE:
            path.append(parent)
        after: set[int] = set()
        for later in range(index + 1, len(self.calls)):
            if self.parent(later) == index or self.parent(later) in after:
                after.add(later)
                self.quarantined.pop(later, None)
        self.aim, self.path, self.after = index, frozenset(path), frozenset(after)


class Linker:
    """Finds parents among the calls with tokens. ``silent``: ids of recorded calls whose generation is empty."""

    def __init__(self, calls: Sequence[ResolvedCall]) -> None:
        self._calls = calls
        self._index = {call.call_id: index for index, call in enumerate(calls)}
        self._ending: defaultdict[Node, list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            self._ending[call.end_node].append(index)

    def links(self, calls: Sequence[ResolvedCall]) -> list[Link]:
        """Where each of these calls hangs; they need not be among the linker's own."""
        ends = nearest_ends((call.prompt_node for call in calls), self._ending.keys())
        return [self._link(call, end) for call, end in zip(calls, ends, strict=True)]

    def _link(self, call: ResolvedCall, end: Node | None) -> Link:
        named = call.entry.parent_call_id
        index = NONE if named is None else self._index.get(named, NONE)
        if index != NONE:
            if is_prefix(self._calls[index].end_node, call.prompt_node):
                return Link(index, How.VERIFIED)
            return Link(NONE, How.MISMATCH)
        recovered = named is not None
        if end is None:
            return Link(NONE, How.ROOT, recovered)
        candidates = self._ending[end]
        how = How.AMBIGUOUS if len(candidates) > 1 else How.INFERRED
        return Link(candidates[0], how, recovered)

    def forest(self) -> Forest:
        """All the linker's calls under the ones they continue; what continues several equal ones is quarantined."""
        forest = Forest(self._calls, self.links(self._calls), [[] for _ in self._calls])
        for index, link in enumerate(forest.links):
            if link.parent != NONE:
                forest.children[link.parent].append(index)
            if link.how is How.AMBIGUOUS:
                forest.quarantined[index] = NotDelivered.AMBIGUOUS_PARENT
        return forest


def resolve_retries(forest: Forest) -> list[int]:
    """Quarantine the retries that were not kept; returns the members of the groups that nothing decides.

    In the order of their result: sibling groups by their first member (the roots are siblings of each other), in each the
    prompts by their first member. Calls are decided before their children, so the quarantined children that a decision
    sees are the ambiguous ones. What comes after the terminal is not looked at.
    """
    siblings: dict[int, dict[Node, list[int]]] = {}
    for index, (link, call) in enumerate(zip(forest.links, forest.calls, strict=True)):
        if index not in forest.after:
            siblings.setdefault(link.parent, {}).setdefault(call.prompt_node, []).append(index)
    unresolved: list[int] = []
    for prompts in siblings.values():
        for members in prompts.values():
            if len(members) > 1:
                unresolved += _resolve_group(forest, members)
    return unresolved


def _resolve_group(forest: Forest, members: list[int]) -> list[int]:
    """Keep the member on the terminal's path, and every member that something goes on from: a side chain beside the
    main one, never lost in silence. Where there is neither, nothing decides."""
    kept = {index for index in members if index in forest.path or forest.is_continued(index)}
    for index in members:
        if index not in (kept or members[:1]):
            forest.quarantined.setdefault(index, NotDelivered.SUPERSEDED_RETRY)
    return [] if kept else members
