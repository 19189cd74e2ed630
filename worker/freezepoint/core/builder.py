"""From resolved calls to paths worth training on: ``prefix_merging`` and ``per_request``.

Pure functions of their calls. Both expect them in the order that decides every tie, (prompt length, call
id), in which a parent always stands before its children. Nothing recurses: rollouts run to thousands of
turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from freezepoint.core.prefixes import Node, nearest_ends
from freezepoint.core.snapshot import ResolvedCall
from freezepoint_schemas.reasons import NotDelivered

MAIN = "main"
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class TracePath:
    """The ``length`` calls of one trace, from its root to its ``end``.

    They are walked when asked for: many traces may share a long stem.
    """

    role: str
    end: ResolvedCall
    length: int = 1
    parents: Mapping[ResolvedCall, ResolvedCall] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[ResolvedCall, ...]:
        path: list[ResolvedCall] = []
        call: ResolvedCall | None = self.end
        while call is not None:
            path.append(call)
            call = self.parents.get(call)
        return tuple(reversed(path))


@dataclass(frozen=True, slots=True, eq=False)
class BuildOutput:
    """What a builder makes of a rollout's calls.

    ``traces``: the main one first if there is one, then the other live ends in call order. ``chains``: the
    leaves of the paths without a quarantined call, a leaf being a call without any child; ``main`` is the
    leaf of the chosen one. ``roots`` counts all roots. ``quarantined``: call id -> why, for the quarantined
    calls themselves; ``not_delivered``: call id -> why, for every call in no trace. ``unresolved_retries``:
    the members of groups that nothing decides. ``captured``: generated tokens of all calls, ``delivered``:
    those of the main chain. ``left_out``: traces that a limit took away.
    """

    traces: tuple[TracePath, ...] = ()
    chains: tuple[ResolvedCall, ...] = ()
    main: ResolvedCall | None = None
    roots: int = 0
    quarantined: dict[str, NotDelivered] = field(default_factory=dict)
    not_delivered: dict[str, NotDelivered] = field(default_factory=dict)
    unresolved_retries: tuple[str, ...] = ()
    empty_generations: tuple[ResolvedCall, ...] = ()
    captured: int = 0
    delivered: int = 0
    left_out: int = 0


def per_request(calls: Sequence[ResolvedCall]) -> BuildOutput:
    """One trace per call, in call order; a call with an empty generation is a trace without a span."""
    tokens = sum(call.generated for call in calls)
    return BuildOutput(
        traces=tuple(TracePath(f"req-{number}", call) for number, call in enumerate(calls)),
        chains=tuple(calls),
        roots=len(calls),
        empty_generations=tuple(call for call in calls if not call.generated),
        captured=tokens,
        delivered=tokens,
    )


def prefix_merging(calls: Sequence[ResolvedCall]) -> BuildOutput:
    """Calls linked to the longest earlier call they continue; retries resolved; one path per surviving end.

    A call that continues two calls with the same sequence is quarantined, and so is a retry that nothing
    continues while something continues its sibling.
    """
    forest = _linked([call for call in calls if call.generated])
    unresolved = _resolve_retries(forest)
    dead = _dead(forest)
    chains = [index for index, children in enumerate(forest.children) if not children and not dead[index]]
    main = _oldest(forest, chains)
    traces = _traces(forest, main, _live_ends(forest, dead))
    empty = tuple(call for call in calls if not call.generated)
    return BuildOutput(
        traces=traces,
        chains=tuple(forest.calls[leaf] for leaf in chains),
        main=forest.calls[main] if main != _NONE else None,
        roots=forest.parents.count(_NONE),
        quarantined={
            forest.calls[index].call_id: reason for index, reason in sorted(forest.quarantined.items())
        },
        not_delivered=_not_delivered(forest, dead, empty),
        unresolved_retries=tuple(forest.calls[index].call_id for index in unresolved),
        empty_generations=empty,
        captured=sum(call.generated for call in forest.calls),
        delivered=sum(call.generated for call in traces[0].calls) if main != _NONE else 0,
    )


BUILDERS: dict[str, Callable[[Sequence[ResolvedCall]], BuildOutput]] = {
    "prefix_merging": prefix_merging,
    "per_request": per_request,
}


@dataclass(slots=True)
class _Forest:
    """Calls by their index in call order; ``_NONE`` is the parent of a root."""

    calls: Sequence[ResolvedCall]
    parents: list[int]
    children: list[list[int]]
    quarantined: dict[int, NotDelivered]


def _linked(calls: Sequence[ResolvedCall]) -> _Forest:
    """Each call under the one it continues: under the first, and quarantined, where several are equal."""
    ending: defaultdict[Node, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        ending[call.end_node].append(index)
    forest = _Forest(calls, [], [[] for _ in calls], {})
    for index, end in enumerate(nearest_ends((call.prompt_node for call in calls), ending.keys())):
        candidates = ending[end] if end is not None else [_NONE]
        forest.parents.append(candidates[0])
        if end is not None:
            forest.children[candidates[0]].append(index)
        if len(candidates) > 1:
            forest.quarantined[index] = NotDelivered.AMBIGUOUS_PARENT
    return forest


def _resolve_retries(forest: _Forest) -> list[int]:
    """Quarantine the retries that were not kept; returns the members of the groups that nothing decides.

    In the order of their result: sibling groups by their first member (the roots are siblings of each other),
    in each the prompts by their first member. Calls are decided before their children, so the quarantined
    children that a decision sees are the ambiguous ones.
    """
    siblings: dict[int, dict[Node, list[int]]] = {}
    for index, (parent, call) in enumerate(zip(forest.parents, forest.calls, strict=True)):
        siblings.setdefault(parent, {}).setdefault(call.prompt_node, []).append(index)
    unresolved: list[int] = []
    for prompts in siblings.values():
        for members in prompts.values():
            if len(members) > 1:
                unresolved += _resolve_group(forest, members)
    return unresolved


def _resolve_group(forest: _Forest, members: list[int]) -> list[int]:
    continued = [index for index in members if _is_continued(forest, index)]
    kept = set(continued or members[:1])
    for index in members:
        if index not in kept:
            forest.quarantined.setdefault(index, NotDelivered.SUPERSEDED_RETRY)
    return [] if continued else members


def _is_continued(forest: _Forest, index: int) -> bool:
    return any(child not in forest.quarantined for child in forest.children[index])


def _dead(forest: _Forest) -> list[bool]:
    """Whether each call is quarantined or descends from a quarantined one."""
    dead: list[bool] = []
    for index, parent in enumerate(forest.parents):
        dead.append(index in forest.quarantined or (parent != _NONE and dead[parent]))
    return dead


def _live_ends(forest: _Forest, dead: list[bool]) -> list[int]:
    return [
        index
        for index, children in enumerate(forest.children)
        if not dead[index] and all(dead[child] for child in children)
    ]


def _oldest(forest: _Forest, leaves: Sequence[int]) -> int:
    """The first of the leaves whose root is the oldest, by (creation, call id); ``_NONE`` without leaves."""
    roots: list[int] = []
    for index, parent in enumerate(forest.parents):
        roots.append(index if parent == _NONE else roots[parent])
    entries = [call.entry for call in forest.calls]
    return min(
        leaves,
        key=lambda leaf: (entries[roots[leaf]].created_at, entries[roots[leaf]].model_call_id),
        default=_NONE,
    )


def _traces(forest: _Forest, main: int, ends: list[int]) -> tuple[TracePath, ...]:
    lengths: list[int] = []
    for parent in forest.parents:
        lengths.append(1 if parent == _NONE else lengths[parent] + 1)
    calls, parents = forest.calls, forest.parents
    links = {calls[index]: calls[parent] for index, parent in enumerate(parents) if parent != _NONE}
    branches = ((f"branch-{number}", end) for number, end in enumerate(end for end in ends if end != main))
    named = [(MAIN, main), *branches] if main != _NONE else branches
    return tuple(TracePath(role, calls[end], lengths[end], links) for role, end in named)


def _not_delivered(
    forest: _Forest, dead: list[bool], empty: Sequence[ResolvedCall]
) -> dict[str, NotDelivered]:
    reasons = {
        call.call_id: forest.quarantined.get(index, NotDelivered.QUARANTINED_ANCESTOR)
        for index, call in enumerate(forest.calls)
        if dead[index]
    }
    return reasons | {call.call_id: NotDelivered.EMPTY_GENERATION for call in empty}
