"""From resolved calls to paths worth training on: ``prefix_merging`` and ``per_request``.

Pure functions of their calls and of the terminal, the call whose chain was scored. Both expect the calls in the order
that decides every tie, (prompt length, call id), in which a parent always stands before its children. Nothing recurses:
rollouts run to thousands of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from freezepoint.core.choices import PER_REQUEST, PREFIX_MERGING
from freezepoint.core.forest import NONE, Forest, How, Linker, resolve_retries
from freezepoint.core.snapshot import ResolvedCall
from freezepoint.core.terminal import Terminal
from freezepoint_schemas.reasons import NotDelivered, Reason

MAIN = "main"


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


@dataclass(frozen=True, slots=True)
class Parent:
    """Which call a call continues (None: it is a root), how that is known, and whether a parent was named that could
    not be checked."""

    call_id: str | None
    how: How
    recovered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BuildOutput:
    """What a builder makes of a rollout's calls.

    ``traces``: the main one first if there is one, then the other live ends in call order. ``chains``: the
    leaves of the paths without a quarantined call, a leaf being a call without any child; ``main`` is the
    leaf of the chosen one. ``aimed``: it was the terminal that chose, or failed to: ``failure`` says why there is no
    main chain then. ``links``: call id -> how it got its parent. ``roots`` counts all roots. ``quarantined``: call id -> why, for the quarantined
    calls themselves; ``not_delivered``: call id -> why, for every call in no trace. ``unresolved_retries``:
    the members of groups that nothing decides. ``captured``: generated tokens of all calls, ``delivered``:
    those of the main chain. ``left_out``: traces that a limit took away.
    """

    traces: tuple[TracePath, ...] = ()
    chains: tuple[ResolvedCall, ...] = ()
    main: ResolvedCall | None = None
    aimed: bool = False
    failure: Reason | None = None
    links: dict[str, Parent] = field(default_factory=dict)
    roots: int = 0
    quarantined: dict[str, NotDelivered] = field(default_factory=dict)
    not_delivered: dict[str, NotDelivered] = field(default_factory=dict)
    unresolved_retries: tuple[str, ...] = ()
    empty_generations: tuple[ResolvedCall, ...] = ()
    captured: int = 0
    delivered: int = 0
    left_out: int = 0


def per_request(calls: Sequence[ResolvedCall], terminal: Terminal | None = None) -> BuildOutput:  # noqa: ARG001
    """One trace per call, in call order; a call with an empty generation is a trace without a span. Which call was the
    last changes nothing."""
    tokens = sum(call.generated for call in calls)
    return BuildOutput(
        traces=tuple(TracePath(f"req-{number}", call) for number, call in enumerate(calls)),
        chains=tuple(calls),
        roots=len(calls),
        empty_generations=tuple(call for call in calls if not call.generated),
        captured=tokens,
        delivered=tokens,
    )


def prefix_merging(calls: Sequence[ResolvedCall], terminal: Terminal | None = None) -> BuildOutput:
    """Calls linked to the one they continue; retries resolved; one path per surviving end.

    A call that continues two calls with the same sequence is quarantined, and so is a retry that nothing
    continues while something continues its sibling. With a terminal, the path to it is the main chain, and what
    continues it is set aside.
    """
    linker = Linker([call for call in calls if call.generated])
    forest = linker.forest()
    failure = _take_aim(forest, linker, calls, terminal)
    aimed = forest.aim != NONE or failure is not None
    unresolved = resolve_retries(forest)
    dead = forest.dead()
    chains = [index for index in _leaves(forest) if not dead[index]]
    main = _oldest(forest, chains) if not aimed else NONE
    if forest.aim != NONE and not dead[forest.aim]:
        main = forest.aim
    elif forest.aim != NONE:
        failure = Reason.NO_SAFE_CHAIN
    traces = _traces(forest, main, _live_ends(forest, dead))
    empty = tuple(call for call in calls if not call.generated)
    return BuildOutput(
        traces=traces,
        chains=tuple(forest.calls[leaf] for leaf in chains),
        main=forest.calls[main] if main != NONE else None,
        aimed=aimed,
        failure=failure,
        links=_parents(forest),
        roots=sum(link.parent == NONE for link in forest.links),
        quarantined={
            forest.calls[index].call_id: reason for index, reason in sorted(forest.quarantined.items())
        },
        not_delivered=_not_delivered(forest, dead, empty),
        unresolved_retries=tuple(forest.calls[index].call_id for index in unresolved),
        empty_generations=empty,
        captured=sum(call.generated for call in forest.calls),
        delivered=sum(call.generated for call in traces[0].calls) if main != NONE else 0,
    )


BUILDERS: dict[str, Callable[[Sequence[ResolvedCall], Terminal | None], BuildOutput]] = {
    PREFIX_MERGING: prefix_merging,
    PER_REQUEST: per_request,
}


def _take_aim(
    forest: Forest, linker: Linker, calls: Sequence[ResolvedCall], terminal: Terminal | None
) -> Reason | None:
    """Aim at the terminal, or at the parent of one that generated nothing. Returns why there is no chain to aim at;
    a terminal that is not recorded chooses nothing (its rollout is masked for that)."""
    if terminal is None or (terminal.call_id is None and not terminal.is_unclear):
        return None
    call = next((call for call in calls if call.call_id == terminal.call_id), None)
    if call is None:  # unclear, or its prompt cannot be told
        return Reason.NO_SAFE_CHAIN
    if call.generated:
        forest.take_aim(forest.calls.index(call))
        return None
    (link,) = linker.links([call])
    if link.parent == NONE:
        return Reason.NO_TRAINABLE_TOKENS
    if link.how is How.AMBIGUOUS:
        return Reason.NO_SAFE_CHAIN
    forest.take_aim(link.parent)
    return None


def _leaves(forest: Forest) -> list[int]:
    """The calls without any child, but for what was set aside behind the terminal."""
    return [
        index
        for index, children in enumerate(forest.children)
        if index not in forest.after and (index == forest.aim or not children)
    ]


def _live_ends(forest: Forest, dead: list[bool]) -> list[int]:
    return [
        index
        for index, children in enumerate(forest.children)
        if not dead[index] and all(dead[child] for child in children)
    ]


def _oldest(forest: Forest, leaves: Sequence[int]) -> int:
    """The first of the leaves whose root is the oldest, by (creation, call id); ``NONE`` without leaves."""
    roots: list[int] = []
    for index, link in enumerate(forest.links):
        roots.append(index if link.parent == NONE else roots[link.parent])
    entries = [call.entry for call in forest.calls]
    return min(
        leaves,
        key=lambda leaf: (entries[roots[leaf]].created_at, entries[roots[leaf]].model_call_id),
        default=NONE,
    )


def _traces(forest: Forest, main: int, ends: list[int]) -> tuple[TracePath, ...]:
    lengths: list[int] = []
    for link in forest.links:
        lengths.append(1 if link.parent == NONE else lengths[link.parent] + 1)
    calls = forest.calls
    parents = {
        call: calls[link.parent]
        for call, link in zip(calls, forest.links, strict=True)
        if link.parent != NONE
    }
    branches = ((f"branch-{number}", end) for number, end in enumerate(end for end in ends if end != main))
    named = [(MAIN, main), *branches] if main != NONE else branches
    return tuple(TracePath(role, calls[end], lengths[end], parents) for role, end in named)


def _parents(forest: Forest) -> dict[str, Parent]:
    return {
        call.call_id: Parent(
            forest.calls[link.parent].call_id if link.parent != NONE else None, link.how, link.recovered
        )
        for call, link in zip(forest.calls, forest.links, strict=True)
    }


def _not_delivered(
    forest: Forest, dead: list[bool], empty: Sequence[ResolvedCall]
) -> dict[str, NotDelivered]:
    reasons = {
        call.call_id: (
            NotDelivered.AFTER_TERMINAL
            if index in forest.after
            else forest.quarantined.get(index, NotDelivered.QUARANTINED_ANCESTOR)
        )
        for index, call in enumerate(forest.calls)
        if dead[index]
    }
    return reasons | {call.call_id: NotDelivered.EMPTY_GENERATION for call in empty}
